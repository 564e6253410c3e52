"""How long connections may wait for their clients, and which make room for others.

Time passes at once here: the loop's clock jumps to where the next timer is due.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import selectors
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar

import pytest
import uvicorn
from starlette.requests import Request
from uvicorn.server import ServerState

from mlxspec.server import connections
from mlxspec.server.auth import body_of as received
from mlxspec.server.body import ApiError
from mlxspec.server.connections import Bounds, Connection, HttpServer, _report

BOUNDS = Bounds(most=3, head=20, unread=300, rate=1000)
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n"


class Loop(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selectors.DefaultSelector())
        select = self._selector.select  # type: ignore[attr-defined]

        def at_once(timeout: float | None) -> Any:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = at_once  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def run(what: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        try:
            runner.run(asyncio.wait_for(what, 1_000_000))
        finally:
            runner.run(leave())


async def leave() -> None:
    """Clients leave, so that what still runs for them ends."""
    while Wire.open:
        Wire.open.pop().abort()
    await asyncio.sleep(1)


class Wire(asyncio.Transport):
    """A connection's other end: what was not read yet counts, and nothing is sent."""

    open: ClassVar[list[Wire]] = []

    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        self.closing = False
        self.closed: float | None = None
        """When it was."""
        self.connection: Connection
        self.open.append(self)

    def abort(self) -> None:
        self.unread = 0
        self.close()

    def close(self) -> None:
        self.closing = True
        if not self.unread and self.closed is None:
            self.closed = asyncio.get_running_loop().time()
            self.connection.connection_lost(None)

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: Any) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def answer_whole(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads its body and answers."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer_long(scope: Any, receive: Any, send: Any) -> None:
    """One that writes for as long as the client is there."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Clients:
    """Makes connections of one server."""

    def __init__(self, app: Any = answer_whole, bounds: Bounds = BOUNDS) -> None:
        self.bounds = bounds
        self.config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
        self.state = ServerState()
        self.waiting: dict[Connection, None] = {}

    def connect(self) -> Wire:
        wire = Wire()
        wire.connection = Connection(
            self.bounds,
            self.waiting,
            config=self.config,
            server_state=self.state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )
        wire.connection.connection_made(wire)
        return wire


def test_a_head_has_its_time_however_slowly_it_comes() -> None:
    async def ask() -> None:
        clients = Clients()
        silent, dripping = clients.connect(), clients.connect()
        for byte in HEAD[:15]:
            dripping.connection.data_received(bytes([byte]))
            await asyncio.sleep(1)
        assert not silent.is_closing()
        assert not dripping.is_closing()
        await asyncio.sleep(7)
        assert silent.closed == dripping.closed == pytest.approx(BOUNDS.head, abs=2)
        assert not clients.state.connections
        assert not clients.waiting

    run(ask())


def test_the_next_head_on_a_connection_has_its_time_as_well() -> None:
    async def ask() -> None:
        wire = Clients().connect()
        for _ in range(5):
            await asyncio.sleep(4)
            wire.connection.data_received(HEAD + b"0123456789")
            await asyncio.sleep(0)
        await asyncio.sleep(3)
        wire.connection.data_received(b"P")  # uvicorn's own limit ends here
        await asyncio.sleep(15)
        assert not wire.is_closing()
        await asyncio.sleep(5)
        assert wire.is_closing()

    run(ask())


def test_an_answer_may_take_as_long_as_it_likes() -> None:
    async def ask() -> None:
        wire = Clients(answer_long).connect()
        wire.connection.data_received(HEAD + b"0123456789")
        await asyncio.sleep(100_000)
        assert not wire.is_closing()

    run(ask())


@pytest.mark.parametrize(
    ("taken", "ends"),
    [
        (0, 300),  # bytes a second
        (1, 300),
        (900, None),
        (5000, None),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_who_does_not_take_its_answer_is_left(
    taken: int, ends: float | None, complete: bool
) -> None:
    """Be it in the midst of a stream, or after an answer that went out in one go."""

    async def ask() -> None:
        wire = Clients(answer_whole if complete else answer_long).connect()
        wire.connection.data_received(HEAD + b"0123456789")
        wire.unread = 200_000
        await asyncio.sleep(0.5)
        wire.connection.pause_writing()
        begun = asyncio.get_running_loop().time()
        while wire.unread:
            await asyncio.sleep(1)
            wire.unread = max(0, wire.unread - taken)
        if ends is None:
            assert wire.closed is None
        else:
            assert wire.closed == pytest.approx(begun + ends, abs=3)

    run(ask())


def test_who_stops_taking_its_answer_is_left() -> None:
    async def ask() -> None:
        wire = Clients(answer_long).connect()
        wire.connection.data_received(HEAD + b"0123456789")
        wire.unread = 1_000_000
        wire.connection.pause_writing()
        await asyncio.sleep(100)
        wire.unread = 1000
        await asyncio.sleep(290)
        assert not wire.is_closing()
        await asyncio.sleep(15)
        assert wire.is_closing()

    run(ask())


def test_those_that_have_sent_nothing_for_longest_make_room() -> None:
    async def ask() -> None:
        clients = Clients(answer_long)
        first, second, third = (clients.connect() for _ in range(3))
        await asyncio.sleep(1)
        first.connection.data_received(HEAD[:5])
        second.connection.data_received(HEAD + b"0123456789")  # is being answered
        fourth = clients.connect()
        assert third.is_closing()
        fourth.connection.data_received(HEAD + b"01234")  # half a body
        fifth = clients.connect()
        assert first.is_closing()
        fifth.connection.data_received(HEAD + b"0123456789")
        sixth = clients.connect()
        assert fourth.is_closing()
        sixth.connection.data_received(HEAD + b"0123456789")
        assert clients.connect().is_closing()  # all others are being answered
        assert not any(wire.is_closing() for wire in (second, fifth, sixth))
        assert len(clients.state.connections) == BOUNDS.most

    run(ask())


def test_one_line_tells_of_connections_that_make_room(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        clients = Clients()
        for _ in range(100):
            clients.connect()
        no_room = OSError(errno.EMFILE, "Too many open files")
        for _ in range(100):
            _report(asyncio.get_running_loop(), {"message": "accept()", "exception": no_room})
        _report(asyncio.get_running_loop(), {"message": "a fault of another kind"})

    monkeypatch.setattr(connections, "_next_time", {})  # of messages of the last minute
    HttpServer(answer_whole)
    run(ask())
    made_room, not_accepted, other = caplog.messages
    assert made_room.startswith("3 connections are open")
    assert not_accepted.startswith("connections cannot be accepted (Too many open files)")
    assert other == "a fault of another kind"
    assert not any(record.exc_info for record in caplog.records)


def test_only_faults_have_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    HttpServer(answer_whole)
    log = logging.getLogger("uvicorn.error")
    for error in (asyncio.CancelledError(), ValueError("a"), ValueError("b")):
        log.error("Exception in ASGI application\n", exc_info=error)
    errors = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in errors] == ["a", "b"]


@pytest.mark.parametrize(
    ("files", "most"), [(resource.RLIM_INFINITY, 1024), (2048, 1024), (520, 200), (64, 8)]
)
def test_files_can_be_opened_beside_all_connections(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))
    server = HttpServer(answer_whole)
    bounds, _ = server.config.http.args  # type: ignore[union-attr]
    assert bounds.most == most


# --- bodies ---


def body_of(parts: Callable[[], AsyncIterator[bytes]]) -> Request:
    """A request whose body comes in parts."""
    coming = parts()

    async def receive() -> Any:
        try:
            return {"type": "http.request", "body": await anext(coming), "more_body": True}
        except StopAsyncIteration:
            return {"type": "http.request", "body": b"", "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_a_body_may_be_slow_but_not_stop() -> None:
    async def stops() -> AsyncIterator[bytes]:
        yield b'{"pro'
        await asyncio.sleep(31)
        yield b'mpt": 0}'

    async def drips() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(1)

    async def comes() -> AsyncIterator[bytes]:
        """A megabyte through a bad line, of 2,000 bytes a second with pauses."""
        yield b'{"prompt": "'
        for _ in range(25):
            yield b"x" * 40_000
            await asyncio.sleep(20)
        yield b'"}'

    async def ask() -> None:
        for parts in (stops, drips):
            with pytest.raises(ApiError, match="the body has stopped after") as caught:
                await received(body_of(parts))
            assert (caught.value.status, caught.value.headers) == (408, {"Connection": "close"})
        assert len(json.loads(await received(body_of(comes)))["prompt"]) == 1_000_000

    run(ask())


@pytest.mark.slow
def test_a_connection_is_told_why_its_body_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlxspec.server import auth
    from tests.support.serving import running_server

    monkeypatch.setattr(auth, "_SILENCE", 0.1)
    with running_server() as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(HEAD.replace(b" / ", b" /v1/completions ") + b"{")
            told = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b"the body has stopped after 1 bytes" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_counts_even_while_the_first_is_told(number: int) -> None:
    def second() -> None:
        server.handle_exit(number, None)

    server = HttpServer(answer_whole, on_exit=second)
    server.handle_exit(number, None)
    assert server.should_exit
    assert server.force_exit
