"""Forced tokens, and users' drafters within planned ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .accept import VerifiedStep, view
from .candidates import Source, TreeNode
from .drafter import Drafter, NoDraft, checked_draft, checked_drafter
from .tree import DraftTree, merge

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


class CombinedDrafter(Drafter):
    """Merges the drafts of two drafters; common prefixes are verified once.

    Each drafter observes a step as if its own tree had been verified: with the target's choices
    after its own nodes, and with all emitted tokens. A target that verifies only chains gets the
    first drafter's chain, or the second's if the first has no draft.

    Args:
        first: the drafter that has priority when drafts are cut to a chain.
        second: the other drafter.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether both drafters expect no draft soon."""
        return self.first.pipelined and self.second.pipelined

    def begin(self, prompt: Sequence[int]) -> None:
        self._parts: tuple[DraftTree, DraftTree] | None = None
        self.first.begin(list(prompt))
        self.second.begin(list(prompt))

    def propose(self, max_depth: int) -> DraftTree:
        self._parts = self.first.propose(max_depth), self.second.propose(max_depth)
        return merge(self._parts)

    def observe(self, step: VerifiedStep) -> None:
        # A step may run without a proposal.
        none = DraftTree.chain(step.tree.tokens[0])
        first, second = self._parts or (none, none)
        self._parts = None
        self.first.observe(view(step, first))
        self.second.observe(view(step, second))

    def end(self) -> None:
        try:
            self.first.end()
        finally:
            self.second.end()


GRAMMAR = "grammar"
"""The origin of forced tokens."""

Forced = Callable[[], Sequence[int]]
"""Returns the tokens that must come next, whatever the model predicts; empty if several tokens may
come next.
"""

_P_ACCEPT = 0.99  # of a forced token; nothing is certain


class ForcedDrafter(NoDraft):
    """Drafts only the tokens that a constraint forces, which ``forced`` returns."""

    def __init__(self, forced: Forced) -> None:
        self._forced = forced

    def propose(self, max_depth: int) -> DraftTree:
        return forced_chain(self._last, self._forced()[:max_depth])


def with_forced(drafter: Drafter, grammar: Any) -> Drafter:
    """A drafter that also drafts the tokens that a grammar forces; itself without a grammar.

    Args:
        grammar: a constrained output's :class:`mlxspec.engine.grammar.Grammar`, or None.
    """
    if grammar is None:
        return drafter
    both = CombinedDrafter(ForcedDrafter(grammar.forced), drafter)
    # There is no alternative to a forced token, so merging the two never adds a branch.
    both.branching = drafter.branching
    return both


def forced_chain(last: int, forced: Sequence[int]) -> DraftTree:
    """A chain of the tokens that a constraint forces after the last token; maybe just the root."""
    p_reached = tuple(_P_ACCEPT**depth for depth in range(1, 1 + len(forced)))
    return replace(DraftTree.chain(last, forced, GRAMMAR), p_reached=p_reached)
