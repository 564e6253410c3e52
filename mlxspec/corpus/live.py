"""The newest answers, which are searched from the moment at which they end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from .excerpts import Searched
from .part import Learned, put
from .suffix_index import SEPARATOR, SuffixIndex

LEADING_TOKENS = 8
"""Of a prompt, by which the opening of its answer is found: notes/planner.md, "Openings"."""

_PIECE = 256  # tokens that are indexed at a time


class Live:
    """Answers in a suffix index. One thread adds to it while others search.

    Args:
        answers: those to begin with.
    """

    def __init__(self, answers: Iterable[Learned] = ()) -> None:
        self._index = SuffixIndex()
        self._answers: dict[bytes, Learned] = {}
        for answer in answers:
            self.add(answer)

    def __len__(self) -> int:
        """How many tokens are indexed, those of prompts and a SEPARATOR for each text included."""
        return len(self._index)

    @property
    def searched(self) -> Searched:
        """The answers as a look-up takes them."""
        index = self._index
        return Searched(lambda tail, limit: index.occurrences_of(tail), index.tokens, self)

    @property
    def answers(self) -> list[Learned]:
        """Each answer once, the one given last at the end."""
        return [*self._answers.values()]

    def add(self, answer: Learned, leading: Sequence[int] = ()) -> None:
        """Add an answer, which is found from now on.

        Args:
            answer: if its tokens equal those of one before, it is not indexed again, and neither
                is its prompt.
            leading: the last tokens of its prompt, by which its opening is found.
        """
        if not put(answer, self._answers):
            return
        tokens = [*leading, *np.frombuffer(answer.text, np.int32).tolist()]
        for start in range(0, len(tokens), _PIECE):
            self._index.extend(tokens[start : start + _PIECE])
            time.sleep(0)  # lets those that draft have the interpreter
        self._index.extend([SEPARATOR])
