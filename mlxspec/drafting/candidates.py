"""The nodes that a draft may consist of, grown lazily and best first, from several sources."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Protocol

from .accept import VerifiedStep
from .tree import DraftTree

# Where these come from: notes/planner.md, "Constants".
_CHILDREN = 6  # the most children of a node; further ones are never likely enough
_LEAST_P_REACHED = 0.01  # less likely nodes do not pay on any machine


class SourceNode(Protocol):
    """A node of what a source proposes; its children are found when they are requested."""

    @property
    def origin(self) -> str:
        """A word for where the node comes from."""

    def children(self, limit: int) -> Sequence[tuple[int, float, SourceNode]]:
        """The best children, at most ``limit``, the likeliest first; requested only once.

        Returns:
            for each child, its token, the probability that it is right if this node is, and the
            child.
        """


class Source:
    """Where the candidates of a planned draft come from.

    A generation calls :meth:`begin` once with the prompt, then :meth:`search`, if a draft may pay,
    and :meth:`observe` alternately, and :meth:`end`. A user's drafter becomes a source in
    :class:`.sources.DrafterSource`.

    Attributes:
        spent_seconds: the time that a user's drafter has taken in the current step.
        fault: the exception that a user's drafter has raised; it is not a fault of planning.
    """

    spent_seconds: float = 0.0
    fault: Exception | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """As for :meth:`.drafter.Drafter.begin`."""

    def search(self, max_depth: int) -> Sequence[SourceNode]:
        """The roots of what may follow the context, at most ``max_depth`` tokens deep."""
        raise NotImplementedError

    def observe(self, step: VerifiedStep) -> None:
        """As for :meth:`.drafter.Drafter.observe`."""

    def end(self) -> None:
        """As for :meth:`.drafter.Drafter.end`."""


class TreeNode:
    """A node of a draft tree that has probabilities; the root, if no node is given."""

    def __init__(self, tree: DraftTree, node: int = 0) -> None:
        self.origin = tree.node_origins[node]
        self._token, self._p = tree.tokens[node], tree.p_reached[node - 1] if node else 1.0
        self._children: list[TreeNode] = []
        if node == 0:
            nodes = [self, *(TreeNode(tree, other) for other in range(1, len(tree)))]
            for child, parent in zip(nodes[1:], tree.parents[1:], strict=True):
                nodes[parent]._children.append(child)

    def children(self, limit: int) -> list[tuple[int, float, SourceNode]]:
        likeliest = sorted(self._children, key=lambda child: -child._p)
        return [(child._token, child._p / (self._p or 1.0), child) for child in likeliest[:limit]]


_Entry = tuple[float, int, int, int, Sequence[SourceNode]]


class Candidates:
    """The nodes that may follow a token, the likeliest first, and parents before children.

    A node is added when it is requested, and only then are its children found. Sources that propose
    the same path share its nodes. The probability of a node given its parent is the highest one
    that a source states, but at most what its siblings from likelier sources leave of 1.

    Args:
        last: the current token, the root.
        roots: the root of each source's proposals. Of sources that propose a node, the first one is
            its origin.
        branching: whether a node may have several children.
        max_depth: the greatest depth of a node.
        stop_tokens: the tokens that end the output, so nothing can follow them.

    Attributes:
        p_reached: for each node added so far, the probability that it is accepted.
        p_next: the probability that one of the root's children is right.
    """

    def __init__(
        self,
        last: int,
        roots: Sequence[SourceNode],
        *,
        branching: bool,
        max_depth: int,
        stop_tokens: Collection[int] = (),
    ) -> None:
        self._tokens, self._parents, self._depths = [last], [-1], [0]
        self._origins: list[str] = []
        self.p_reached: list[float] = []
        self._limit, self._max_depth = _CHILDREN if branching else 1, max_depth
        self._stop_tokens = stop_tokens
        # An entry has a node to be added: its negative p_reached, a serial number by which the
        # older one of equal entries comes first, its parent, its token, and its sources' nodes.
        self._serial = count()
        self._heap = self._children(0, 1.0, roots)
        heapify(self._heap)
        self.p_next = -sum(entry[0] for entry in self._heap)

    def __len__(self) -> int:
        """The number of nodes that have been added."""
        return len(self.p_reached)

    def p_of(self, node: int) -> float:
        """The ``p_reached`` of the next node or an earlier one; 0 if there is none."""
        if node < len(self.p_reached):
            return self.p_reached[node]
        return -self._heap[0][0] if self._heap else 0.0

    def add(self) -> None:
        """Add the next node."""
        negative_p, _, parent, token, sources = self._heap[0]
        self.p_reached.append(-negative_p)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._origins.append(sources[0].origin)
        self._tokens.append(token)
        children = self._children(len(self.p_reached), -negative_p, sources)
        if not children:
            heappop(self._heap)
            return
        heapreplace(self._heap, children[0])
        for entry in children[1:]:
            heappush(self._heap, entry)

    def _children(self, node: int, p_node: float, sources: Sequence[SourceNode]) -> list[_Entry]:
        """The entries of a node's children, the likeliest first."""
        ends = node > 0 and self._tokens[node] in self._stop_tokens
        if ends or self._depths[node] >= self._max_depth:
            return []
        if len(sources) == 1:
            children = sources[0].children(self._limit)
            entries: list[_Entry] = [
                (-p_node * p, next(self._serial), node, token, (child,))
                for token, p, child in children
            ]
        else:
            entries = self._merged(node, p_node, sources)[: self._limit]
        return [entry for entry in entries if -entry[0] >= _LEAST_P_REACHED]

    def _merged(self, node: int, p_node: float, sources: Sequence[SourceNode]) -> list[_Entry]:
        merged: dict[int, tuple[float, list[SourceNode]]] = {}
        left = 1.0
        for source in sources:
            for token, p, child in source.children(self._limit):
                before, children = merged.get(token, (0.0, []))
                gained = max(0.0, min(p - before, left))
                left -= gained
                merged[token] = before + gained, [*children, child]
        return sorted(
            (-p_node * p, next(self._serial), node, token, children)
            for token, (p, children) in merged.items()
        )

    def tree(self, n_draft: int) -> DraftTree:
        """The root and the first ``n_draft`` nodes; fewer if there are no more."""
        while len(self.p_reached) < n_draft and self._heap:
            self.add()
        return DraftTree.of(
            self._tokens[: n_draft + 1],
            self._parents[: n_draft + 1],
            self.p_reached[:n_draft],
            self._origins[:n_draft],
        )

    def p_by_depth(self, n_draft: int) -> list[float]:
        """For each depth, the probability that at least that many of the first ``n_draft`` nodes
        are accepted.
        """
        depths = self._depths[1 : n_draft + 1]
        p_by_depth = [0.0] * max(depths, default=0)
        for depth, probability in zip(depths, self.p_reached, strict=False):
            p_by_depth[depth - 1] += probability
        return p_by_depth

    def first_branch(self) -> list[float]:
        """The ``p_reached`` of the nodes added so far that follow the likeliest token."""
        branch, last = [], 0
        for node, parent in enumerate(self._parents):
            if parent == last and node:
                branch.append(self.p_reached[node - 1])
                last = node
        return branch
