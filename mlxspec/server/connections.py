"""The HTTP server: uvicorn with limits, and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .body import ApiError, error_response

_MOST = 1024  # connections; further requests get 503, except for /health
_FILES = 2 * _MOST  # open files of the process, if the system lets it raise its limit
_LAST = 1.0  # seconds for requests to send their errors, or to notice closed connections
_FULL = ApiError(
    f"the server has more than {_MOST:,} connections: send the request again later",
    status=503,
    headers={"Connection": "close", "Retry-After": "1"},
)
_LOOK = 1  # seconds between checks for silent clients


class HttpServer(uvicorn.Server):
    """Serves an application until a signal, then gives running requests time to end.

    Args:
        grace: seconds for running requests to end after the first signal. A second signal ends them
            at once.
        patience: seconds after which a client is disconnected if it neither reads its answer nor
            sends the rest of its request.
        on_exit: called at the first signal.
        on_end: called if requests still run after the grace; it ends them with an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace: float,
        patience: float = 300.0,
        on_exit: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            self._limited(app),
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            callback_notify=self._leave_silent,
            timeout_notify=_LOOK,
            # A request that waits for a thread does not notice that its client has disconnected.
            timeout_graceful_shutdown=math.ceil(grace + 2 * _LAST),
        )
        super().__init__(config)
        self._grace = grace
        self._patience = patience
        self._waits: dict[tuple[object, ...], float] = {}
        self._on_exit = on_exit
        self._on_end = on_end
        logging.getLogger("uvicorn.error").addFilter(_is_fault)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:  # 256 on a Mac
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    def _limited(self, app: ASGIApp) -> ASGIApp:
        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            full = scope["type"] == "http" and len(self.server_state.connections) > _MOST
            if full and scope["path"] != "/health":  # a supervisor may restart an unhealthy server
                logging.getLogger("uvicorn.error").warning(_FULL.message)
                await error_response(_FULL, scope["path"])(scope, receive, send)
            else:
                await app(scope, receive, send)

        return served

    async def _leave_silent(self) -> None:
        """Close the connections whose clients have kept the server waiting for too long."""
        now, before, self._waits = time.monotonic(), self._waits, {}
        for connection in cast(set[H11Protocol], self.server_state.connections):
            reads = connection.cycle and not (
                connection.cycle.response_complete or connection.transport.is_closing()
            )
            if reads and not (connection.cycle.more_body or connection.flow.write_paused):
                continue
            # A wait ends with the next request, or when the client reads something.
            wait = connection, connection.cycle, connection.transport.get_write_buffer_size()
            self._waits[wait] = before.get(wait, now)
            if now - self._waits[wait] > self._patience:
                connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first = not self.should_exit
        self.force_exit = not first  # uvicorn sets it only for Ctrl-C
        super().handle_exit(sig, frame)
        if first:  # last, since a second signal may arrive during the call
            self._on_exit()

    async def shutdown(self, sockets: Any = None) -> None:
        closing = asyncio.create_task(self._close())
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn then skips this; the lifespan would end in a traceback
            await self.lifespan.shutdown()
        await closing

    async def _close(self) -> None:
        """Give running requests time to end, then close all connections."""
        await self._wait_for_connections(self._grace)
        state = self.server_state
        if state.connections and not self.force_exit:
            self._on_end()
            await self._wait_for_connections(_LAST)
        for connection in [*state.connections]:
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait({*state.tasks}, timeout=_LAST)

    async def _wait_for_connections(self, seconds: float) -> None:
        """Wait until all connections are closed, at most for a time or until a second signal."""
        end = time.monotonic() + seconds
        while self.server_state.connections and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)


def _is_fault(record: logging.LogRecord) -> bool:
    """Whether to log one of uvicorn's records.

    The tracebacks of cancelled requests are left out, and two warnings for each request that offers
    to upgrade to HTTP/2, as Java's client does, or to WebSockets: it is answered all the same.
    """
    upgrades = "Unsupported upgrade request", "No supported WebSocket library"
    if str(record.msg).startswith(upgrades):
        return False
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
