"""Users' drafters and a constraint's forced tokens, as parts of planned drafts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from .accept import VerifiedStep, view
from .candidates import Source, TreeNode
from .drafter import Drafter, checked_draft, checked_drafter
from .tree import DraftTree

# Where these come from: notes/planner.md, "Constants".
_DEPTHS = 8  # depths with their own probabilities; deeper nodes have the last one
_FIRST_P_ACCEPT = 0.5
_RATE = 0.1
_LEAST, _MOST = 0.01, 0.99  # nothing is certain


class DrafterSource(Source):
    """Adds probabilities to the drafts of any drafter, which drafts as if it were the only one.

    If its drafts have no probabilities, these are learned for each depth from the tokens that
    followed, whether or not the draft was verified. So if a drafter is often wrong, its drafts are
    soon left out, and it costs only the time that it takes to propose them.

    Args:
        drafter: proposes the drafts, whose origin is the name of its class. It serves one
            generation at a time.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = checked_drafter(drafter)
        self._p_accept = [_FIRST_P_ACCEPT] * (_DEPTHS + 1)

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._tree: DraftTree | None = None
        with self._asking():
            self._drafter.begin(list(prompt))
        self.spent_seconds = 0.0

    def search(self, max_depth: int) -> Sequence[TreeNode]:
        with self._asking():
            proposed = self._drafter.propose(max_depth)
            proposed = checked_draft(proposed, self._drafter, self._last)
        self._tree = tree = proposed.pruned(max_depth, sys.maxsize)
        names = (type(self._drafter).__name__,) * (len(tree) - 1)
        p_reached = tree.p_reached or tuple(self._estimate(tree))
        return [TreeNode(replace(tree, p_reached=p_reached, origins=names))]

    def observe(self, step: VerifiedStep) -> None:
        tree, self._tree = self._tree, None
        if tree is not None:
            if not tree.p_reached:
                self._learn(tree, step.tokens)
            step = view(step, tree)
        self._last = step.tokens[-1]
        self.spent_seconds = 0.0
        with self._asking():  # this time counts in the next step
            self._drafter.observe(step)

    def end(self) -> None:
        with self._asking():
            self._drafter.end()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Time a call of the drafter and record its exception."""
        started = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.fault = error
            raise
        finally:
            self.spent_seconds += time.perf_counter() - started

    def _estimate(self, tree: DraftTree) -> list[float]:
        """For each node except the root, the probability that it is accepted."""
        p_reached = [1.0]
        for parent, depth in zip(tree.parents[1:], tree.depths[1:], strict=True):
            p_reached.append(p_reached[parent] * self._p_accept[min(depth, _DEPTHS)])
        return p_reached[1:]

    def _learn(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Learn from the tokens that followed, up to the first one outside the tree."""
        for node, right in tree.judged(tokens):
            depth = min(tree.depths[node], _DEPTHS)
            p_accept = self._p_accept[depth] + _RATE * (right - self._p_accept[depth])
            self._p_accept[depth] = min(_MOST, max(_LEAST, p_accept))


GRAMMAR = "grammar"
"""The origin of forced tokens."""

_P_ACCEPT = 0.99  # of a forced token; nothing is certain


def forced_chain(last: int, forced: Sequence[int]) -> DraftTree:
    """A chain of the tokens that a constraint forces after the last token; maybe just the root."""
    p_reached = tuple(_P_ACCEPT**depth for depth in range(1, 1 + len(forced)))
    return replace(DraftTree.chain(last, forced, GRAMMAR), p_reached=p_reached)
