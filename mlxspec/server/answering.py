"""Sending an answer: in chunks as they come or whole, with keep-alives while it takes long."""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .answer import Answer
from .errors import ApiError
from .served_request import EventStream

_log = logging.getLogger("mlxspec.server")

FAILED = ApiError("the server has failed; its log says how", status=500)


class Silence(NamedTuple):
    """How long nothing is sent before a keep-alive is.

    Attributes:
        sign: seconds without data after which a stream, or a whole answer that has begun, sends
            one.
        begin: seconds before an answer that is not streamed begins with spaces as keep-alives.
    """

    sign: float = 10.0
    begin: float = 60.0


async def answered(
    request: Request, stream: EventStream, answer: Answer, streamed: bool, silence: Silence
) -> Response:
    """The response to a request.

    If the client leaves, the generations end.

    Args:
        request: whose client waits.
        stream: the generations' events.
        answer: makes chunks or a whole answer of them.
        streamed: send it as server-sent events.
        silence: when keep-alives are sent.

    Raises:
        ApiError: a generation has failed before anything was sent.
    """
    request.state.answered = True
    if streamed:
        return _Streamed(
            _server_sent_events(stream, answer, silence.sign),
            on_end=stream.close,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **answer.headers},
        )
    making = asyncio.create_task(_whole(stream, answer, silence.sign))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({making, gone}, timeout=silence.begin, return_when=FIRST_COMPLETED)
    except asyncio.CancelledError:
        making.cancel()
        raise
    finally:
        left = gone.done()
        gone.cancel()
    if making.done():
        return JSONResponse(making.result(), headers=answer.headers)
    if left:
        making.cancel()
        return Response(status_code=499)
    return _Streamed(
        _with_life_signs(making, answer, silence.sign),
        on_end=making.cancel,
        media_type="application/json",
        headers=answer.headers,
    )


def is_answered(request: Request) -> bool:
    """Whether generations have begun for a request."""
    return getattr(request.state, "answered", False)


class _Streamed(StreamingResponse):
    """An answer that is sent in pieces.

    Args:
        content: the pieces.
        on_end: called at its end, even if the client has gone before the first piece was made.
        options: as for ``StreamingResponse``.
    """

    def __init__(
        self, content: AsyncIterator[str], *, on_end: Callable[[], object], **options: Any
    ) -> None:
        super().__init__(content, **options)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _whole(stream: EventStream, answer: Answer, life_sign: float) -> dict[str, Any]:
    """The answer in one piece."""
    async with aclosing(stream.events(life_sign)) as happening:
        async for events in happening:
            answer.feed(events)
            stream.stop(answer.finished)
    return answer.whole()


async def _server_sent_events(
    stream: EventStream, answer: Answer, life_sign: float
) -> AsyncIterator[str]:
    """The chunks of an answer as they come; an error takes the place of what is left."""
    try:
        async with aclosing(stream.events(life_sign)) as happening:
            async for events in happening:
                if not events:
                    yield answer.life_sign()
                    continue
                if text := "".join(map(answer.framed, answer.feed(events))):
                    yield text
                stream.stop(answer.finished)
    except Exception as error:
        yield answer.framed(answer.failed(_told(error)))
    yield answer.end


async def _with_life_signs(
    making: asyncio.Task[dict[str, Any]], answer: Answer, life_sign: float
) -> AsyncIterator[str]:
    """JSON that takes long: spaces before it, which parsers skip, keep the connection alive."""
    while not making.done():
        yield " "
        await asyncio.wait({making}, timeout=life_sign)
    try:
        yield json.dumps(making.result())
    except Exception as error:
        yield json.dumps(answer.failed(_told(error)))


def _told(error: Exception) -> ApiError:
    """The error that a client gets for an exception."""
    if isinstance(error, ApiError):
        return error
    _log.error("an answer has failed", exc_info=error)
    return FAILED


async def _disconnected(request: Request) -> None:
    """Return once the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
