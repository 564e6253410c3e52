"""Earlier outputs, which later ones often repeat."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .suffix_index import SEPARATOR


class OutputMemory:
    """The last outputs of this process, first in, first out. Threads may share it.

    Args:
        max_tokens: how much is remembered; 0 remembers nothing.
    """

    def __init__(self, max_tokens: int = 16384) -> None:
        self.max_tokens = max_tokens
        self._outputs: tuple[list[int], ...] = ()  # never changed, only replaced
        self._adding = threading.Lock()

    def add(self, output: Sequence[int]) -> None:
        """Remember an output; of one that is too long, its end. The oldest ones make room."""
        kept = list(output)[max(0, len(output) - self.max_tokens) :]
        if not kept:
            return
        with self._adding:
            outputs = (*self._outputs, kept)
            surplus, oldest = sum(map(len, outputs)) - self.max_tokens, 0
            while surplus > 0:
                surplus -= len(outputs[oldest])
                oldest += 1
            self._outputs = outputs[oldest:]

    def text(self) -> list[int]:
        """All of it, the oldest first, a separator after each output."""
        return [token for output in self._outputs for token in (*output, SEPARATOR)]
