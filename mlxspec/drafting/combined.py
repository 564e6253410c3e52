"""Merges several drafts into one tree, and applies a constraint to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from .drafter import Drafter, DraftTree, Limits, TreeBuilder, VerifiedStep

GRAMMAR = "grammar"
"""The origin of forced tokens."""

_P_ACCEPT = 0.99  # of a forced token; nothing is certain


class CombinedDrafter(Drafter):
    """Merges the drafts of two drafters; common prefixes are verified once.

    Each drafter observes a step as if its own tree had been verified, with the target's choices
    after its own nodes, and all emitted tokens. A target that verifies only chains gets the first
    drafter's chain, or the second's if the first has no draft.

    Args:
        first: has priority when drafts are cut to a chain.
        second: the other drafter. If it is a fallback, it drafts only when the first does not.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether neither drafter expects a draft soon."""
        return self.first.pipelined and self.second.pipelined

    def attach(self, target: Any, perturb: Callable[..., Any]) -> None:
        self.first.attach(target, perturb)
        self.second.attach(target, perturb)

    def begin(self, prompt: Sequence[int]) -> None:
        self.first.begin(list(prompt))
        self.second.begin(list(prompt))

    def propose(self, max_depth: int) -> DraftTree:
        first = self.first.propose(max_depth)
        needless = self.second.is_fallback and len(first) > 1
        second = self.second.propose(0 if needless else max_depth)
        self._parts = first, second
        self._merged = merge([replace(t, origins=t.node_origins[1:]) for t in self._parts])
        return self._merged

    def observe(self, step: VerifiedStep) -> None:
        first, second = self._parts
        self.first.observe(view(step, first))
        self.second.observe(view(step, second))

    def end(self) -> None:
        try:
            self.first.end()
        finally:
            self.second.end()

    def window_rows(self) -> dict[tuple[int, int], int]:
        rows: dict[tuple[int, int], int] = {}
        for drafter, tree in zip((self.first, self.second), self._parts, strict=True):
            nodes = tree.nodes_in(self._merged)
            for row, own in drafter.window_rows().items():
                if (node := nodes[own]) is not None:
                    rows[row] = node
        return rows


def view(step: VerifiedStep, tree: DraftTree) -> VerifiedStep:
    """A step as if only one tree's nodes had been verified.

    Args:
        step: the verified step.
        tree: a draft for the same token; nodes that the step did not verify are omitted.

    Returns:
        the step with only the choices and accepted nodes of ``tree``, but with all emitted tokens.
    """
    verified = tree.nodes_in(step.tree)
    rows = [same for same in verified if same is not None]
    own = {same: node for node, same in reversed(list(enumerate(rows)))}
    return replace(
        step,
        tree=tree.kept([same is not None for same in verified]),
        choices=tuple(step.choices[row] for row in rows),
        argmaxes=tuple(step.argmaxes[row] for row in rows),
        accepted=tuple(own[node] for node in step.accepted if node in own),
    )


def united(trees: Sequence[DraftTree], limits: Limits) -> DraftTree:
    """The likeliest nodes of several drafts for one token, which must have probabilities."""
    if len(trees) == 1:
        return trees[0]
    tree = merge(trees).best_first()
    return (tree if limits.branching else tree.first_chain()).first(limits.nodes)


def likelier_first(text: DraftTree, head: DraftTree) -> tuple[DraftTree, DraftTree]:
    """Two drafts for one token, so that :func:`merge` scales the one that is less sure."""
    surer = max(head.p_reached, default=0.0) > max(text.p_reached, default=0.0)
    return (head, text) if surer else (text, head)


def united_apart(first: DraftTree, second: DraftTree, limits: Limits) -> DraftTree:
    """As :func:`united`, but faster, for drafts without a token in common, the likelier first."""
    if not limits.branching:
        return first.first(limits.nodes)
    below, left = len(first) - 1, max(0.0, 1 - first.p_next)
    tree = DraftTree._of(
        [*first.tokens, *second.tokens[1:]],
        [*first.parents, *(parent and parent + below for parent in second.parents[1:])],
        [*first.p_reached, *(left * p for p in second.p_reached)],
        (),
    )
    return tree.best_first(limits.nodes)


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """Merge drafts for one token; common prefixes share their nodes.

    If several trees have a node, it gets the highest of their probabilities, or what its siblings
    leave. If only a later tree has it, its probability given its parent is scaled by the
    probability that no sibling from an earlier tree is right.

    Returns:
        a tree that begins with the first tree's nodes. It has origins and probabilities if all
        trees have them.
    """
    merged = TreeBuilder(trees[0].tokens[0])
    p_reached, below = [1.0], [0.0]  # per node, and the sum over its children
    for tree in trees:
        own = (1.0, *(tree.p_reached or (0.0,) * (len(tree) - 1)))
        # Per node, the share of its probability that the earlier trees' children leave.
        left = [
            max(0.0, 1 - p_children / p_node) if p_node else 0.0
            for p_node, p_children in zip(p_reached, below, strict=True)
        ]
        nodes = [0]
        for node in range(1, len(tree)):
            token, parent = tree.tokens[node], tree.parents[node]
            above = nodes[parent]
            p_node = p_reached[above] * own[node] / own[parent] if own[parent] else 0.0
            room = max(0.0, p_reached[above] - below[above])
            place = merged.find(above, token)
            if place is None:
                gained = min(p_node * left[above], room)
                origin = tree.origins[node - 1] if tree.origins else None
                place = merged.child(above, token, origin=origin)
                p_reached.append(gained)
                below.append(0.0)
                left.append(1.0)
            else:
                gained = max(0.0, min(p_node - p_reached[place], room))
                p_reached[place] = min(p_reached[place] + gained, p_reached[above])
            below[above] += gained
            nodes.append(place)
    if all(tree.p_reached or len(tree) == 1 for tree in trees):
        merged.p_reached = p_reached[1:]
    return merged.tree()


class Guide(Protocol):
    """Knows how a constrained output may continue after the accepted tokens."""

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, whatever the model predicts; empty if it has a choice."""

    def allowed(self, tree: DraftTree) -> DraftTree:
        """The nodes of a draft that the constraint allows."""


class ForcedDrafter(Drafter):
    """Drafts the tokens that a constraint forces."""

    branching = False
    pipelined = True

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last, self._guide.forced()[:max_depth], GRAMMAR)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


def with_forced(drafter: Drafter, guide: Guide) -> Drafter:
    """A drafter for a constrained output that also drafts the forced tokens."""
    both = CombinedDrafter(ForcedDrafter(guide), drafter)
    # No alternative to a forced token is allowed, so the two never make a branch together.
    both.branching = drafter.branching
    return both


def guided(tree: DraftTree, guide: Guide, limits: Limits) -> DraftTree:
    """The best allowed nodes of a draft, and the forced tokens.

    Args:
        tree: a draft with probabilities and origins.
        guide: the output's.
        limits: the result's.
    """
    allowed, forced = guide.allowed(tree), guide.forced()[: limits.max_depth]
    if not forced:
        return allowed
    tokens, parents = (tree.tokens[0], *forced), range(-1, len(forced))
    p_reached = tuple(_P_ACCEPT**depth for depth in range(1, len(tokens)))
    chain = DraftTree(tokens, tuple(parents), p_reached, (GRAMMAR,) * len(forced))
    return united([chain, allowed], limits)
