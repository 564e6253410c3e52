"""Sends an answer to a client, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .answer import ApiAnswer
from .body import ApiError
from .worker import EventStream

_log = logging.getLogger("mlxspec.server")

_LOOKING = 0.1  # seconds between checks that a client without a stream is still connected
FAILED = ApiError("internal server error: see the server's log", status=500)


async def answered(
    request: Request, stream: EventStream, answer: ApiAnswer, streamed: bool, keep_alive: float
) -> Response:
    """The response that sends an answer, as a stream or as a whole.

    If the client disconnects, the generations end.

    Args:
        keep_alive: seconds without data after which a stream sends a keep-alive.

    Raises:
        ApiError: a generation failed before anything was sent.
    """
    request.state.answered = True
    request.state.uses.callback(stream.close)  # also if the client leaves before the first event
    if streamed:
        content = _server_sent_events(stream, answer, keep_alive)
        return StreamingResponse(content, headers=_stream_headers(answer), media_type=_EVENTS)
    async with aclosing(stream.events(_LOOKING)) as happening:
        async for events in happening:
            answer.feed(events)
            stream.stop(answer.finished)
            if await request.is_disconnected():
                return Response(status_code=499)
    return JSONResponse(answer.whole(), headers=answer.headers)


async def kept_alive(
    request: Request,
    responding: Coroutine[Any, Any, Response],
    answer: ApiAnswer,
    patience: float,
    on_refusal: Callable[[ApiError], object],
) -> Response:
    """A streamed response that may take long to begin, since its model is being loaded.

    If it has not begun in time, its stream begins with keep-alives. An error is then sent in it.

    Args:
        patience: seconds after which a keep-alive is sent.
        on_refusal: called with an error that is sent in the stream.
    """
    task = asyncio.create_task(responding)
    request.state.uses.callback(task.cancel)  # if the client leaves

    async def content() -> AsyncIterator[str]:
        while not task.done():
            yield _keep_alive(answer)
            await asyncio.wait([task], timeout=patience)
        try:
            events = cast(StreamingResponse, task.result()).body_iterator
        except Exception as error:
            refusal = _as_api_error(error)
            on_refusal(refusal)
            yield framed(answer.failed(refusal)) + answer.end
            return
        async with aclosing(cast(AsyncGenerator[str, None], events)):
            async for text in events:
                yield cast(str, text)

    await asyncio.wait([task], timeout=patience)
    if task.done():
        return task.result()
    return StreamingResponse(content(), headers=_stream_headers(answer), media_type=_EVENTS)


_EVENTS = "text/event-stream"


def _stream_headers(answer: ApiAnswer) -> dict[str, str]:
    return {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **answer.headers}


def framed(*chunks: dict[str, Any]) -> str:
    """Chunks as server-sent events. The name of an event is its chunk's type, if it has one."""
    events = ""
    for chunk in chunks:
        events += f"event: {chunk['type']}\n" if "type" in chunk else ""
        events += f"data: {json.dumps(chunk)}\n\n"
    return events


def _keep_alive(answer: ApiAnswer) -> str:
    return framed(*answer.keep_alive()) or ": still working\n\n"


async def _server_sent_events(
    stream: EventStream, answer: ApiAnswer, keep_alive: float
) -> AsyncIterator[str]:
    """Yield an answer's chunks as they are generated. An error replaces the rest of them."""
    yield framed(*answer.begin())
    sent = time.monotonic()
    try:
        async with aclosing(stream.events(keep_alive / 4)) as happening:
            async for events in happening:
                text = framed(*answer.feed(events)) if events else ""
                stream.stop(answer.finished)
                # While a call is generated, tokens arrive, but there may be nothing to send yet.
                if not text and time.monotonic() - sent >= keep_alive:
                    text = _keep_alive(answer)
                if text:
                    yield text
                    sent = time.monotonic()
    except Exception as error:
        yield framed(answer.failed(_as_api_error(error)))
    yield answer.end


def _as_api_error(error: Exception) -> ApiError:
    """The error that a client receives for an exception."""
    if isinstance(error, ApiError):
        return error
    _log.error("an answer has failed", exc_info=error)
    return FAILED
