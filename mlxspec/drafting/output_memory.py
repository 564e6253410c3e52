"""Earlier outputs, which later ones often repeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .suffix_index import SEPARATOR


class OutputMemory:
    """The last outputs of this process, first in, first out. Threads may share it.

    There is no lock: a generation that is collected as garbage adds its output wherever that
    happens, which might be here. What each line does with the deque it does at once.

    Args:
        max_tokens: how much is remembered; 0 remembers nothing.
    """

    def __init__(self, max_tokens: int = 16384) -> None:
        self.max_tokens = max_tokens
        self._outputs: deque[list[int]] = deque()

    def add(self, output: Sequence[int]) -> None:
        """Remember an output; of one that is too long, its end. The oldest ones make room."""
        kept = list(output)[max(0, len(output) - self.max_tokens) :]
        if not kept:
            return
        self._outputs.append(kept)
        surplus = sum(map(len, self._outputs.copy())) - self.max_tokens
        while surplus > 0:
            surplus -= len(self._outputs.popleft())

    def text(self) -> list[int]:
        """All of it, the oldest first, a separator after each output."""
        return [token for output in self._outputs.copy() for token in (*output, SEPARATOR)]
