"""The drafts of any drafter as a planner's candidates."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..draft.combined import view
from ..draft.custom import checked_drafter, not_a_draft
from ..draft.drafter import Drafter, DraftTree, VerifiedStep
from .planner import Candidates, Limits, Source, best_first

# Where these come from: docs/planner-notes.md, "Constants".
_RANKS, _DEPTHS = 4, 8  # ranks among siblings, and depths, each with a probability of its own
_FIRST_P_ACCEPT = 0.5
_RATE = 0.1
_LEAST, _MOST = 0.01, 0.99  # nothing is certain, however often it was right or wrong


class DrafterSource(Source):
    """The drafts of any drafter as candidates.

    How likely its tokens are right is learned from what followed, by depth and by rank among
    siblings, whether they were verified or not. So a drafter that is often wrong soon costs
    nothing but its own time, which is no part of what rows cost.

    Args:
        drafter: proposes the drafts; it serves one generation at a time.
        name: where drafts say that they come from; by default the drafter's class.
    """

    def __init__(self, drafter: Drafter, name: str | None = None) -> None:
        self._drafter = checked_drafter(drafter)
        self.name = name or type(drafter).__name__
        self._p_accept = [[_FIRST_P_ACCEPT] * _DEPTHS for _ in range(_RANKS)]

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        with self._asking():
            self._drafter.begin(list(prompt))

    def candidates(self, limits: Limits) -> Candidates:
        with self._asking():
            started = time.perf_counter()
            tree: object = self._drafter.propose(limits.depth)
            self.spent += time.perf_counter() - started
            if not isinstance(tree, DraftTree) or tree.tokens[0] != self._last:
                raise not_a_draft(tree, self._drafter, self._last)
        tree = tree.pruned(limits.depth, sys.maxsize)
        self._tree = tree if limits.branching else tree.first_chain()
        proposed = Candidates(self._last)
        ranks: dict[int, int] = {}
        self._cells: list[tuple[int, int]] = [(0, 0)]
        for node, (token, parent) in enumerate(
            zip(self._tree.tokens[1:], self._tree.parents[1:], strict=True), start=1
        ):
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            cell = min(rank, _RANKS - 1), min(self._tree.depths[node], _DEPTHS) - 1
            above = proposed.p_reached[parent - 1] if parent else 1.0
            proposed.add(token, parent, above * self._p_accept[cell[0]][cell[1]])
            self._cells.append(cell)
        candidates = Candidates(self._last, self.name)
        best_first(proposed, candidates)
        candidates.cut(limits.nodes)
        return candidates

    def observe(self, step: VerifiedStep, searched: bool) -> None:
        if searched:
            self._learn(step.tokens)
            step = view(step, self._tree)
        self._last = step.tokens[-1]
        with self._asking():
            started = time.perf_counter()
            self._drafter.observe(step)
            self.spent = time.perf_counter() - started  # which counts for the next step

    def end(self) -> None:
        with self._asking():
            self._drafter.end()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Tell a fault of the drafter's from one of planning."""
        try:
            yield
        except Exception as error:
            self.fault = error
            raise

    def _learn(self, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            right = None
            for child, parent in enumerate(self._tree.parents):
                if parent == node and right is None:
                    rank, depth = self._cells[child]
                    hit = self._tree.tokens[child] == token
                    p_accept = self._p_accept[rank][depth]
                    p_accept += _RATE * (hit - p_accept)
                    self._p_accept[rank][depth] = min(_MOST, max(_LEAST, p_accept))
                    right = child if hit else None
            if right is None:
                return
            node = right
