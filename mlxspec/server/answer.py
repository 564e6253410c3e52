"""From the text that a model writes to an answer in any API's form, sent whole or in chunks.

mlx-lm knows the markers of each family of models (``TextStateMachine``) and how to read its calls
(``tool_parsers``). :class:`OutputParser` is the one place that uses them. A :class:`Choice`
collects what it reads as parts: texts, reasoning, and calls of tools. Each API renders these parts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import string
from abc import ABC, abstractmethod
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .body import ApiError
from .worker import Begun, Ended, Event, EventStream, Piece

# --- the format of an output ---


@dataclass(frozen=True)
class OutputFormat:
    """How to read an output.

    Attributes:
        machine: knows the markers, and which state each leads to.
        initial: the state in which the output begins: "normal", "reasoning", "tool", or one of
            the model's own.
        call_start: the marker before a call.
        call_end: the marker after it; empty where a call extends to the output's end.
        parse: mlx-lm's parser, from the text between the markers and the tools to a call or
            several; None where no tools were offered.
        header: matches what comes before arguments that are a JSON object, with the function's
            name as its first group; None for formats whose arguments are not JSON.
        tools: as the client sent them.
        call_begun: what the prompt has of the first call, after its marker.
        several_calls: an answer may have more than one.
        trims_space: the output begins with a space that the tokenizer has put there.
    """

    machine: TextStateMachine
    initial: str = "normal"
    call_start: str = ""
    call_end: str = ""
    parse: Callable[[str, Any], Any] | None = None
    header: re.Pattern[str] | None = None
    tools: Sequence[dict[str, Any]] = ()
    call_begun: str = ""
    several_calls: bool = True
    trims_space: bool = False


_HEADERS = {
    "json_tools": re.compile(
        r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
    ),
    "mistral": re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w-]+)\s*\[ARGS\]\s*(?=\{)"),
}
"""By mlx-lm's parsers: the formats whose arguments are handed on while they are written."""

_LONGEST_HEADER = 1000  # characters; a longer header is read once the call has ended


def output_format(
    tokenizer: TokenizerWrapper, tools: Sequence[dict[str, Any]] = ()
) -> OutputFormat:
    """The format of a model's outputs.

    Args:
        tokenizer: the model's.
        tools: those that the model has been offered. Without any, markers of calls are text.
    """
    if tools and tokenizer.has_tool_calling:
        return OutputFormat(
            make_text_state_machine(tokenizer),
            call_start=tokenizer.tool_call_start,
            call_end=tokenizer.tool_call_end,
            parse=tokenizer.tool_parser,
            header=_HEADERS.get(parser_name(tokenizer)),
            tools=tools,
        )
    without_calls: Any = SimpleNamespace(
        has_thinking=tokenizer.has_thinking,
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        has_tool_calling=False,
        structural_markers=tokenizer.structural_markers,
        response_transitions={
            state: kept
            for state, edges in tokenizer.response_transitions.items()
            if (kept := [edge for edge in edges if edge[1] != "tool"])
        },
    )
    return OutputFormat(make_text_state_machine(without_calls))


def parser_name(tokenizer: TokenizerWrapper) -> str:
    """mlx-lm's name of the way in which a model calls tools."""
    return str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]


# --- reading an output ---


@dataclass(frozen=True)
class Delta:
    """A further part of an output.

    Attributes:
        kind: "text", "reasoning", "call" for the begin of a tool call, or "arguments" for more
            of its arguments, a JSON text.
        text: of the part.
        index: of the call among those of the answer.
        id: by which the client returns a call's result.
        name: the function's.
    """

    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class OutputParser:
    """Reads one output as it comes, in segments of any length.

    White space next to a marker is dropped: it belongs to the format, and chat templates put it
    there again.

    Attributes:
        n_calls: how many calls have begun.
        finished: the answer has the one call that it may have; what follows is dropped.
    """

    def __init__(self, format: OutputFormat) -> None:
        self.n_calls = 0
        self.finished = False
        self._format = format
        self._machine_state = format.machine.make_state(format.initial)
        self._state = format.initial
        self._gap = ""  # white space that is dropped if a marker follows
        self._after_marker = format.initial == "reasoning"
        self._trims_space = format.trims_space
        self._call = _CallText(start="", begun=len(format.call_begun))
        self._ready = self._add(format.call_begun) if format.initial == "tool" else []

    @property
    def reasoning(self) -> bool:
        """Whether the output has come to a piece of reasoning that has not ended."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Delta]:
        """Take the next segment of the output."""
        if text and self._trims_space:
            self._trims_space = False
            text = text.removeprefix(" ")
        self._machine_state, segments = TextStateMachine.split(self._machine_state, text)
        deltas, self._ready = self._ready, []
        for index, (state, segment) in enumerate(segments):
            if index:
                deltas += self._enter(state)
            deltas += self._add(segment)
        return deltas

    def finish(self, cut: bool = False) -> list[Delta]:
        """The output has ended: what was held back.

        Args:
            cut: it was not the model that ended it. A call that has only begun is dropped then:
                it is not text, and the client sees from the end why it is missing.
        """
        self._machine_state, held, _ = TextStateMachine.flush(self._machine_state)
        deltas = self._ready + self._add(held)
        if self._state == "tool":
            deltas += self._end_call("", cut)
        elif self._gap:
            deltas += [self._said(self._gap)]
        self._ready, self._gap = [], ""
        return deltas

    def _enter(self, state: str) -> list[Delta]:
        """A marker has been passed."""
        deltas = self._end_call(self._format.call_end) if self._state == "tool" else []
        self._state, self._gap, self._after_marker = state, "", True
        if state == "tool":
            self._call = _CallText(self._format.call_start)
        return deltas

    def _add(self, text: str) -> list[Delta]:
        if self.finished:
            return []
        if self._state == "tool":
            return self._add_to_call(text)
        if self._state not in ("normal", "reasoning"):
            return []  # a header between messages
        if self._after_marker:
            text = text.lstrip()
        text = self._gap + text
        solid = text.rstrip()
        self._gap = text[len(solid) :]
        if not solid:
            return []
        self._after_marker = False
        return [self._said(solid)]

    def _said(self, text: str) -> Delta:
        return Delta("reasoning" if self.reasoning else "text", text)

    # --- calls ---

    def _add_to_call(self, text: str) -> list[Delta]:
        call, pattern = self._call, self._format.header
        call.text += text
        deltas: list[Delta] = []
        while pattern and not self.finished:
            if not call.in_arguments:
                header = pattern.match(call.text, call.taken, call.taken + _LONGEST_HEADER)
                if not header:
                    break
                deltas.append(self._begin(header[1]))
                call.begin_arguments(header.end())
            if arguments := call.take_arguments():
                deltas.append(Delta("arguments", arguments, self.n_calls - 1))
            if call.in_arguments:
                break
            self.finished = not self._format.several_calls
        return deltas

    def _begin(self, name: str, call_id: object = None) -> Delta:
        self.n_calls += 1
        if not isinstance(call_id, str):  # Mistral's templates take nine of these alone
            call_id = "".join(map(secrets.choice, [string.ascii_letters + string.digits] * 9))
        return Delta("call", index=self.n_calls - 1, id=call_id, name=name)

    def _end_call(self, marker: str, cut: bool = False) -> list[Delta]:
        """The calls that are not known yet; what cannot be read as a call is text."""
        call, format = self._call, self._format
        if self.finished or not format.parse or call.in_arguments:
            return []
        try:
            found = format.parse(call.text, format.tools)
            parsed = [_read_call(one) for one in (found if isinstance(found, list) else [found])]
            if not parsed:
                raise ValueError("no call")
        except Exception:  # the parsers raise whatever a text makes them raise
            return [] if cut else self._as_text(marker)
        if call.taken:
            return []
        deltas: list[Delta] = []
        for name, arguments, call_id in parsed:
            if self.finished:
                break
            deltas += [self._begin(name, call_id), Delta("arguments", arguments, self.n_calls - 1)]
            self.finished = not self._format.several_calls
        return deltas

    def _as_text(self, marker: str) -> list[Delta]:
        """What follows the last call that could be read; all of it, markers too, if none could."""
        call = self._call
        if not call.taken:
            return [Delta("text", call.start + call.text[call.begun :] + marker)]
        rest = call.text[call.taken :]
        return [Delta("text", rest)] if rest.strip(_CLOSING) else []


_CLOSING = "}] \t\r\n"  # what may follow the arguments of a call


class _CallText:
    """The text between two markers of calls, and how much of it has been handed on.

    Args:
        start: the marker before it, unless that stands in the prompt.
        begun: how many of its characters do.

    Attributes:
        text: all of it so far.
        taken: where the part begins that has not been handed on.
        in_arguments: that part is of a JSON object that has not ended.
    """

    def __init__(self, start: str, begun: int = 0) -> None:
        self.text = ""
        self.start = start
        self.begun = begun
        self.taken = 0
        self.in_arguments = False

    def begin_arguments(self, at: int) -> None:
        """A JSON object stands from here on."""
        self.taken = at
        self.in_arguments = True
        self._depth = 0
        self._in_string = False

    def take_arguments(self) -> str:
        """As much of the object as is there, without a backslash that escapes what follows."""
        begin = self.taken
        while stop := (_IN_STRING if self._in_string else _OUTSIDE).search(self.text, self.taken):
            mark = stop[0]
            if mark == "\\":
                self.taken = stop.start()
                return self.text[begin : self.taken]
            self.taken = stop.end()
            self._in_string ^= mark == '"'
            self._depth += (mark in "{[") - (mark in "}]")
            if not self._depth:
                self.in_arguments = False
                return self.text[begin : self.taken]
        self.taken = len(self.text)
        return self.text[begin:]


_IN_STRING = re.compile(r'"|\\.?', re.DOTALL)
_OUTSIDE = re.compile(r'["{}\[\]]')


def _read_call(call: dict[str, Any]) -> tuple[str, str, object]:
    """Name, arguments as JSON, and id of a call that mlx-lm has parsed.

    Raises:
        Exception: of any kind, if it is not a call.
    """
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a function without a name")
    if not isinstance(arguments, str):  # as a string they are JSON already
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + arguments).encode()  # raises for half a surrogate pair, which no answer can hold
    return name, arguments, call.get("id")


# --- choices ---


@dataclass
class Part:
    """A run of text or reasoning, or a call of a tool.

    Attributes:
        kind: "text", "reasoning" or "call".
        id: by which the client returns a call's result.
        name: the called function's.
        index: of the call among those of the answer.
        texts: what it has so far; the JSON of the arguments for a call.
    """

    kind: str
    id: str = ""
    name: str = ""
    index: int = 0
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it has so far."""
        return "".join(self.texts)


@dataclass
class TextRun:
    """What some tokens add to a part.

    Attributes:
        part: that they add to.
        begins: the part begins with it.
        drafts: the texts, and whether each comes from an accepted draft.
        pieces: the tokens with its text, and those before it that added nothing; none that reason.
    """

    part: Part
    begins: bool
    drafts: list[tuple[str, bool]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What they add."""
        return "".join(text for text, _ in self.drafts)


class Choice:
    """A choice of an answer: its parts so far, and what they take.

    Args:
        index: of the choice.
        format: of the output; None for one text without markers.

    Attributes:
        parts: in order.
        end: how it has ended, once it has.
        length: characters of its text, without reasoning and calls.
        pieces: the tokens so far, if they have log-probabilities.
        latest: those of the last :meth:`read`.
        reasoning_tokens: how many tokens reasoned.
        tokens: how many there are, up to the end of the one call that the answer may have.
        accepted: how many of them were accepted drafts.
    """

    def __init__(self, index: int = 0, format: OutputFormat | None = None) -> None:
        self.index = index
        self.parts: list[Part] = []
        self.end: Ended | None = None
        self.pieces: list[Piece] = []
        self.latest: list[Piece] = []
        self.length = self.reasoning_tokens = self.tokens = self.accepted = 0
        self._parser = OutputParser(format) if format else None
        self._silent: list[Piece] = []
        """Tokens since the last run that have added nothing."""

    @property
    def finished(self) -> bool:
        """Whether it needs no more tokens, though it may not have ended."""
        return self._parser is not None and self._parser.finished

    @property
    def text(self) -> str:
        """Its text, without reasoning and calls."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    def read(self, pieces: Sequence[Piece], end: Ended | None) -> list[TextRun]:
        """Take some tokens, and the end if it has come; returns what they add."""
        runs: list[TextRun] = []
        parser, self.latest = self._parser, []
        for piece in pieces:
            if self.finished:  # how many follow depends on what else runs
                break
            self.tokens += 1
            self.accepted += piece.accepted
            if piece.logprob is not None:
                self.latest.append(piece)
            if parser is None:
                self._add(Delta("text", piece.text), piece.accepted, runs)
                continue
            reasoned = parser.reasoning
            if not reasoned:
                self._silent.append(piece)
            for delta in parser.feed(piece.text):
                self._add(delta, piece.accepted, runs)
            self.reasoning_tokens += reasoned or parser.reasoning
        self.pieces += self.latest
        if end:
            if parser:
                cut = end.finish_reason == "length" or end.stop is not None
                for delta in parser.finish(cut):
                    self._add(delta, False, runs)
            self.end = self._counted(end)
        return runs

    def _add(self, delta: Delta, accepted: bool, runs: list[TextRun]) -> None:
        kind = "call" if delta.kind == "arguments" else delta.kind
        begins = delta.kind == "call" or not self.parts or self.parts[-1].kind != kind
        if begins:
            self.parts.append(Part(kind, delta.id, delta.name, delta.index))
        part = self.parts[-1]
        part.texts.append(delta.text)
        if kind == "text":
            self.length += len(delta.text)
        if begins or not runs:
            runs.append(TextRun(part, begins))
        runs[-1].drafts.append((delta.text, accepted))
        runs[-1].pieces += self._silent
        self._silent = []

    def _counted(self, end: Ended) -> Ended:
        """The end, without the tokens that are not part of the answer."""
        if not self.finished:
            return end
        # Drafts that were accepted later have not been rejected, either.
        drafted = end.drafted - (end.accepted - self.accepted)
        return replace(end, completion_tokens=self.tokens, drafted=drafted, accepted=self.accepted)

    @property
    def finish_reason(self) -> str:
        """Why it has ended: "stop", "length" or "tool_calls"."""
        reason = self.end.finish_reason if self.end else "stop"
        calls = any(part.kind == "call" for part in self.parts)
        return "tool_calls" if calls and (reason == "stop" or self.finished) else reason


class ApiAnswer(ABC):
    """An answer in the form of an API.

    It is fed with events, of any of its choices in any order, and returns the chunks that a
    streamed answer sends for them. When all choices have ended it can be sent as a whole.

    Args:
        choices: of all prompts together.
    """

    end = ""
    """What ends a stream."""

    headers: Mapping[str, str] = {}
    """Of the response."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.end for choice in self.choices)

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Take what has happened; returns the chunks of a streamed answer for it.

        What comes for a choice after its end is left out.
        """
        chunks = self.begin()
        was_done = self.done
        for index, group in groupby(events, key=lambda event: event.index):
            choice, end = self.choices[index], None
            if choice.end:
                continue
            pieces: list[Piece] = []
            for event in group:
                if isinstance(event, Begun):
                    chunks += self.choice_begun(event)
                elif isinstance(event, Piece):
                    pieces.append(event)
                else:
                    end = event
                    break
            chunks += self.feed_choice(choice, choice.read(pieces, end))
        if self.done and not was_done:
            chunks += self.close()
        return chunks

    def begin(self) -> list[dict[str, Any]]:
        """The chunks before any event, once; the first :meth:`feed` has them otherwise."""
        return []

    def choice_begun(self, event: Begun) -> list[dict[str, Any]]:
        """The chunks before the first token of a choice."""
        return []

    @abstractmethod
    def feed_choice(self, choice: Choice, runs: Sequence[TextRun]) -> list[dict[str, Any]]:
        """The chunks for what was added to a choice, and for its end if it has ended."""

    def close(self) -> list[dict[str, Any]]:
        """The chunks after the end of all choices."""
        return []

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""

    def finished(self, index: int) -> bool:
        """Whether a choice needs no more tokens, though it may not have ended."""
        return self.choices[index].finished

    def framed(self, chunk: dict[str, Any]) -> str:
        """A chunk as a server-sent event."""
        return f"data: {json.dumps(chunk)}\n\n"

    def keep_alive(self) -> str:
        """What a stream sends while nothing happens: a comment, which clients ignore."""
        return ": still working\n\n"

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The chunk for an error that comes when it is too late for a status."""
        return error.body


# --- sending ---

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
