"""The base of the APIs' answers, which turn a model's output into chunks or into a whole answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .body import ApiError
from .choice import Choice, TextRun
from .output_parser import OutputFormat
from .worker import Begun, Ended, Event, Piece


class ApiAnswer(ABC):
    """An answer in the format of one of the APIs.

    It takes the events of its choices, interleaved in any way, and returns the chunks to stream for
    them. When all choices have ended, it can also be sent as one response.
    """

    end = ""
    """The text that ends a stream."""

    headers: Mapping[str, str] = {}
    """The response's headers."""

    def __init__(self, n_choices: int = 1) -> None:
        self.choices = [Choice(index) for index in range(n_choices)]

    def read_with(self, tokenizer: TokenizerWrapper, format: OutputFormat | None) -> None:
        """Set the tokenizer and the format of the outputs, before the first event."""
        self.choices = [Choice(choice.index, format) for choice in self.choices]
        self._tokenizer = tokenizer

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

    def keep_alive(self) -> list[dict[str, Any]]:
        """The chunks of a stream's keep-alive; without any, a comment is sent."""
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The chunk that reports an error after the response has begun."""
        return error.body
