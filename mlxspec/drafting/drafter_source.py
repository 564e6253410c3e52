"""Adapts any drafter to be a source of the planner."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from .combined import view
from .custom import checked_draft, checked_drafter
from .drafter import Drafter, DraftTree, Limits, VerifiedStep

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
        # By rank among siblings and depth.
        self._p_accept: defaultdict[tuple[int, int], float] = defaultdict(lambda: _FIRST_P_ACCEPT)

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._tree: DraftTree | None = None
        with self._asking():
            self._drafter.begin(list(prompt))
        self.spent = 0.0

    def propose(self, limits: Limits) -> DraftTree:  # type: ignore[override]  # a planner's
        with self._asking():
            proposed = checked_draft(self._drafter.propose(limits), self._drafter, self._last)
        tree = proposed.pruned(limits, sys.maxsize)
        self._tree = tree = tree if limits.branching else tree.first_chain()
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
        self.spent = 0.0
        with self._asking():  # which counts for the next step
            self._drafter.observe(step)

    def end(self) -> None:
        with self._asking():
            self._drafter.end()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Time the drafter, and record what it raises, which is not a fault of planning."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.fault = error
            raise
        finally:
            self.spent += time.perf_counter() - started

    def _estimate(self, tree: DraftTree) -> list[float]:
        """The probability that each node but the root is accepted."""
        p_reached, siblings = [1.0], Counter[int]()
        self._cells = [(0, 0)]
        for parent, depth in zip(tree.parents[1:], tree.depths[1:], strict=True):
            cell = min(siblings[parent], _RANKS - 1), min(depth, _DEPTHS)
            siblings[parent] += 1
            self._cells.append(cell)
            p_reached.append(p_reached[parent] * self._p_accept[cell])
        return p_reached[1:]

    def _learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed, up to the first that the tree does not have."""
        for node, right in tree.judged(tokens):
            cell = self._cells[node]
            p_accept = self._p_accept[cell] + _RATE * (right - self._p_accept[cell])
            self._p_accept[cell] = min(_MOST, max(_LEAST, p_accept))
