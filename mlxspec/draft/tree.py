"""The draft tree: everything that one step verifies, and which of it is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below the last emitted token; a chain is a tree without branches.

    Node 0 is the root, the last emitted token, which is no draft itself. Every other node is
    a token proposed to follow its parent. Parents stand before their children, so a walk in
    node order always knows a node's ancestors.

    Args:
        tokens: one token id per node, the root's first; any sequence of integers.
        parents: the index of each node's parent; -1 for the root.

    Raises:
        TypeError: something is no integer.
        ValueError: the two differ in length, or a parent does not stand before its child.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        # Lists and NumPy's integers become what the comparisons here and MLX understand.
        object.__setattr__(self, "tokens", tuple(map(index, self.tokens)))
        object.__setattr__(self, "parents", tuple(map(index, self.parents)))
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError("a draft tree needs one parent per token and at least the root")
        if self.parents[0] != -1:
            raise ValueError("node 0 of a draft tree is its root, whose parent is -1")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("in a draft tree parents stand before their children")

    @classmethod
    def chain(cls, root: int, draft: Iterable[int] = ()) -> DraftTree:
        """The tree whose only branch is ``draft``; without one, the root alone."""
        tokens = (root, *draft)
        return cls(tokens, tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def from_branches(cls, root: int, branches: Iterable[Sequence[int]]) -> DraftTree:
        """Merge alternative continuations; branches with a common prefix share its nodes."""
        tokens, parents = [root], [-1]
        child: dict[tuple[int, int], int] = {}
        for branch in branches:
            node = 0
            for token in branch:
                if (node, token) not in child:
                    child[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child[node, token]
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        """The number of rows that a forward over this tree has, the root's included."""
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root, which is its position after the cache's end."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    def ancestors(self) -> np.ndarray:
        """Which nodes each node attends to: its ancestors and itself.

        Returns:
            bool array of shape (nodes, nodes); row = the node that attends.
        """
        closure = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            closure[node] |= closure[parent]
        return closure

    def child(self, node: int, token: int) -> int | None:
        """The first child of ``node`` that proposes ``token``, or None."""
        for other in range(node + 1, len(self)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def first_chain(self) -> DraftTree:
        """The branch of first children: what is left of a tree for a target without trees."""
        if self.is_chain:
            return self
        draft, node = [], 0
        for other in range(1, len(self)):
            if self.parents[other] == node:
                draft.append(self.tokens[other])
                node = other
        return DraftTree.chain(self.tokens[0], draft)

    def pruned(self, max_depth: int, vocab_size: int) -> DraftTree:
        """Drop nodes deeper than ``max_depth`` or outside the vocabulary, with their subtrees."""
        if max(self.depths) <= max_depth and all(0 <= t < vocab_size for t in self.tokens):
            return self
        renumbered = {-1: -1}
        tokens: list[int] = []
        parents: list[int] = []
        for node, (token, parent, depth) in enumerate(
            zip(self.tokens, self.parents, self.depths, strict=True)
        ):
            if parent in renumbered and depth <= max_depth and 0 <= token < vocab_size:
                renumbered[node] = len(tokens)
                tokens.append(token)
                parents.append(renumbered[parent])
        return DraftTree(tuple(tokens), tuple(parents))


class TreeBuilder:
    """A draft tree in the making.

    Args:
        root: the last emitted token, node 0.
    """

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, tree: DraftTree) -> TreeBuilder:
        """One that goes on from a tree."""
        builder = cls(tree.tokens[0])
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            builder.child(parent, token)
        return builder

    def __len__(self) -> int:
        """The number of nodes, the root included."""
        return len(self._tokens)

    def has(self, parent: int, token: int) -> bool:
        """Whether a node has a child with this token."""
        return (parent, token) in self._children

    def child(self, parent: int, token: int) -> int:
        """The child of a node with this token, a new one if there is none."""
        key = parent, token
        node = self._children.get(key)
        if node is None:
            node = self._children[key] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
        return node

    def tree(self) -> DraftTree:
        """What has been grown so far."""
        return DraftTree(tuple(self._tokens), tuple(self._parents))


def accept(tree: DraftTree, choices: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk the tree along the target's own choices.

    From the root, descend while a child proposes what the target chose after its parent; the
    first choice without such a child is the bonus token, which costs nothing since the target
    has already computed it. The same rule serves every temperature: a choice is an argmax or
    a sample keyed by its position, and with point-mass drafts no lossless rule accepts more
    than this one (Leviathan et al. 2023, arXiv 2211.17192, in the case q = 1).

    Args:
        tree: what was verified.
        choices: the target's choice after each node.

    Returns:
        the accepted nodes from the root's child downwards, and the emitted tokens: the
        accepted nodes' tokens and the bonus token.
    """
    accepted: list[int] = []
    tokens: list[int] = []
    node = 0
    while True:
        tokens.append(choices[node])
        child = tree.child(node, choices[node])
        if child is None:
            return tuple(accepted), tuple(tokens)
        accepted.append(child)
        node = child
