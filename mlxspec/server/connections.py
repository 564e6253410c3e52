"""The HTTP server: limits on connections and their idle time, and its shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 256
"""How many connections the system queues; the event loop accepts all of them in one go."""

_log = logging.getLogger(__name__)

_OTHER_FILES = 64  # models while they load, prefixes, journals, standard streams
_FEWEST = 8  # connections, even if the process may open fewer files
_CHECK_INTERVAL = 1.0  # seconds between two checks of a connection
_LAST = 1.0  # seconds for requests to notice that their connections were closed
_QUIET = 60.0  # seconds before a message is logged again
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Bounds(NamedTuple):
    """Limits on the connections of clients.

    Attributes:
        most: connections at once; fewer if the process may not open that many files.
        head: seconds within which a request's line and headers must arrive.
        unread: seconds for which a client may read nothing of its answer.
        rate: bytes per second that a client must read on average, after ``unread`` seconds.
    """

    most: int = 1024
    head: float = 20.0
    unread: float = 300.0
    rate: float = 1000.0


class HttpServer(uvicorn.Server):
    """Serves an application until a signal, then gives running requests time to end.

    Args:
        app: the application.
        bounds: limits on its connections.
        grace: seconds for running requests after the first signal. The second signal closes all
            connections at once.
        on_start: called in the event loop at its start.
        on_exit: called at the first signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        bounds: Bounds = Bounds(),  # noqa: B008  # a constant
        grace: float = 10.0,
        on_exit: Callable[[], object] = lambda: None,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        protocol = partial(Connection, bounds._replace(most=_most_of(bounds)), {})
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            # For requests that wait for a thread and do not notice that the client disconnected.
            timeout_graceful_shutdown=math.ceil(grace + _LAST),
        )
        super().__init__(config)
        self._grace = grace
        self._on_exit = on_exit
        self._on_start = on_start
        for log in (_log, logging.getLogger("uvicorn.error")):
            log.addFilter(_seldom)

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        self._on_start()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first = not self.should_exit
        self.force_exit = not first  # uvicorn sets it for Ctrl-C only
        super().handle_exit(sig, frame)
        if first:  # last, since the second signal may arrive meanwhile
            self._on_exit()

    async def shutdown(self, sockets: Any = None) -> None:
        closing = asyncio.create_task(self._close())
        await super().shutdown(sockets)
        await closing

    async def _close(self) -> None:
        """Give running requests time to end, then close all connections."""
        state, end = self.server_state, time.monotonic() + self._grace
        while state.connections and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for connection in [*state.connections]:
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait({*state.tasks}, timeout=_LAST)


class Connection(H11Protocol):
    """A connection that is closed if its client keeps the server waiting too long.

    :func:`mlxspec.server.auth.body_of` limits the time of a body, since it can send an error.

    Args:
        bounds: limits on all connections.
        waiting: shared by all connections: those that wait for a request or the rest of one. The
            connection that has been silent for longest is the first.
        options: as uvicorn passes them.
    """

    def __init__(self, bounds: Bounds, waiting: dict[Connection, None], **options: Any) -> None:
        super().__init__(**options)
        self._bounds = bounds
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._taken = 0.0
        """When the server began to wait for the client, and when the client last read something."""
        self._owed = self._unsent = 0
        """Unread bytes at the beginning of this wait, and at the last check."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()
        self._file()
        if len(self.connections) > self._bounds.most:
            _log.warning(
                "%d connections are open, the most allowed: each new one closes the one that has "
                "been silent for longest",
                self._bounds.most,
            )
            oldest = next(iter(self._waiting))  # this one, if all others are being answered
            del self._waiting[oldest]
            oldest.transport.abort()
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._file()

    def on_response_complete(self) -> None:
        self._begin()
        super().on_response_complete()
        self._file()

    def pause_writing(self) -> None:
        self._begin()
        super().pause_writing()

    def _begin(self) -> None:
        """Begin a new wait for the client."""
        self._since = self._taken = self.loop.time()
        self._owed = self._unsent = self.transport.get_write_buffer_size()

    def _file(self) -> None:
        """Move the connection to the end of the waiting ones, or remove it from them."""
        self._waiting.pop(self, None)
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return
        if self._answered or self.cycle.more_body:
            self._waiting[self] = None

    @property
    def _answered(self) -> bool:
        """Whether the client is to send a new request."""
        return self.cycle is None or self.cycle.response_complete

    def _check(self) -> None:
        """Close the connection if the client takes too long, or check again later."""
        if self.loop.time() > self._deadline():
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_CHECK_INTERVAL, self._check)

    def _deadline(self) -> float:
        """When the present wait for the client ends."""
        bounds, unsent = self._bounds, self.transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._taken = self.loop.time()
        self._unsent = unsent
        if unsent and (self._answered or self.flow.write_paused):
            slowly = self._since + (self._owed - unsent) / bounds.rate
            return min(self._taken, slowly) + bounds.unread
        return self._since + bounds.head if self._answered else math.inf


def _most_of(bounds: Bounds) -> int:
    """How many connections leave room for other open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return bounds.most
    return min(bounds.most, max(_FEWEST, files - BACKLOG - _OTHER_FILES))


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, in one line if a connection could not be accepted."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        _log.warning(
            "connections cannot be accepted (%s): trying again every second", error.strerror
        )
    else:
        loop.default_exception_handler(context)


_next_time: dict[str, float] = {}
"""When each message may be logged again."""


def _seldom(record: logging.LogRecord) -> bool:
    """Filter the log: pass a message once a minute, and all tracebacks but of cancellations."""
    if record.exc_info:
        return not isinstance(record.exc_info[1], asyncio.CancelledError)
    now, message = time.monotonic(), str(record.msg)
    if now < _next_time.get(message, 0.0):
        return False
    _next_time[message] = now + _QUIET
    return True
