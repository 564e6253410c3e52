"""Parses a model's output into text, reasoning and tool calls while it is generated.

An output is in a state, such as "normal" or "reasoning", and markers lead from one state to
another. mlx-lm infers the markers of most models from their tokenizers. The formats of tool calls
are in :mod:`mlxspec.server.tool_calls`. Here is the format of gpt-oss, whose messages have headers.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..generation.request import undecided
from ..models.reasoning import has_tokens, reasoning_markers
from .text_reader import Reading, TextReader, Unexpected, Unfinished, any_of
from .tool_calls import CALL_FORMATS, HARMONY_HEADER, CallFormat, Tools
from .worker import Piece


@dataclass(frozen=True)
class OutputFormat:
    """How to parse a model's output.

    Attributes:
        tokenizer: the model's tokenizer, which knows the markers.
        tools: the tools offered to the model. Without any, calls are plain text.
        initial: the state in which the output begins: "normal", "reasoning", "tool" (after a call's
            marker) or, where messages have headers, "header".
        several_calls: whether an answer may have more than one call.
        trims_space: whether the tokenizer adds a space at the beginning of the output, which is
            dropped.
    """

    tokenizer: TokenizerWrapper
    tools: Sequence[dict[str, Any]] = ()
    initial: str = "normal"
    several_calls: bool = True
    trims_space: bool = False


def parser_name(tokenizer: TokenizerWrapper) -> str:
    """mlx-lm's name for a model's tool call format; "harmony" for gpt-oss's."""
    if is_harmony(tokenizer):
        return "harmony"
    return str(getattr(tokenizer.tool_parser, "__module__", "")).rpartition(".")[2]


def is_harmony(tokenizer: TokenizerWrapper) -> bool:
    """Whether a model's messages have the headers of OpenAI's harmony format."""
    return has_tokens(tokenizer, ("<|start|>", "<|channel|>", "<|message|>"))


def initial_state(tokenizer: TokenizerWrapper) -> str:
    """The state in which a model's output begins after its usual prompt."""
    return "header" if is_harmony(tokenizer) else tokenizer.response_initial_state or "normal"


FINAL_MESSAGE = "<|channel|>final<|message|>"
"""The header of the message in which gpt-oss answers."""

_HARMONY = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>", "<|start|>"), "header")


def _transitions(format: OutputFormat, calls: CallFormat) -> dict[str, dict[str, str]]:
    """For each state: the markers that end it, and the states that they lead to."""
    tokenizer = format.tokenizer
    if is_harmony(tokenizer):
        return dict.fromkeys(("normal", "reasoning", "arguments"), _HARMONY)
    states: dict[str, dict[str, str]] = {"normal": {}, "reasoning": {}, "arguments": {}}
    if markers := reasoning_markers(tokenizer):
        states["normal"][markers[0]] = "reasoning"
        states["reasoning"][markers[1]] = "normal"
    states["normal"] |= dict.fromkeys(tokenizer.structural_markers, "normal")
    for state, edges in tokenizer.response_transitions.items():
        next_states = {marker: to for marker, to in edges if to != "tool"}
        states[state] = states.get(state, {}) | next_states
    if format.tools:
        begins = [
            state
            for state, edges in tokenizer.response_transitions.items()
            if "tool" in dict(edges).values()
        ]
        for state in begins or ["normal"]:
            states[state] |= dict.fromkeys(calls.markers, "tool")
        if markers:
            states["reasoning"] |= dict.fromkeys(calls.markers, "tool")
        if tokenizer.tool_call_end:
            states["arguments"][tokenizer.tool_call_end] = "normal"
    return states


def _call_format(format: OutputFormat) -> CallFormat:
    # A model that calls no tools has no markers either.
    return CALL_FORMATS.get(parser_name(format.tokenizer), CALL_FORMATS["harmony"])


@dataclass
class Part:
    """A part of an answer (text, reasoning or a tool call), or the next piece of such a part.

    Attributes:
        kind: "text", "reasoning", "call" (a tool call or its beginning) or "arguments" (the next
            piece of a call's arguments).
        text: the text, or a call's arguments as JSON.
        index: the call's index in the answer.
        id: the id under which the client returns the call's result.
        name: the called function's name.
        pieces: the part's tokens.
    """

    kind: str
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""
    pieces: list[Piece] = field(default_factory=list)


class OutputParser:
    """Parses one output incrementally, in segments of any length.

    White space next to a marker is dropped: it belongs to the format, and chat templates add it
    back. A marker is text if it stands between backticks, if what follows is not a call of one of
    the tools, or if it would begin reasoning in the middle of a text.

    Attributes:
        n_calls: how many calls have begun.
        finished: whether the only call that the answer may have is complete. Later text is dropped.
    """

    def __init__(self, format: OutputFormat) -> None:
        self.n_calls = 0
        self.finished = False
        self._format = format
        self._tools = Tools(format.tools)
        self._calls = _call_format(format)
        self._states = _transitions(format, self._calls)
        self._state = format.initial
        self._read = TextReader()
        self._parts: list[Part] = []
        self._ids: set[str] = set()  # of the calls
        self._gap = ""  # white space that is dropped if a marker follows
        self._fresh = True  # whether there was only white space since the beginning or a marker
        self._after_marker = format.initial == "reasoning"
        self._trims_space = format.trims_space
        self._has_headers = is_harmony(format.tokenizer)
        self._header = ""  # text of a header, which is dropped if a message follows
        self._previous = ""  # the last character before the position
        self._called = 0  # where the last call ended
        self._growing = False  # whether a part of a call has been sent
        self._waiting: tuple[str, str, list[str]] | None = None
        """Of a call whose arguments are not complete: its name, its id and these arguments."""
        self._put_at = 0  # where these arguments end
        self._parsing = self._parse()

    @property
    def in_call(self) -> bool:
        """Whether the output is inside a call whose arguments have begun to be sent."""
        return self._state == "arguments"

    @property
    def reasoning(self) -> bool:
        """Whether the output is inside reasoning."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Part]:
        """Parse the next segment of the output."""
        if text and self._trims_space:
            self._trims_space = False
            text = text.removeprefix(" ")
        self._read.text += text
        return self._advance()

    def finish(self, cut: bool = False) -> list[Part]:
        """At the end of the output, parse the text that was held back.

        Args:
            cut: whether something other than the model ended the output. An unfinished call is then
                sent as far as its arguments go. One without arguments is dropped: it is not text,
                and the finish reason explains its absence.
        """
        self._read.ended, self._read.cut = True, cut
        return self._advance()

    def _advance(self) -> list[Part]:
        if not self.finished:
            next(self._parsing, None)
        parts, self._parts = self._parts, []
        return parts

    def _parse(self) -> Reading[None]:
        if self._state == "tool":  # the prompt ends with the marker
            yield from self._parse_calls("", "normal")
        while True:
            if self._state == "header" and self._has_headers:
                yield from self._parse_header()
            before = self._state
            marker = yield from self._parse_text()
            if not marker:
                return
            self._state = self._states[before][marker]
            if self._state == "tool":
                yield from self._parse_calls(marker, before)
            else:
                self._enter()

    # --- text ---

    def _parse_text(self) -> Reading[str]:
        """Parse text up to and past the next marker; return the marker, empty at the end."""
        read, markers = self._read, tuple(self._states.get(self._state, {}))
        pattern = any_of(markers)
        while True:
            match = pattern.search(read.text, read.at) if markers else None
            if match:
                marker = match[0]
                self._take(match.start())
                if self._leads(marker) and not (yield from self._is_quoted(marker)):
                    read.at += len(marker)
                    read.drop()
                    self._previous = ""
                    return marker
                self._take(read.at + len(marker))
                continue
            held = 0 if read.ended else undecided(read.text[read.at :], markers)
            self._take(len(read.text) - held)
            read.drop()
            if read.ended:
                self._end_text()
                return ""
            yield

    def _leads(self, marker: str) -> bool:
        """Whether a marker may lead to its state from here."""
        to = self._states[self._state][marker]
        return to != "reasoning" or self._state != "normal" or self._fresh

    def _is_quoted(self, marker: str) -> Reading[bool]:
        """Whether the marker that comes next stands between backticks."""
        if self._previous != "`":
            return False
        return (yield from self._read.peek(len(marker) + 1)).endswith("`")

    def _take(self, end: int) -> None:
        """Add the text up to a position, and move there."""
        read = self._read
        if text := read.text[read.at : end]:
            self._add(text)
            self._previous = text[-1]
            read.at = end

    def _add(self, text: str) -> None:
        """Add text to the answer, except for white space at its end."""
        if self.finished:
            return
        if self._state == "arguments":
            self._argue(text)
            return
        if self._state not in ("normal", "reasoning"):
            self._header += text
            return
        if self._after_marker:
            text = text.lstrip()
        text = self._gap + text
        solid = text.rstrip()
        self._gap = text[len(solid) :]
        if solid:
            self._after_marker = self._fresh = False
            self._said(solid)

    def _said(self, text: str) -> None:
        self._parts.append(Part("reasoning" if self.reasoning else "text", text))

    def _enter(self) -> None:
        """Begin a state after a marker."""
        self._gap = self._header = ""
        self._after_marker = self._fresh = True

    def _end_text(self) -> None:
        """Add what was held back when the output ends."""
        if self._header.strip() and not self._read.cut:
            self._gap = self._header
        if self._gap and not self.finished:
            self._said(self._gap)

    # --- calls ---

    def _parse_calls(self, marker: str, before: str) -> Reading[None]:
        """Parse the calls after a marker. What is not a call becomes text, as it was written.

        Args:
            marker: the marker; empty if the prompt has it.
        """
        read, n_calls = self._read, self.n_calls
        self._called = read.at
        unfinished = failed = False
        try:
            yield from self._calls.read(read, self._tools, self, marker)
        except Unfinished:
            unfinished = True
        except Unexpected:
            failed = True
        self._state = "reasoning" if before == "reasoning" else "normal"
        if unfinished and read.cut and self._waiting:
            self._begin_growing()
        if self._growing:  # what was sent cannot become text
            self._growing, self._state = False, "arguments"
            read.at = self._put_at
        elif not (unfinished or failed):
            self._enter()
        else:
            read.at = self._called
            dropped, self._header = self._header + marker, ""
            if unfinished and read.cut:  # an unfinished call is no text
                read.at = len(read.text)
            elif self.n_calls == n_calls:
                self._add(dropped)
                self._previous = marker[-1:]
            elif unfinished and not read.text[read.at :].strip():
                read.at = len(read.text)
            if unfinished:
                self._take(len(read.text))
        self._waiting = None
        read.drop()

    def add(self, name: str, arguments: str, call_id: str = "") -> None:
        """Add a call to the answer, as :class:`~mlxspec.server.tool_calls.Calls` says."""
        self._called = self._read.at
        if not self._growing:
            self._begin(name, call_id)
            self._argue(arguments)
        self._growing, self._waiting = False, None
        self.finished = not self._format.several_calls

    def grow(self, name: str, call_id: str = "") -> Callable[[str], None]:
        """Take a call's arguments piece by piece, as the same protocol says.

        Short arguments are sent once they are complete, since a call that turns out to be invalid
        becomes text. Long ones are sent while they are written.
        """
        self._waiting = (name, call_id, waiting := [""])
        length = 0

        def put(piece: str) -> None:
            nonlocal length
            length += len(piece)
            self._put_at = self._read.at
            if self._growing:
                self._argue(piece)
                return
            waiting.append(piece)
            if length > _LONG:
                self._begin_growing()

        return put

    def _begin_growing(self) -> None:
        """Send what has been read of a call whose arguments are not complete."""
        assert self._waiting
        name, call_id, pieces = self._waiting
        self._begin(name, call_id)
        self._argue("".join(pieces))
        self._growing = True

    def _begin(self, name: str, call_id: str) -> None:
        if self.finished:
            return
        self._gap = self._header = ""
        self._after_marker = False
        if not call_id or call_id in self._ids:  # Mistral's templates require nine such characters
            call_id = "".join(map(secrets.choice, [string.ascii_letters + string.digits] * 9))
        self._ids.add(call_id)
        self._parts.append(Part("call", index=self.n_calls, id=call_id, name=name))
        self.n_calls += 1

    def _argue(self, text: str) -> None:
        if not self.finished:
            self._parts.append(Part("arguments", text, self.n_calls - 1))

    # --- headers ---

    def _parse_header(self) -> Reading[None]:
        """Parse the header of gpt-oss's next message, and the call if the message is one."""
        read = self._read
        header, match = "", None
        try:
            yield from read.space()
            begins = yield from read.one_of(*_HEADER_BEGINS)
            rest, _ = yield from read.find("<|message|>", limit=_LONGEST_HEADER)
            header = read.text[: read.at]
            match = HARMONY_HEADER.fullmatch(begins + rest)
        except Unfinished:
            if read.cut or not read.text.strip():
                read.at = len(read.text)
                self._state = "normal"
                return
        except Unexpected:
            pass
        if not match:
            read.at = 0
            self._state = "normal"
            self._after_marker = False
        elif match["to"] or match["then_to"]:
            read.drop()
            self._header = ""
            yield from self._parse_calls(header, "header")
        else:
            read.drop()
            self._state = "reasoning" if match["channel"] == "analysis" else "normal"
            self._enter()


_LONG = 2000  # characters of arguments; a model writes them in some ten seconds
_HEADER_BEGINS = ("<|start|>assistant", "assistant", "<|channel|>", "to=")
_LONGEST_HEADER = 300  # characters
