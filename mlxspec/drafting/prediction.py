"""Drafts from the text that the caller expects as output."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from .drafter import Drafter, DraftTree, VerifiedStep

_LONGEST, _SHORTEST = 4, 2  # tokens that have to agree where the output comes back to the text


class PredictionDrafter(Drafter):
    """Drafts the rest of a text that the output is expected to follow, as an editor sends a file.

    The output is taken to begin where the text begins. Where it departs, its last tokens are
    looked up in the text: the next place after the one that was left, or else the first one.

    Args:
        prediction: token ids.
    """

    branching = False

    def __init__(self, prediction: Sequence[int]) -> None:
        self._text = tuple(prediction)

    @cached_property
    def _places(self) -> dict[tuple[int, ...], list[int]]:
        """Behind which places in the text an n-gram ends, in ascending order."""
        places: dict[tuple[int, ...], list[int]] = {}
        for size in range(_SHORTEST, _LONGEST + 1):
            for end in range(size, len(self._text) + 1):
                places.setdefault(self._text[end - size : end], []).append(end)
        return places

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._output: list[int] = []
        self._place = 0
        """Where in the text the output goes on, or where it left the text."""
        self._follows = True

    def propose(self, max_depth: int) -> DraftTree:
        draft = self._text[self._place : self._place + max_depth] if self._follows else ()
        return DraftTree.chain(self._last, draft)

    def observe(self, step: VerifiedStep) -> None:
        for token in step.tokens:
            self._last = token
            self._output = [*self._output, token][-_LONGEST:]
            if self._follows and self._text[self._place : self._place + 1] == (token,):
                self._place += 1
            else:
                self._find()

    def _find(self) -> None:
        """Look for the output's last tokens, the longest match first."""
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            places = self._places.get(tuple(self._output[-size:]), [])
            if places:
                after = bisect_left(places, self._place)
                self._place = places[after if after < len(places) else 0]
                self._follows = True
                return
        self._follows = False
