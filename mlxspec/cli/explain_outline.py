"""A draft tree as lines of text that grow downwards, so that it fits a narrow terminal.

A line holds a run of nodes, up to where the tree branches. Below it stand the smaller branches,
indented, and then the largest, which goes on at the depth of indentation of the line itself.
So the trunk of lookahead decoding's window runs straight down, and a tree of n nodes is
indented log2(n) times at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..draft.drafter import DraftTree, VerifiedStep
from .explain_walk import Fate, bonus, fates

BONUS = -1
"""Stands for the bonus token where nodes are listed."""


@dataclass(frozen=True)
class Line:
    """One line of the outline.

    Attributes:
        guides: the line drawing before the line's marker.
        guides_below: that before a continuation of the line, where it has to be broken.
        fate: what became of the first node.
        nodes: successive nodes; ``(BONUS,)`` for the bonus token.
        branch: the only side branch at the last of the nodes, if it has no branches itself.
    """

    guides: str
    guides_below: str
    fate: Fate
    nodes: tuple[int, ...]
    branch: tuple[int, ...] = ()


def outline(step: VerifiedStep) -> list[Line]:
    """The step's tree from the root downwards; the bonus token hangs where the walk ended."""
    return list(_Outline(step).lines(0, "", ""))


class TreeShape:
    """How the nodes of a verified tree hang together.

    Attributes:
        children: per node its children; ``BONUS`` is one of the node where the walk ended.
        sizes: per node, how many nodes its subtree has.
        leaves: per node, how many nodes of its subtree are leaves.
    """

    def __init__(self, step: VerifiedStep) -> None:
        self._accepted = set(step.accepted)
        self.children = _children(step.tree)
        self.sizes, self.leaves = _sizes_and_leaves(step.tree)
        if bonus(step) is not None:
            self.children[(0, *step.accepted)[-1]].append(BONUS)

    def is_accepted(self, node: int) -> bool:
        """Whether the walk came to a node."""
        return node in self._accepted


class _Outline:
    def __init__(self, step: VerifiedStep) -> None:
        self._fates = fates(step)
        self._shape = TreeShape(step)

    def lines(self, node: int, guides: str, below: str) -> Iterator[Line]:
        """The subtree at a node, whose marker stands behind ``guides``."""
        if node == BONUS:
            yield Line(guides, below + "  ", Fate.BONUS, (BONUS,))
            return
        trunk: int | None = node
        while trunk is not None:
            run = self._run(trunk)
            main, sides = self._branches(run[-1])
            # The root's line has the token that is no draft, and nothing else.
            inline = trunk != 0 and main is not None and self._fits_inline(sides)
            branch = self._run(sides.pop()) if inline else ()
            ends = main is None and not sides
            yield Line(guides, below + ("  " if ends else "│ "), self._fates[trunk], run, branch)
            for side in sides:
                last = side == sides[-1] and main is None
                yield from self.lines(
                    side, below + ("└─" if last else "├─"), below + ("  " if last else "│ ")
                )
            trunk, guides = main, below

    def _run(self, node: int) -> tuple[int, ...]:
        """The nodes from ``node`` on that have one child each, up to where acceptance ends."""
        shape, run = self._shape, [node]
        while node != 0 and len(shape.children[run[-1]]) == 1:
            child = shape.children[run[-1]][0]
            if child == BONUS or shape.is_accepted(child) != shape.is_accepted(node):
                break
            run.append(child)
        return tuple(run)

    def _branches(self, node: int) -> tuple[int | None, list[int]]:
        """The largest branch below a node, if it branches itself; and the others."""
        shape = self._shape
        children = shape.children[node]
        branching = [child for child in children if child != BONUS and shape.leaves[child] > 1]
        main = max(branching, key=lambda child: shape.sizes[child], default=None)
        return main, sorted((child for child in children if child != main), key=self._rank)

    def _rank(self, child: int) -> int:
        """Accepted branches come first, then the bonus token."""
        if child == BONUS:
            return 1
        return 0 if self._shape.is_accepted(child) else 2

    def _fits_inline(self, sides: list[int]) -> bool:
        """Whether there is one side branch, which fits on the line that it leaves."""
        if len(sides) != 1 or sides[0] == BONUS:
            return False
        side = sides[0]
        return self._shape.leaves[side] == 1 and not self._shape.is_accepted(side)


def _children(tree: DraftTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents[1:], start=1):
        children[parent].append(node)
    return children


def _sizes_and_leaves(tree: DraftTree) -> tuple[list[int], list[int]]:
    """Per node, how many nodes its subtree has, and how many of them are leaves."""
    sizes, leaves = [1] * len(tree), [0] * len(tree)
    for node in range(len(tree) - 1, -1, -1):
        leaves[node] = leaves[node] or 1
        if node:
            sizes[tree.parents[node]] += sizes[node]
            leaves[tree.parents[node]] += leaves[node]
    return sizes, leaves
