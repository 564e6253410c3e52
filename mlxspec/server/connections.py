"""The HTTP server: limits on connections and their idle time, and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

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


class HttpServer(uvicorn.Server):
    """Serves an application until a signal, then gives running requests time to end.

    Args:
        app: the application.
        grace: seconds for running requests after the first signal. The second signal closes all
            connections at once.
        on_start: called in the event loop at its start.
        on_exit: called at the first signal.
        limits: as for :class:`Connection`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace: float = 10.0,
        on_start: Callable[[], object] = lambda: None,
        on_exit: Callable[[], object] = lambda: None,
        **limits: Any,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", partial(Connection, **limits)),
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
        self._on_start = on_start
        self._on_exit = on_exit
        for log in (_log, logging.getLogger("uvicorn.error")):
            log.addFilter(_seldom)

    async def startup(self, sockets: Any = None) -> None:
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
        most: connections at once; fewer if the process may not open that many files.
        head: seconds within which a request's line and headers must arrive.
        unread: seconds for which a client may read nothing of its answer.
        options: as uvicorn passes them.
    """

    def __init__(
        self, most: int = 1024, head: float = 20.0, unread: float = 300.0, **options: Any
    ) -> None:
        super().__init__(**options)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            most = min(most, max(_FEWEST, files - BACKLOG - _OTHER_FILES))
        self._most, self._head, self._most_unread = most, head, unread
        self._since = self._heard = self.loop.time()
        """When the server began to wait for the client, and when the client last sent something."""
        self._unsent = 0
        """Unread bytes at the last check."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            _log.warning(
                "%d connections are open, the most allowed: each new one closes the one that has "
                "been silent for longest",
                self._most,
            )
            waiting = [one for one in cast(set[Connection], self.connections) if one.waits]
            # This one, if all others are being answered.
            min(waiting, key=lambda one: one._heard).transport.abort()
        self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._since = self._heard = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._since = self.loop.time()
        super().pause_writing()

    @property
    def waits(self) -> bool:
        """Whether the server waits for a request or the rest of one."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self._answered or self.cycle.more_body

    @property
    def _answered(self) -> bool:
        """Whether the client is to send a new request."""
        return self.cycle is None or self.cycle.response_complete

    def _check(self) -> None:
        """Close the connection if the client takes too long, or check again later."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._since = self.loop.time()
        self._unsent = unsent
        allowed = math.inf
        if unsent and (self._answered or self.flow.write_paused):
            allowed = self._most_unread
        elif self._answered:
            allowed = self._head
        if self.loop.time() > self._since + allowed:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_CHECK_INTERVAL, self._check)


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
