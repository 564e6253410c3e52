"""Growing a draft tree node by node, so that siblings with equal tokens are one."""

from __future__ import annotations

from .tree import DraftTree


class TreeBuilder:
    """A draft tree in the making.

    Args:
        root: the last emitted token, node 0.
    """

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._children: dict[tuple[int, int], int] = {}

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
