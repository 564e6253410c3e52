"""Several drafts in one tree."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from .drafter import (
    Drafter,
    DraftTree,
    Limits,
    TreeBuilder,
    VerifiedStep,
    origins_of,
    window_rows_of,
)


class CombinedDrafter(Drafter):
    """Drafts what either of two drafters proposes; common prefixes are verified once.

    Each drafter observes a step as if its own tree had been verified: with the target's choices
    after its own nodes, and all emitted tokens, whoever proposed them. A target that verifies
    no branches gets the first drafter's chain, or the second's where the first has none.

    Args:
        first: comes first where rows are limited, and where drafts are cut to a chain.
        second: gets the rows that the first leaves.
        max_rows: of a step, the current token's included; None sets no limit. A second drafter
            with a method ``propose_beside(rows, max_depth, max_rows)`` fits its draft to the rows
            that are left; the draft of any other is cut.
    """

    def __init__(self, first: Drafter, second: Drafter, max_rows: int | None = None) -> None:
        self.first = first
        self.second = second
        self.max_rows = sys.maxsize if max_rows is None else max_rows

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether neither drafter expects a draft soon."""
        return self.first.pipelined and self.second.pipelined

    def begin(self, prompt: Sequence[int]) -> None:
        self.first.begin(list(prompt))
        self.second.begin(list(prompt))

    def propose(self, max_depth: int) -> DraftTree:
        first = self.first.propose(max_depth)
        fill = getattr(self.second, "propose_beside", None)
        if fill:
            rows = len(merge([first], self.max_rows)[0])
            second = fill(rows, max_depth, self.max_rows)
        else:
            second = self.second.propose(max_depth)
        self._parts = first, second
        named = [
            replace(tree, origins=origins_of(drafter, tree)[1:])
            for drafter, tree in zip((self.first, self.second), self._parts, strict=True)
        ]
        merged, self._nodes = merge(named, self.max_rows)
        # Checked, and without probabilities: drafters that share rows may be anybody's.
        return DraftTree(tuple(merged.tokens), tuple(merged.parents), origins=tuple(merged.origins))

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
        for drafter, nodes in zip((self.first, self.second), self._nodes, strict=True):
            for row, own in window_rows_of(drafter).items():
                node = nodes[own]
                if node is not None:
                    rows[row] = node
        return rows


def view(step: VerifiedStep, tree: DraftTree) -> VerifiedStep:
    """A step as if only the nodes of one tree had been verified.

    Args:
        step: what was verified.
        tree: a draft for the same token; nodes that the step did not verify are left out.

    Returns:
        the step with the target's choices after the nodes of ``tree`` and with its accepted
        nodes. The emitted tokens are all, whichever draft they came from.
    """
    verified = tree.nodes_in(step.tree)
    rows = [same for same in verified if same is not None]
    tree = tree.kept([same is not None for same in verified])
    own = {same: node for node, same in reversed(list(enumerate(rows)))}
    accepted = [own[node] for node in step.accepted if node in own]
    return replace(
        step,
        tree=tree,
        choices=tuple(step.choices[row] for row in rows),
        argmaxes=tuple(step.argmaxes[row] for row in rows),
        accepted=tuple(accepted),
    )


def united(trees: Sequence[DraftTree], limits: Limits) -> DraftTree:
    """The likeliest nodes of several drafts for one token, whose probabilities are known.

    Args:
        trees: as for :func:`merge`.
        limits: of the draft.
    """
    if len(trees) == 1:
        return trees[0]
    tree = merge(trees)[0].tree().best_first()
    return (tree if limits.branching else tree.first_chain()).first(limits.nodes)


def merge(
    trees: Sequence[DraftTree], max_rows: int = sys.maxsize
) -> tuple[TreeBuilder, list[list[int | None]]]:
    """Merge drafts for one token; common prefixes share their nodes.

    A node that several trees propose keeps its highest probability, as far as its siblings leave
    room for that. The probability of a node that only a later tree proposes, given its parent, is
    scaled by the probability that none of the earlier trees' siblings is right.

    Args:
        trees: what comes first has the first rows.
        max_rows: the size of the merged tree at most, the root included.

    Returns:
        the merged tree, with origins where all have them and probabilities where all have them;
        and per tree, its nodes' numbers there, None for what was cut.
    """
    merged, p_reached = TreeBuilder(trees[0].tokens[0]), list[float]()
    below = [0.0]  # per node, the probability that a child of it is accepted
    numbers: list[list[int | None]] = []
    for tree in trees:
        own = tree.p_reached or (0.0,) * (len(tree) - 1)
        origins = tree.origins or (None,) * (len(tree) - 1)
        # Per node, the share of its probability that the earlier trees' children leave.
        left = [
            max(0.0, 1 - p_children / p_node) if p_node else 0.0
            for p_node, p_children in zip([1.0, *p_reached], below, strict=True)
        ]
        nodes: list[int | None] = [0]
        numbers.append(nodes)
        drafted = zip(tree.tokens[1:], tree.parents[1:], own, origins, strict=True)
        for token, parent, p_own, origin in drafted:
            above = nodes[parent]
            node = None if above is None else merged.find(above, token)
            if above is None or (node is None and len(merged) >= max_rows):
                nodes.append(None)
                continue
            p_above = p_reached[above - 1] if above else 1.0
            p_parent = own[parent - 1] if parent else 1.0
            p_node = p_above * p_own / p_parent if p_parent else 0.0
            room = max(0.0, p_above - below[above])
            if node is None:
                gained = min(p_node * left[above], room)
                node = merged.child(above, token, origin=origin)
                p_reached.append(gained)
                below.append(0.0)
                left.append(1.0)
            else:
                gained = max(0.0, min(p_node - p_reached[node - 1], room))
                p_reached[node - 1] = min(p_reached[node - 1] + gained, p_above)
            below[above] += gained
            nodes.append(node)
    if all(tree.p_reached or len(tree) == 1 for tree in trees):
        merged.p_reached = p_reached
    return merged, numbers


GRAMMAR = "grammar"
"""Where forced tokens say that they come from."""

_P_ACCEPT = 0.99  # of a forced token; nothing is certain


class Guide(Protocol):
    """Knows how a constrained output may go on after the tokens that have been accepted."""

    def forced(self) -> Sequence[int]:
        """The tokens that come next whatever the model says; empty where it has a choice."""

    def guide(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[Sequence[bool], Mapping[int, Sequence[int]]]:
        """Look at a draft; the arguments are as in :class:`DraftTree`.

        Returns:
            per node whether it may come; and what is forced, where anything is, after the root
            and after each node that no other of the draft may follow.
        """


class ForcedDrafter(Drafter):
    """Drafts the tokens that a constraint forces.

    Args:
        guide: of the generation's output.
    """

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
    """A drafter that drafts what is forced, too.

    Args:
        drafter: of a constrained output.
        guide: of the output.
    """
    both = CombinedDrafter(ForcedDrafter(guide), drafter)
    # Where something is forced, nothing else may come: the two never make a branch together.
    both.branching = drafter.branching
    return both


def guided(tree: DraftTree, guide: Guide, max_nodes: int, max_depth: int) -> DraftTree:
    """The best nodes of a draft that may come, and the tokens that must follow them.

    Args:
        tree: a draft with probabilities and origins.
        guide: of the output.
        max_nodes: how many nodes to return at most, the root not counted.
        max_depth: how deep they may be.
    """
    allowed, forced = guide.guide(tree.tokens, tree.parents)
    found = TreeBuilder(tree.tokens[0])
    depths = [0]

    def add(above: int, token: int, p_accept: float, origin: str) -> int:
        p_above = found.p_reached[above - 1] if above else 1.0
        node = found.child(above, token, p_above * p_accept, origin)
        if node == len(depths):
            depths.append(depths[above] + 1)
        return node

    def add_forced(node: int) -> None:
        above = number[node]
        for token in forced.get(node, ())[: max_depth - depths[above]]:
            above = add(above, token, _P_ACCEPT, GRAMMAR)

    number = {0: 0}
    add_forced(0)  # first, since it is likelier than the draft says
    for node in range(1, len(tree)):
        if allowed[node]:
            parent = tree.parents[node]
            p_above = tree.p_reached[parent - 1] if parent else 1.0
            p_accept = tree.p_reached[node - 1] / p_above if p_above else 0.0
            number[node] = add(number[parent], tree.tokens[node], p_accept, tree.origins[node - 1])
            add_forced(node)
    return found.tree().best_first(max_nodes)
