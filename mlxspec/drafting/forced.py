"""What a constraint says of a draft: which of it may come, and which tokens must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .combined import CombinedDrafter
from .drafter import Drafter, DraftTree, TreeBuilder, VerifiedStep

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
