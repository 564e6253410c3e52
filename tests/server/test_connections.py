"""Clients that do not read, and signals that come twice."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from typing import Any

import pytest

from mlxspec.server import connections
from mlxspec.server.connections import HttpServer


async def answer_long(scope: Any, receive: Any, send: Any) -> None:
    """An application that writes for as long as the client is there."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})


@pytest.mark.parametrize("reads", [True, False])
def test_who_stops_reading_its_answer_is_left(reads: bool) -> None:
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1
        await asyncio.sleep(0.001 if reads or sent < 10 else 3600)

    async def ask() -> None:
        app: Any = HttpServer(answer_long, unread=0.2).config.app
        await asyncio.wait_for(app({"type": "http"}, None, send), 1)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    assert (sent > 100) == reads


def test_a_message_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_next_time", {})  # of messages of the last minute
    HttpServer(answer_long)
    for _ in range(100):
        logging.getLogger("uvicorn.error").warning("Exceeded concurrency limit.")
    assert caplog.messages == ["Exceeded concurrency limit."]


def test_only_faults_have_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    HttpServer(answer_long)
    log = logging.getLogger("uvicorn.error")
    for error in (asyncio.CancelledError(), TimeoutError(), ValueError("a"), ValueError("b")):
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
    HttpServer(answer_long)
    assert limits == ([] if most is None else [(most, given[1])])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_counts_even_while_the_first_is_told(number: int) -> None:
    def second() -> None:
        server.handle_exit(number, None)

    server = HttpServer(answer_long, on_exit=second)
    server.handle_exit(number, None)
    assert server.should_exit
    assert server.force_exit
