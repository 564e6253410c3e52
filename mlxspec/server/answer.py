"""Answers in any API's form, made of a generation's events and sent whole or in chunks."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .body import ApiError
from .output import Delta, OutputParser
from .worker import Begun, Ended, Event, EventStream, Piece


class ApiAnswer(ABC):
    """An answer in the form of an API.

    It is fed with events, of any of its choices in any order, and returns the chunks that a
    streamed answer sends for them. When all choices have ended it can be sent as a whole.

    Args:
        n_choices: of all prompts together.

    Attributes:
        ends: of the choices, None for those that have not ended.
    """

    end = ""
    """What ends a stream."""

    headers: Mapping[str, str] = {}
    """Of the response."""

    def __init__(self, n_choices: int) -> None:
        self.ends: list[Ended | None] = [None] * n_choices

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(self.ends)

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """The chunks before any event, once; the first :meth:`feed` has them otherwise."""

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Take what has happened; returns the chunks of a streamed answer for it.

        What comes for a choice after its end is left out.
        """
        chunks = self.begin()
        was_done = self.done
        for index, group in groupby(events, key=lambda event: event.index):
            if self.ends[index]:
                continue
            pieces: list[Piece] = []
            for event in group:
                if isinstance(event, Begun):
                    chunks += self.choice_begun(event)
                    continue
                if isinstance(event, Ended):
                    self.ends[index] = event
                    break
                pieces.append(event)
            chunks += self.feed_choice(index, pieces, self.ends[index])
        if self.done and not was_done:
            chunks += self.close()
        return chunks

    def choice_begun(self, event: Begun) -> list[dict[str, Any]]:
        """The chunks before the first token of a choice."""
        return []

    @abstractmethod
    def feed_choice(
        self, index: int, pieces: Sequence[Piece], end: Ended | None
    ) -> list[dict[str, Any]]:
        """The chunks for some tokens of a choice, and its end."""

    def close(self) -> list[dict[str, Any]]:
        """The chunks after the end of all choices."""
        return []

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""

    def finished(self, index: int) -> bool:
        """Whether a choice needs no more tokens, though it has not ended."""
        return False

    def framed(self, chunk: dict[str, Any]) -> str:
        """A chunk as a server-sent event."""
        return f"data: {json.dumps(chunk)}\n\n"

    def keep_alive(self) -> str:
        """What a stream sends while nothing happens: a comment, which clients pass over."""
        return ": still working\n\n"

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The chunk for an error that comes when it is too late for a status."""
        return error.body


# --- chats ---


@dataclass
class ChatChoice:
    """What an answer in a chat has so far.

    Attributes:
        parser: of the output.
        content: segments of the text.
        reasoning: segments of the reasoning.
        calls: of tools, in OpenAI's form.
        logprobs: of the tokens, where they were asked for.
        reasoning_tokens: how many tokens reasoned.
        tokens: how many there are, up to the end of the one call that the answer may have.
        accepted: how many of them were accepted drafts.
    """

    parser: OutputParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reasoning_tokens: int = 0
    tokens: int = 0
    accepted: int = 0

    def add(self, delta: Delta) -> None:
        """Take a part of the answer."""
        if delta.kind == "text":
            self.content.append(delta.text)
        elif delta.kind == "reasoning":
            self.reasoning.append(delta.text)
        elif delta.kind == "call":
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        else:
            self.calls[delta.index]["function"]["arguments"] += delta.text

    def read(self, pieces: Sequence[Piece], end: Ended | None) -> list[tuple[Delta, bool]]:
        """What the tokens say, and whether they were accepted drafts."""
        said: list[tuple[Delta, bool]] = []
        for piece in pieces:
            if self.parser.finished:  # how many follow depends on what else runs
                break
            self.tokens += 1
            self.accepted += piece.accepted
            was_reasoning = self.parser.reasoning
            said += ((delta, piece.accepted) for delta in self.parser.feed(piece.text))
            self.reasoning_tokens += was_reasoning or self.parser.reasoning
        if end:
            cut = end.finish_reason == "length" or end.stop is not None
            said += ((delta, False) for delta in self.parser.finish(cut))
        return said

    def counted(self, end: Ended | None) -> Ended | None:
        """The end, without the tokens that are not part of the answer."""
        if end is None or not self.parser.finished:
            return end
        # Drafts that were accepted later have not been rejected, either.
        drafted = end.drafted - (end.accepted - self.accepted)
        return replace(end, completion_tokens=self.tokens, drafted=drafted, accepted=self.accepted)

    def finish_reason(self, end: Ended | None) -> str:
        """Why it has ended: "stop", "length" or "tool_calls"."""
        reason = end.finish_reason if end else "stop"
        calls = self.parser.n_calls and (reason == "stop" or self.parser.finished)
        return "tool_calls" if calls else reason


_log = logging.getLogger("mlxspec.server")

FAILED = ApiError("the server has failed; its log says how", status=500)


class KeepAlive(NamedTuple):
    """How long nothing is sent before a keep-alive is.

    Attributes:
        sign: seconds without data after which a stream, or a whole answer that has begun, sends
            one.
        begin: seconds before an answer that is not streamed begins with spaces as keep-alives.
    """

    sign: float = 10.0
    begin: float = 60.0


async def answered(
    request: Request, stream: EventStream, answer: ApiAnswer, streamed: bool, keep_alive: KeepAlive
) -> Response:
    """The response to a request.

    If the client leaves, the generations end.

    Args:
        request: whose client waits.
        stream: the generations' events.
        answer: makes chunks or a whole answer of them.
        streamed: send it as server-sent events.
        keep_alive: when keep-alives are sent.

    Raises:
        ApiError: a generation has failed before anything was sent.
    """
    request.state.answered = True
    if streamed:
        return _Streamed(
            _server_sent_events(stream, answer, keep_alive.sign),
            on_end=stream.close,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **answer.headers},
        )
    making = asyncio.create_task(_whole(stream, answer, keep_alive.sign))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({making, gone}, timeout=keep_alive.begin, return_when=FIRST_COMPLETED)
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
        _with_keep_alives(making, answer, keep_alive.sign),
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


async def _whole(stream: EventStream, answer: ApiAnswer, keep_alive: float) -> dict[str, Any]:
    """The answer in one piece."""
    async with aclosing(stream.events(keep_alive)) as happening:
        async for events in happening:
            answer.feed(events)
            stream.stop(answer.finished)
    return answer.whole()


async def _server_sent_events(
    stream: EventStream, answer: ApiAnswer, keep_alive: float
) -> AsyncIterator[str]:
    """The chunks of an answer as they come; an error takes the place of what is left."""
    try:
        async with aclosing(stream.events(keep_alive)) as happening:
            async for events in happening:
                if not events:
                    yield answer.keep_alive()
                    continue
                if text := "".join(map(answer.framed, answer.feed(events))):
                    yield text
                stream.stop(answer.finished)
    except Exception as error:
        yield answer.framed(answer.failed(_as_api_error(error)))
    yield answer.end


async def _with_keep_alives(
    making: asyncio.Task[dict[str, Any]], answer: ApiAnswer, keep_alive: float
) -> AsyncIterator[str]:
    """JSON that takes long: spaces before it, which parsers skip, keep the connection alive."""
    while not making.done():
        yield " "
        await asyncio.wait({making}, timeout=keep_alive)
    try:
        yield json.dumps(making.result())
    except Exception as error:
        yield json.dumps(answer.failed(_as_api_error(error)))


def _as_api_error(error: Exception) -> ApiError:
    """The error that a client gets for an exception."""
    if isinstance(error, ApiError):
        return error
    _log.error("an answer has failed", exc_info=error)
    return FAILED


async def _disconnected(request: Request) -> None:
    """Return once the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
