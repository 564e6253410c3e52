"""Draft trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below the last emitted token; a chain is a tree without branches.

    Node 0 is the root: the last emitted token, which is not drafted. Every other node is a token
    that is proposed to follow its parent. Parents come before their children, so a loop over the
    nodes visits a node's ancestors before the node.

    Trees with equal tokens and parents are equal.

    Args:
        tokens: a token id for each node, the root's first; any sequence of integers.
        parents: the index of each node's parent; -1 for the root.
        p_reached: for each node except the root, the probability that it is accepted, at most its
            parent's; empty if unknown.
        origins: for each node except the root, a word for where it comes from; by default "draft".

    Raises:
        TypeError: a token or a parent is not an integer.
        ValueError: tokens and parents differ in number, a parent does not come before its child,
            or probabilities or origins do not fit the nodes.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    p_reached: tuple[float, ...] = field(default=(), compare=False, repr=False)
    origins: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        # Lists and NumPy's numbers are converted for comparisons and for MLX.
        object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))
        object.__setattr__(self, "parents", tuple(map(index, self.parents)))
        object.__setattr__(self, "p_reached", tuple(map(float, self.p_reached)))
        drafted = len(self.tokens) - 1
        object.__setattr__(self, "origins", tuple(self.origins) or ("draft",) * drafted)
        if self.parents[:1] != (-1,) or len(self.parents) != len(self.tokens):
            raise ValueError("a draft tree needs one parent per token, and -1 for its root, node 0")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("in a draft tree, parents come before their children")
        if len(self.origins) != drafted or len(self.p_reached) not in (0, drafted):
            raise ValueError("a draft tree needs one probability and one origin per drafted token")
        p_parent = (1.0, *self.p_reached)
        for probability, parent in zip(self.p_reached, self.parents[1:], strict=False):
            if not 0 <= probability <= p_parent[parent]:
                raise ValueError("in a draft tree, a node's probability is 0 to its parent's")

    @classmethod
    def chain(cls, root: int, draft: Iterable[int] = (), origin: str = "draft") -> DraftTree:
        """A tree with ``draft`` as its only branch; just the root if ``draft`` is empty."""
        tokens = (root, *draft)
        parents, origins = tuple(range(-1, len(tokens) - 1)), (origin,) * (len(tokens) - 1)
        return cls(tokens, parents, origins=origins)

    @classmethod
    def from_branches(cls, root: int, branches: Iterable[Sequence[int]]) -> DraftTree:
        """A tree of alternative continuations of the root; common prefixes share nodes."""
        builder = TreeBuilder(root)
        for branch in branches:
            builder.add_branch(branch)
        return cls(tuple(builder.tokens), tuple(builder.parents))  # checks the tokens

    @classmethod
    def of(cls, *parts: Sequence[Any]) -> DraftTree:
        """A tree of valid tokens, parents, probabilities and origins, without the checks, which
        take longer than all else.
        """
        tree = object.__new__(cls)
        names = ("tokens", "parents", "p_reached", "origins")
        vars(tree).update(zip(names, map(tuple, parts), strict=True))
        return tree

    def __len__(self) -> int:
        """The number of nodes, including the root: the rows of a forward over this tree."""
        return len(self.tokens)

    @property
    def node_origins(self) -> tuple[str, ...]:
        """The origin of each node; "root" for the root."""
        return "root", *self.origins

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root, by which its position exceeds the root's."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    def ancestors(self) -> np.ndarray:
        """Which nodes each node attends to: its ancestors and itself.

        Returns:
            bool, (nodes, nodes): a row for each attending node.
        """
        closure = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            closure[node] |= closure[parent]
        return closure

    def child(self, node: int, token: int) -> int | None:
        """The first child of ``node`` with this token, or None."""
        for other in range(node + 1, len(self)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def first_chain(self) -> DraftTree:
        """The chain of first children, for a target that verifies only chains."""
        if self.is_chain:
            return self
        nodes = [0]
        for node in range(1, len(self)):
            if self.parents[node] == nodes[-1]:
                nodes.append(node)
        return self._renumbered(nodes)

    def judged(self, tokens: Iterable[int]) -> Iterator[tuple[int, bool]]:
        """Compare the tree with the tokens that followed.

        Yields:
            a node and whether it was right: for each of the root's children, then for each child of
            the right one, and so on.
        """
        above: int | None = 0
        for token in tokens:
            if above is None:
                return
            for node in range(1, len(self)):
                if self.parents[node] == above:
                    yield node, self.tokens[node] == token
            above = self.child(above, token)

    def nodes_in(self, other: DraftTree) -> list[int | None]:
        """For each node, the node with the same path in another tree, or None.

        If the other tree has equal siblings, the first one counts.
        """
        keys = zip(other.parents, other.tokens, strict=True)
        places = {key: node for node, key in reversed([*enumerate(keys)])}
        nodes: list[int | None] = [0]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            above = nodes[parent]
            nodes.append(None if above is None else places.get((above, token)))
        return nodes

    def pruned(self, max_depth: int, vocab_size: int) -> DraftTree:
        """Drop nodes deeper than ``max_depth`` or outside the vocabulary, with their subtrees."""
        nodes = zip(self.tokens, self.depths, strict=True)
        return self.filtered([d <= max_depth and 0 <= token < vocab_size for token, d in nodes])

    def filtered(self, keeps: Sequence[bool]) -> DraftTree:
        """Drop nodes whose entry in ``keeps`` is False, with their subtrees; the root must stay."""
        if all(keeps):
            return self
        nodes = {0: None}  # in order
        for node in range(1, len(self)):
            if keeps[node] and self.parents[node] in nodes:
                nodes[node] = None
        return self._renumbered([*nodes])

    def _renumbered(self, nodes: Sequence[int]) -> DraftTree:
        """A tree of these nodes in this order: the root first, and parents before children."""
        number = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        return self.of(
            [self.tokens[node] for node in nodes],
            [number[self.parents[node]] for node in nodes],
            [self.p_reached[node - 1] for node in nodes[1:]] if self.p_reached else (),
            [self.origins[node - 1] for node in nodes[1:]],
        )


class TreeBuilder:
    """Builds a draft tree node by node.

    Args:
        root: the last emitted token, node 0.

    Attributes:
        tokens, parents, origins: as in :class:`DraftTree`, of the nodes so far.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.origins: list[str] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """The number of nodes, including the root."""
        return len(self.tokens)

    def child(self, parent: int, token: int, origin: str = "draft") -> int:
        """The child with this token, which is added if it is missing."""
        node = self._children.get((parent, token))
        if node is None:
            node = self._children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.origins.append(origin)
        return node

    def add_branch(self, tokens: Iterable[int], origin: str = "draft") -> None:
        """Add a continuation of the root; common prefixes share nodes."""
        node = 0
        for token in tokens:
            node = self.child(node, token, origin)

    def tree(self) -> DraftTree:
        """The tree so far."""
        return DraftTree.of(self.tokens, self.parents, (), self.origins)
