"""Drafters that know nothing of a planner, as its sources."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..draft.combined import view
from ..draft.custom import checked_drafter, not_a_draft
from ..draft.drafter import Drafter, DraftTree, Limits, VerifiedStep

# Where these come from: docs/planner-notes.md, "Constants".
_RANKS, _DEPTHS = 4, 8  # ranks among siblings, and depths, each with a probability of its own
_FIRST_P_ACCEPT = 0.5
_RATE = 0.1
_LEAST, _MOST = 0.01, 0.99  # nothing is certain, however often it was right or wrong


class DrafterSource(Drafter):
    """Gives the drafts of any drafter probabilities, and asks it as if it drafted alone.

    Where a draft has no probabilities, they are learned from what followed, by depth and by rank
    among siblings, whether the tokens were verified or not. So a drafter that is often wrong soon
    costs nothing but its own time, which is no part of what rows cost.

    Args:
        drafter: proposes the drafts; it serves one generation at a time.
        name: the origin of its drafts; by default the drafter's class.

    Attributes:
        spent: seconds of the current step that the drafter took.
        fault: what the drafter has raised, which is not a fault of planning.
    """

    spent = 0.0
    fault: Exception | None = None

    def __init__(self, drafter: Drafter, name: str | None = None) -> None:
        self._drafter = checked_drafter(drafter)
        self.name = name or type(drafter).__name__
        self._p_accept = [[_FIRST_P_ACCEPT] * _DEPTHS for _ in range(_RANKS)]

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._tree: DraftTree | None = None
        with self._asking():
            self._drafter.begin(list(prompt))

    def propose(self, limits: Limits) -> DraftTree:  # type: ignore[override]  # a planner's
        with self._asking():
            started = time.perf_counter()
            proposed: object = self._drafter.propose(limits)
            self.spent += time.perf_counter() - started
            if not isinstance(proposed, DraftTree) or proposed.tokens[0] != self._last:
                raise not_a_draft(proposed, self._drafter, self._last)
        tree = proposed.pruned(limits, sys.maxsize)
        self._tree = tree = tree if limits.branching else tree.first_chain()
        self._cells = _cells_of(tree)
        names = (self.name,) * (len(tree) - 1)
        p_reached = tree.p_reached or tuple(self._estimate(tree))
        return replace(tree, p_reached=p_reached, origins=names).best_first(limits.nodes)

    def observe(self, step: VerifiedStep) -> None:
        tree, self._tree = self._tree, None
        if tree is not None:
            if not tree.p_reached:
                self._learn(tree, step.tokens)
            step = view(step, tree)
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

    def _estimate(self, tree: DraftTree) -> list[float]:
        """The probability that each node but the root is accepted."""
        p_reached: list[float] = []
        for parent, (rank, depth) in zip(tree.parents[1:], self._cells, strict=True):
            above = p_reached[parent - 1] if parent else 1.0
            p_reached.append(above * self._p_accept[rank][depth])
        return p_reached

    def _learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed, up to the first that the tree does not have."""
        node: int | None = 0
        for token in tokens:
            above, node = node, None
            for child in range(1, len(tree)):
                if tree.parents[child] == above and node is None:
                    rank, depth = self._cells[child - 1]
                    hit = tree.tokens[child] == token
                    p_accept = self._p_accept[rank][depth]
                    p_accept += _RATE * (hit - p_accept)
                    self._p_accept[rank][depth] = min(_MOST, max(_LEAST, p_accept))
                    node = child if hit else None
            if node is None:
                return


def _cells_of(tree: DraftTree) -> list[tuple[int, int]]:
    """Per node but the root, its rank among siblings and its depth, both counted from 0."""
    siblings: Counter[int] = Counter()
    cells: list[tuple[int, int]] = []
    for parent, depth in zip(tree.parents[1:], tree.depths[1:], strict=True):
        cells.append((min(siblings[parent], _RANKS - 1), min(depth, _DEPTHS) - 1))
        siblings[parent] += 1
    return cells
