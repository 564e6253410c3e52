"""Clients that do not read or send, and repeated signals."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from mlxspec.server import connections
from mlxspec.server.connections import HttpServer


async def answer_long(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads a body and then writes until the client disconnects."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0)

    await Request(scope, receive).body()
    await StreamingResponse(endless())(scope, receive, send)


@contextmanager
def served_at(patience: float) -> Iterator[tuple[HttpServer, tuple[str, int]]]:
    """Run a server of this application; yield it and its address."""
    server = HttpServer(answer_long, grace=0.0, patience=patience)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield server, listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.mark.slow
def test_who_does_not_send_or_read_is_left_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_LOOK", 0)
    waiting = [
        b"",
        b"GET / HTTP/1.1\r\nHost",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n.",
    ]
    asking = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    with served_at(patience=0.5) as (server, address), ExitStack() as clients:

        def connect(sent: bytes) -> socket.socket:
            client = clients.enter_context(socket.create_connection(address, 10))
            client.sendall(sent)
            return client

        reader = connect(asking)
        silent = [*map(connect, waiting), connect(asking)]  # the last one reads nothing
        end = time.monotonic() + 10
        while len(server.server_state.connections) < 1 + len(silent):
            assert time.monotonic() < end
        while len(server.server_state.connections) > 1:
            assert reader.recv(1 << 16)
            assert time.monotonic() < end
        for _ in range(1000):
            assert reader.recv(1 << 16)


def test_beyond_the_most_connections_only_health_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_MOST", 2)
    with served_at(patience=10) as (server, address), ExitStack() as clients:

        def connect(request: bytes) -> socket.socket:
            client = clients.enter_context(socket.create_connection(address, 10))
            client.sendall(request)
            return client

        def connected(number: int) -> None:
            end = time.monotonic() + 10
            while len(server.server_state.connections) != number:
                assert time.monotonic() < end
                time.sleep(0.01)

        silent = [connect(b""), connect(b"")]
        connected(2)
        refused = connect(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b"".join(iter(partial(refused.recv, 1 << 16), b""))  # until it is closed
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"message":"the server has more than 1,024 connections: send' in answer
        health = connect(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert health.recv(12) == b"HTTP/1.1 200"
        silent[0].close()
        health.close()
        connected(1)
        assert connect(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").recv(12) == b"HTTP/1.1 200"


def test_an_offer_of_http_2_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Java's client sends it with each request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    with served_at(patience=10.0) as (_, address), socket.create_connection(address, 10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + offer + b"\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
    assert not caplog.records


def test_only_faults_have_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    HttpServer(answer_long, grace=1.0)
    log = logging.getLogger("uvicorn.error")
    for error in (asyncio.CancelledError(), ValueError("a"), ValueError("b")):
        log.error("Exception in ASGI application\n", exc_info=error)
    errors = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in errors] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ((256, resource.RLIM_INFINITY), 2048),
        ((256, 4096), 2048),
        ((256, 1000), 1000),
        ((4096, 4096), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_as_many_files_as_connections_may_be_open(
    given: tuple[int, int], most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: given)
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    HttpServer(answer_long, grace=1.0)
    assert limits == ([] if most is None else [(most, given[1])])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_counts_even_while_the_first_is_reported(number: int) -> None:
    def second() -> None:
        server.handle_exit(number, None)

    server = HttpServer(answer_long, grace=1.0, on_exit=second)
    server.handle_exit(number, None)
    assert server.should_exit
    assert server.force_exit
