"""The most probable draft nodes below the current token, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from ..draft.suffix_index import MAX_LENGTH, Occurrence, SuffixIndex, TextStore, continuations
from ..draft.tree import DraftTree
from .p_accept import Estimate, HazardModel

# Negative reach, serial number, parent, rank among its siblings, occurrences, path.
_Frontier = tuple[float, int, int, int, list[Occurrence], list[int]]

_STORED_OCCURRENCES = 8
_LEAST_REACH = 0.01  # nodes that are reached more rarely are worth nothing on any machine


class CandidateTree:
    """Draft nodes in order of their probability of being accepted.

    A child's probability is its parent's, times those of its better siblings being wrong, times
    its hazard. No child's exceeds its parent's, so any number of first nodes is a tree.

    Args:
        index: the text to draft from.
        hazards: what estimates the probabilities.
        max_nodes: how many to grow, the root not counted.
        max_depth: how deep to grow.
        branching: how many children a node may have; 1 grows a chain.
        least_reach: per number of nodes, the probability below which no further one pays,
            as :attr:`CostCurve.cheapest_rows`.
        store: other texts to draft from.

    Attributes:
        reach: per node the probability that it is accepted; the root's is left out.
    """

    def __init__(
        self,
        index: SuffixIndex,
        hazards: HazardModel,
        max_nodes: int,
        max_depth: int,
        branching: int,
        least_reach: Sequence[float],
        store: TextStore | None = None,
    ) -> None:
        self._index = index
        self._stored = store.tokens if store else ()
        self._hazards = hazards
        self._branching = branching
        self._tokens = [index.tokens[-1]]
        self._parents = [-1]
        self.reach: list[float] = []
        self._depths: list[int] = []
        # Per node its ranked children: tokens, estimates, and their nodes where they were grown.
        self._children: list[tuple[list[int], list[Estimate], dict[int, int]]] = []
        self._serial = 0  # decides between equals: the older entry comes first
        occurrences = index.occurrences()
        if store:
            occurrences += store.occurrences(index.tokens[-MAX_LENGTH:], _STORED_OCCURRENCES)
            occurrences.sort(reverse=True)
        self._grow(occurrences, max_nodes, max_depth, least_reach)

    def draft(self, width: int) -> DraftTree:
        """The tree of the first ``width`` nodes."""
        return DraftTree(tuple(self._tokens[: width + 1]), tuple(self._parents[: width + 1]))

    def reach_by_depth(self, width: int) -> list[float]:
        """The probability that 1, 2, … tokens at least are accepted of the first nodes."""
        depths = self._depths[:width]
        reached = [0.0] * max(depths)
        for depth, reach in zip(depths, self.reach, strict=False):
            reached[depth - 1] += reach
        return reached

    def first_branch(self) -> list[float]:
        """The reach of the likeliest first token and of the best nodes down from it."""
        reach: list[float] = []
        node = 0
        for child, parent in enumerate(self._parents[1:], start=1):
            if parent == node:
                reach.append(self.reach[child - 1])
                node = child
        return reach

    def learn(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens that followed, whether they had been verified as drafts or not."""
        node: int | None = 0
        for token in emitted:
            if node is None or node >= len(self._children):
                return
            tokens, estimates, nodes = self._children[node]
            if not tokens:
                return
            right = tokens.index(token) if token in tokens else None
            self._hazards.learn(estimates, right, at_root=node == 0)
            node = None if right is None else nodes.get(right)

    def _grow(
        self,
        occurrences: list[Occurrence],
        max_nodes: int,
        max_depth: int,
        least_reach: Sequence[float],
    ) -> None:
        """Best-first search from the root."""
        frontier: list[_Frontier] = []
        self._expand(0, 1.0, occurrences, [], frontier)
        while frontier and len(self.reach) < max_nodes and max_depth > 0:
            negative_reach, _, parent, rank, occurrences, path = heappop(frontier)
            reach = -negative_reach
            # What is worth drafting once the first token is known to be right grows as well.
            first = self.reach[0] if self.reach else 1.0
            if reach < max(_LEAST_REACH, first * least_reach[len(self.reach)]):
                break
            node = len(self._tokens)
            self._children[parent][2][rank] = node
            self._tokens.append(path[-1])
            self._parents.append(parent)
            self.reach.append(reach)
            self._depths.append(len(path))
            if len(path) < max_depth:
                self._expand(node, reach, occurrences, path, frontier)
            else:
                self._children.append(([], [], {}))

    def _expand(
        self,
        node: int,
        reach: float,
        occurrences: list[Occurrence],
        path: list[int],
        frontier: list[_Frontier],
    ) -> None:
        """Rank a node's continuations and put them on the frontier."""
        text = self._index.tokens
        found = continuations(text, occurrences, path, self._stored)
        estimates: list[Estimate] = []
        if found:
            estimates = self._hazards.estimate(
                found, len(text), len(path), self._tokens[node], self._branching
            )
        for rank, estimate in enumerate(estimates):
            token, _, _, going_on = found[rank]
            entry = (-reach * estimate.hazard, self._serial, node, rank, going_on, [*path, token])
            heappush(frontier, entry)
            self._serial += 1
            reach *= 1 - estimate.hazard
        tokens = [continuation.token for continuation in found[: self._branching]]
        self._children.append((tokens, estimates, {}))
