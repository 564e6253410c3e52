"""A radix tree: which of many token sequences has the longest prefix in common with a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Generic, TypeVar

from ..corpus.suffix_index import common_length

Value = TypeVar("Value")


class RadixTree(Generic[Value]):
    """Values filed under token sequences, several under the same one where need be.

    Sequences share the nodes of what they begin with, so a look-up compares each token once,
    however many sequences there are.
    """

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node(array("i"))

    def insert(self, tokens: array[int], value: Value) -> None:
        """File a value."""
        *_, (node, left) = self._path(tokens)
        if left:
            child = node.children.get(left[0])
            if child:  # it goes another way somewhere on its edge
                node = node.split(child, common_length(child.edge, left))
                left = left[len(node.edge) :]
            if left:
                node.children[left[0]] = node = _Node(left)
        node.values.append(value)

    def remove(self, tokens: array[int], value: Value) -> None:
        """Take out a value that :meth:`insert` has filed under these tokens."""
        path = [node for node, _ in self._path(tokens)]
        path[-1].values.remove(value)
        for parent, node in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.values or len(node.children) > 1:
                return
            first = node.edge[0]
            if node.children:
                (only,) = node.children.values()
                only.edge = node.edge + only.edge
                parent.children[first] = only
            else:
                del parent.children[first]

    def matches(self, tokens: array[int]) -> Iterator[tuple[int, Value]]:
        """All values, those that have the longest prefix in common with ``tokens`` first.

        The tree must not change meanwhile.

        Yields:
            the length of the common prefix, and the value.
        """
        path = self._path(tokens)
        node, left = path[-1]
        taken: _Node[Value] | None = None
        if left and (taken := node.children.get(left[0])):
            common = len(tokens) - len(left) + common_length(taken.edge, left)
            yield from ((common, value) for value in taken.below())
        for node, left in reversed(path):
            common = len(tokens) - len(left)
            yield from ((common, value) for value in node.values)
            for child in node.children.values():
                if child is not taken:
                    yield from ((common, value) for value in child.below())
            taken = node

    def prefixes(self, tokens: array[int]) -> list[Value]:
        """The values of all sequences that ``tokens`` begin with, or equal."""
        return [value for node, _ in self._path(tokens) for value in node.values]

    def _path(self, tokens: array[int]) -> list[tuple[_Node[Value], array[int]]]:
        """The nodes that lie wholly on the way, the root first, and which tokens follow each."""
        node = self._root
        path = [(node, tokens)]
        while tokens and (child := node.children.get(tokens[0])):
            if tokens[: len(child.edge)] != child.edge:
                break
            node, tokens = child, tokens[len(child.edge) :]
            path.append((node, tokens))
        return path


class _Node(Generic[Value]):
    """A place in the tree.

    Args:
        edge: the tokens that lead here from the node above.
    """

    def __init__(self, edge: array[int]) -> None:
        self.edge = edge
        self.values: list[Value] = []
        self.children: dict[int, _Node[Value]] = {}

    def split(self, child: _Node[Value], length: int) -> _Node[Value]:
        """Put a new node on the way to a child, so many tokens from here."""
        middle: _Node[Value] = _Node(child.edge[:length])
        self.children[middle.edge[0]] = middle
        child.edge = child.edge[length:]
        middle.children[child.edge[0]] = child
        return middle

    def below(self) -> Iterator[Value]:
        """The values here and further down."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            yield from node.values
            nodes += node.children.values()
