"""A choice, one of the outputs for a prompt, in parts: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .output_parser import OutputFormat, OutputParser, Part
from .worker import Ended, Piece


@dataclass
class TextRun:
    """The text that a batch of tokens adds to a part.

    Attributes:
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
    def cut_in_call(self) -> bool:
        """Whether a stop string has cut a call whose arguments have begun to be sent."""
        stopped = self.end is not None and self.end.stop is not None
        return stopped and self._parser is not None and self._parser.in_call

    @property
    def finish_reason(self) -> str:
        """Why the choice has ended: "stop", "length" or "tool_calls".

        A call that a stop string has cut must not be run, so it ends with "stop".
        """
        reason = self.end.finish_reason if self.end else "stop"
        if self.cut_in_call:
            return reason
        calls = any(part.kind == "call" for part in self.parts)
        return "tool_calls" if calls and (reason == "stop" or self.finished) else reason
