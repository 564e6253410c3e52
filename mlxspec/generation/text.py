"""The output's text as it grows, and where it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns tokens into text as they come; mlx-lm's interface."""

    def reset(self) -> None: ...
    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...
    @property
    def last_segment(self) -> str: ...


class OutputText:
    """Collects tokens as text segments and finds the end of the output.

    A stop string may begin and end inside tokens; text that could be the beginning of one is
    held back until it is decided, so nothing that belongs to a stop string is ever shown.

    Args:
        detokenizer: fresh, ready for the output's first token.
        stop_tokens: token ids that end the output; their own text is not part of it.
        stop_strings: texts that end the output before them.
        max_tokens: with this many tokens the output is full.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_tokens: Collection[int],
        stop_strings: Sequence[str],
        max_tokens: int,
    ) -> None:
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._stop_tokens = stop_tokens
        self._stop_strings = stop_strings
        self._left = max_tokens
        self._held = ""
        self._segments: list[str] = []

    def add(self, token: int) -> bool:
        """Append a token; whether the output ends with it."""
        self._left -= 1
        if token in self._stop_tokens:
            self.finish_reason = "stop"
        else:
            self._detokenizer.add_token(token)
            if self._left == 0:
                self.finish_reason = "length"
        if self.finish_reason:
            self._detokenizer.finalize()
        self._segments.append(self._release(self._detokenizer.last_segment))
        return self.finish_reason is not None

    def take(self) -> list[str]:
        """The segments since the last call, one per token."""
        segments, self._segments = self._segments, []
        return segments

    def _release(self, segment: str) -> str:
        """What may be shown now that ``segment`` has come."""
        text = self._held + segment
        cut = min((at for at in map(text.find, self._stop_strings) if at >= 0), default=None)
        if cut is not None:
            self.finish_reason = "stop"
            self._held = ""
            return text[:cut]
        held = 0 if self.finish_reason else self._undecided(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stop_strings):
                return length
        return 0
