"""What every API makes of the events of a generation: the chunks of a stream, or one answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from .errors import ApiError
from .events import Begun, Ended, Event, Piece
from .output import Delta, OutputParser, Reasoning, Text, ToolCallBegun


class Answer(ABC):
    """An answer in the form of an API.

    It is fed with events, of any of its choices in any order, and returns the chunks that a
    streamed answer sends for them. When all choices have ended it can be told as a whole.

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

    def life_sign(self) -> str:
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
        if isinstance(delta, Text):
            self.content.append(delta.text)
        elif isinstance(delta, Reasoning):
            self.reasoning.append(delta.text)
        elif isinstance(delta, ToolCallBegun):
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
        """The end, without the tokens that are no part of the answer."""
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
