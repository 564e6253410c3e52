"""Turns a model's output into the answer of an API, sent whole or as a stream of chunks.

A :class:`Choice` collects the parts that :class:`~mlxspec.server.output_parser.OutputParser` finds:
text, reasoning and tool calls. Each API renders these parts.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .body import ApiError
from .output_parser import OutputFormat, OutputParser, Part
from .worker import Begun, Ended, Event, EventStream, Piece

# --- choices ---


@dataclass
class TextRun:
    """The text that a batch of tokens adds to a part.

    Attributes:
        part: the part.
        position: the part's position in the answer.
        begins: whether the part begins with this run.
        ends: whether the part ends with this run.
        drafts: pairs, as lists: a text, and whether it comes from accepted drafts. Joined, the
            texts are the run's text.
        pieces: the run's tokens, and earlier tokens that added no text; without reasoning tokens.
    """

    part: Part
    position: int
    begins: bool = False
    ends: bool = False
    drafts: list[list[Any]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The added text."""
        return "".join(text for text, _ in self.drafts)


class Choice:
    """A choice, one of the ``n`` outputs for a prompt: its parts and token counts so far.

    Args:
        index: the choice's index.
        format: the format of the output; None for text without markers.

    Attributes:
        parts: the parts, in order.
        end: how the choice has ended; None while it runs.
        reasoning_tokens: the number of reasoning tokens.
    """

    def __init__(self, index: int = 0, format: OutputFormat | None = None) -> None:
        self.index = index
        self.parts: list[Part] = []
        self.end: Ended | None = None
        self.reasoning_tokens = 0
        self._parser = OutputParser(format) if format else None
        self._runs: list[TextRun] = []
        self._silent: list[Piece] = []
        """Tokens since the last run, which have not added any text."""

    @property
    def finished(self) -> bool:
        """Whether the choice needs no more tokens, even if it has not ended yet."""
        return self._parser is not None and self._parser.finished

    def joined(self, kind: str) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def pieces(self) -> list[Piece]:
        """The tokens of all text parts."""
        return [piece for part in self.parts if part.kind == "text" for piece in part.pieces]

    def read(self, pieces: Sequence[Piece], end: Ended | None) -> list[TextRun]:
        """Read new tokens, and the choice's end if it has come; return the runs that they add."""
        parser = self._parser
        self._runs = []
        for piece in pieces:
            if self.finished:
                break
            reasoned = parser is not None and parser.reasoning
            if not reasoned:
                self._silent.append(piece)
            if parser:
                deltas = parser.feed(piece.text)
            else:
                deltas = [Part("text", piece.text)] if piece.text else []
            for delta in deltas:
                self._add(delta, piece.accepted)
            if reasoned or (parser and parser.reasoning):
                self.reasoning_tokens += 1
        self.end = end
        if end:
            while end.stop is not None and self._silent and not self._silent[-1].text:
                self._silent.pop()  # a token of the stop string
            for delta in parser.finish(self.cut) if parser else ():
                self._add(delta, False)
            if self._silent and not parser:
                self._add(Part("text"), False)
            self._end_part()
        return self._runs

    def _add(self, delta: Part, accepted: bool) -> None:
        kind = "call" if delta.kind == "arguments" else delta.kind
        if delta.kind == "call" or not self.parts or self.parts[-1].kind != kind:
            self._end_part()
            self.parts.append(replace(delta, kind=kind, text=""))
            self._runs.append(TextRun(self.parts[-1], len(self.parts) - 1, begins=True))
        run = self._last_run()
        run.part.text += delta.text
        if run.drafts and run.drafts[-1][1] == accepted:
            run.drafts[-1][0] += delta.text
        elif delta.text:
            run.drafts.append([delta.text, accepted])
        run.pieces += self._silent
        run.part.pieces += self._silent
        self._silent = []

    def _last_run(self) -> TextRun:
        if not self._runs:
            self._runs.append(TextRun(self.parts[-1], len(self.parts) - 1))
        return self._runs[-1]

    def _end_part(self) -> None:
        if self.parts:
            self._last_run().ends = True

    @property
    def cut(self) -> bool:
        """Whether something other than the model ended the choice."""
        end = self.end
        return end is not None and (end.finish_reason == "length" or end.stop is not None)

    @property
    def finish_reason(self) -> str:
        """Why the choice has ended: "stop", "length" or "tool_calls"."""
        reason = self.end.finish_reason if self.end else "stop"
        calls = any(part.kind == "call" for part in self.parts)
        return "tool_calls" if calls and (reason == "stop" or self.finished) else reason


class ApiAnswer(ABC):
    """An answer in the format of one of the APIs.

    It takes the events of its choices, interleaved in any way, and returns the chunks to stream for
    them. When all choices have ended, it can also be sent as one response.

    Args:
        choices: the choices of all prompts.
    """

    end = ""
    """The text that ends a stream."""

    headers: Mapping[str, str] = {}
    """The response's headers."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices

    def read_with(self, tokenizer: TokenizerWrapper, format: OutputFormat | None) -> None:
        """Set the tokenizer and the format of the outputs, before the first event."""
        self.choices = [Choice(choice.index, format) for choice in self.choices]

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.end for choice in self.choices)

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Take events; return the chunks that a stream sends for them."""
        chunks: list[dict[str, Any]] = []
        for index, group in groupby(events, key=lambda event: event.index):
            choice, happened = self.choices[index], [*group]
            first, last = happened[0], happened[-1]
            if isinstance(first, Begun):
                chunks += self.choice_begun(first)
            pieces = [event for event in happened if isinstance(event, Piece)]
            end = last if isinstance(last, Ended) else None
            chunks += self.feed_choice(choice, choice.read(pieces, end))
        if self.done:
            chunks += self.close()
        return chunks

    def begin(self) -> list[dict[str, Any]]:
        """The chunks that a stream sends before any event."""
        return []

    def choice_begun(self, event: Begun) -> list[dict[str, Any]]:
        """The chunks before a choice's first token."""
        return []

    @abstractmethod
    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        """The chunks for the runs added to a choice, and for its end if it has ended."""

    def close(self) -> list[dict[str, Any]]:
        """The chunks after all choices have ended."""
        return []

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer as JSON."""

    def finished(self, index: int) -> bool:
        """Whether a choice needs no more tokens, even if it has not ended yet."""
        return self.choices[index].finished

    def keep_alive(self) -> str:
        """A stream's keep-alive: a comment, which clients ignore."""
        return ": still working\n\n"

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The chunk that reports an error after the response has begun."""
        return error.body


# --- sending ---

_log = logging.getLogger("mlxspec.server")

_LOOKING = 0.1  # seconds between checks that a client without a stream is still connected
FAILED = ApiError("internal server error: see the server's log", status=500)


async def answered(
    request: Request, stream: EventStream, answer: ApiAnswer, streamed: bool, keep_alive: float
) -> Response:
    """The response that sends an answer, as a stream or as a whole.

    If the client disconnects, the generations end.

    Args:
        request: the client's request.
        stream: the generations' events.
        answer: turns the events into chunks or a whole answer.
        streamed: whether to send server-sent events.
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
        request: the client's request.
        responding: returns the response.
        answer: the answer that is streamed.
        patience: seconds after which a keep-alive is sent.
        on_refusal: called with an error that is sent in the stream.
    """
    task = asyncio.create_task(responding)
    request.state.uses.callback(task.cancel)  # if the client leaves

    async def content() -> AsyncIterator[str]:
        while not task.done():
            yield answer.keep_alive()
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


def framed(chunk: dict[str, Any]) -> str:
    """A chunk as a server-sent event, whose name is the chunk's type, if it has one."""
    event = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{event}data: {json.dumps(chunk)}\n\n"


async def _server_sent_events(
    stream: EventStream, answer: ApiAnswer, keep_alive: float
) -> AsyncIterator[str]:
    """Yield an answer's chunks as they are generated. An error replaces the rest of them."""
    yield "".join(map(framed, answer.begin()))
    try:
        async with aclosing(stream.events(keep_alive)) as happening:
            async for events in happening:
                if not events:
                    yield answer.keep_alive()
                    continue
                if text := "".join(map(framed, answer.feed(events))):
                    yield text
                stream.stop(answer.finished)
    except Exception as error:
        yield framed(answer.failed(_as_api_error(error)))
    yield answer.end


def _as_api_error(error: Exception) -> ApiError:
    """The error that a client receives for an exception."""
    if isinstance(error, ApiError):
        return error
    _log.error("an answer has failed", exc_info=error)
    return FAILED
