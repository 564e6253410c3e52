"""Two drafters in one tree: the first one's draft, and beside it the second one's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from .drafter import Drafter, DraftTree, TreeBuilder, VerifiedStep, origins_of, window_rows_of


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
        merged = _Merger(first.tokens[0], self.max_rows)
        merged.add(first)
        fill = getattr(self.second, "propose_beside", None)
        if fill:
            second = fill(len(merged), max_depth, self.max_rows)
        else:
            second = self.second.propose(max_depth)
        merged.add(second)
        self._parts = first, second
        self._merged = merged
        return merged.tree()

    def observe(self, step: VerifiedStep) -> None:
        first, second = self._parts
        self.first.observe(view(step, first))
        self.second.observe(view(step, second))

    def end(self) -> None:
        try:
            self.first.end()
        finally:
            self.second.end()

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last, its origin, by the first drafter that has one."""
        origins = ["root"] + [""] * (len(self._merged) - 1)
        for drafter, tree, nodes in zip(
            (self.first, self.second), self._parts, self._merged.nodes, strict=True
        ):
            own = origins_of(drafter, tree)
            for node, origin in zip(nodes, own, strict=True):
                if node is not None:
                    origins[node] = origins[node] or origin
        return tuple(origins)

    def window_rows(self) -> dict[tuple[int, int], int]:
        rows: dict[tuple[int, int], int] = {}
        for drafter, nodes in zip((self.first, self.second), self._merged.nodes, strict=True):
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
    children: dict[tuple[int, int], int] = {}
    for node in range(len(step.tree) - 1, 0, -1):  # so that the first of equal siblings remains
        children[step.tree.parents[node], step.tree.tokens[node]] = node
    verified: list[int | None] = [0]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        above = verified[parent]
        verified.append(None if above is None else children.get((above, token)))
    kept = [node for node, same in enumerate(verified) if same is not None]
    rows = [same for same in verified if same is not None]
    if len(kept) < len(tree):
        renumbered = {node: index for index, node in enumerate(kept)} | {-1: -1}
        tree = DraftTree(
            tuple(tree.tokens[node] for node in kept),
            tuple(renumbered[tree.parents[node]] for node in kept),
        )
    own = {same: node for node, same in reversed(list(enumerate(rows)))}
    accepted = [own[node] for node in step.accepted if node in own]
    return replace(
        step,
        tree=tree,
        choices=tuple(step.choices[row] for row in rows),
        argmaxes=tuple(step.argmaxes[row] for row in rows),
        accepted=tuple(accepted),
    )


class _Merger(TreeBuilder):
    """Grows a tree from several, up to a number of rows.

    ``nodes`` has, per tree that was added, its nodes' numbers here, None for what was cut.
    """

    def __init__(self, root: int, max_rows: int) -> None:
        super().__init__(root)
        self.nodes: list[list[int | None]] = []
        self._max_rows = max_rows

    def add(self, tree: DraftTree) -> None:
        nodes: list[int | None] = [0]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            above = nodes[parent]
            room = above is not None and (len(self) < self._max_rows or self.has(above, token))
            nodes.append(self.child(above, token) if above is not None and room else None)
        self.nodes.append(nodes)
