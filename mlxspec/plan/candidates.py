"""Candidates for the next tokens, each with the probability that it is accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ..draft.combined import view
from ..draft.drafter import Drafter, VerifiedStep, checked_drafter, checked_tree
from ..draft.tree import DraftTree, TreeBuilder
from .policy import Policy

_RANKS, _DEPTHS = 4, 8  # siblings and depths that are told apart
_FIRST_P_ACCEPT = 0.5
_RATE = 0.1


class Candidates:
    """Draft nodes below the current token, the likeliest first, a parent before its children.

    Args:
        root: the current token.
        name: of the source that proposes them.

    Attributes:
        tokens, parents: as in :class:`DraftTree`, the root first.
        depths: per node but the root, its distance from the root.
        p_reached: per node but the root, the probability that it is accepted.
    """

    def __init__(self, root: int, name: str = "draft") -> None:
        self.name = name
        self.tokens = [root]
        self.parents = [-1]
        self.depths: list[int] = []
        self.p_reached: list[float] = []

    def add(self, token: int, parent: int, p_reached: float) -> int:
        """Append a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 + (self.depths[parent - 1] if parent else 0))
        self.p_reached.append(p_reached)
        return len(self.tokens) - 1

    def cut(self, n_draft: int) -> None:
        """Forget all but the first nodes."""
        del self.tokens[n_draft + 1 :], self.parents[n_draft + 1 :]
        del self.depths[n_draft:], self.p_reached[n_draft:]

    def origins(self, n_draft: int) -> list[str]:
        """The source of each of the first nodes."""
        return [self.name] * n_draft

    def draft(self, n_draft: int) -> DraftTree:
        """The tree of the first ``n_draft`` nodes."""
        return DraftTree(tuple(self.tokens[: n_draft + 1]), tuple(self.parents[: n_draft + 1]))

    def p_by_depth(self, n_draft: int) -> list[float]:
        """The probability that 1, 2, … tokens at least are accepted of the first nodes."""
        depths = self.depths[:n_draft]
        p_by_depth = [0.0] * max(depths, default=0)
        for depth, probability in zip(depths, self.p_reached, strict=False):
            p_by_depth[depth - 1] += probability
        return p_by_depth

    def first_branch(self) -> list[float]:
        """``p_reached`` of the likeliest first token and of the best nodes down from it."""
        branch: list[float] = []
        node = 0
        for child, parent in enumerate(self.parents[1:], start=1):
            if parent == node:
                branch.append(self.p_reached[child - 1])
                node = child
        return branch


class Source:
    """Where a planner's candidates come from: a base class whose methods do nothing.

    The planner calls ``begin`` once with the prompt, then ``candidates`` and ``observe`` in turn
    (``observe`` alone where it does not search), and ``end``.
    """

    name = "draft"
    """The origin of its draft tokens, for those who look on."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation whose context is ``prompt``."""

    def candidates(
        self, max_nodes: int, max_depth: int, branching: bool, least_p: Sequence[float]
    ) -> Candidates:
        """What may follow the current token.

        Args:
            max_nodes: how many to return at most.
            max_depth: how deep.
            branching: whether a node may have several children.
            least_p: per number of nodes, the probability below which no further one pays, as
                :attr:`CostCurve.cheapest_rows`.
        """
        raise NotImplementedError

    def rows_beside(
        self, expected: Sequence[float], costs: Sequence[float], policy: Policy, max_depth: int
    ) -> tuple[int, float]:
        """Rows to verify beside the candidates, and the tokens per step that they earn.

        Args:
            expected: E(n) of the candidates.
            costs: ``costs[rows]`` is T(rows) / T(1), as far as there is room.
            policy: the planner's.
            max_depth: how deep these rows may stand.
        """
        return 0, 0.0

    def add_rows(self, tree: TreeBuilder) -> None:
        """Add these rows to the draft; called in steps that verify them."""

    def window_rows(self) -> dict[tuple[int, int], int]:
        """Of lookahead's window in the last draft: the node of each row (level, column)."""
        return {}

    def observe(self, step: VerifiedStep, searched: bool) -> None:
        """Learn from a step; ``step.tokens`` now belong to the context.

        Args:
            step: what was verified.
            searched: whether :meth:`candidates` was asked for this step.
        """

    def end(self) -> None:
        """Let go of the generation's state."""


class _Union(Candidates):
    """Candidates of several sources."""

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.names: list[str] = []

    def origins(self, n_draft: int) -> list[str]:
        return self.names[:n_draft]


def merged(sources: Sequence[Candidates], max_nodes: int) -> Candidates:
    """The candidates of several sources for one token as one list, the best ``max_nodes``.

    A node that several propose keeps its highest probability. A node that only a later source
    proposes counts for as much as the earlier sources' siblings leave to it.
    """
    if len(sources) == 1:
        return sources[0]
    union = _Union(sources[0].tokens[0])
    children: dict[tuple[int, int], int] = {}
    left = [1.0]  # per node, the probability that none of the earlier sources' children follows
    for candidates in sources:
        nodes = [0]
        taken = [0.0] * len(left)
        for token, parent, p_reached in zip(
            candidates.tokens[1:], candidates.parents[1:], candidates.p_reached, strict=True
        ):
            above = nodes[parent]
            p_above = union.p_reached[above - 1] if above else 1.0
            p_accept = p_reached / (candidates.p_reached[parent - 1] if parent else 1.0)
            node = children.get((above, token))
            if node is None:
                p_accept *= left[above]
                node = children[above, token] = union.add(token, above, p_above * p_accept)
                union.names.append(candidates.name)
                left.append(1.0)
                taken.append(0.0)
                taken[above] += p_accept
            else:
                better = max(union.p_reached[node - 1], p_above * p_accept)
                union.p_reached[node - 1] = min(better, p_above)
            nodes.append(node)
        left = [max(0.0, rest - share) for rest, share in zip(left, taken, strict=True)]
    best = _Union(union.tokens[0])
    order = best_first(union, best)
    best.names = [union.names[node - 1] for node in order]
    best.cut(max_nodes)
    return best


def best_first(candidates: Candidates, into: Candidates) -> list[int]:
    """Add the nodes to ``into``, the likeliest first; returns their former numbers.

    Equal ones keep their order, so that parents stand before children.
    """
    order = sorted(range(1, len(candidates.tokens)), key=lambda n: -candidates.p_reached[n - 1])
    number = {0: 0}
    for node in order:
        parent = number[candidates.parents[node]]
        number[node] = into.add(candidates.tokens[node], parent, candidates.p_reached[node - 1])
    return order


class DrafterSource(Source):
    """The drafts of any drafter as candidates.

    How likely its tokens are right is learned from what followed, by depth and by rank among
    siblings, whether they were verified or not: so a drafter that is wrong costs nothing for
    long.

    Args:
        drafter: whose drafts; it serves one generation.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = checked_drafter(drafter)
        self.name = type(drafter).__name__
        self._p_accept = [[_FIRST_P_ACCEPT] * _DEPTHS for _ in range(_RANKS)]

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._drafter.begin(list(prompt))

    def candidates(
        self, max_nodes: int, max_depth: int, branching: bool, least_p: Sequence[float]
    ) -> Candidates:
        tree = checked_tree(self._drafter.propose(max_depth), self._drafter, self._last)
        self._tree = tree if branching else tree.first_chain()
        proposed = Candidates(self._last)
        ranks: dict[int, int] = {}
        self._cells: list[tuple[int, int]] = [(0, 0)]
        for node, (token, parent) in enumerate(
            zip(self._tree.tokens[1:], self._tree.parents[1:], strict=True), start=1
        ):
            rank = ranks[parent] = ranks.get(parent, -1) + 1
            cell = min(rank, _RANKS - 1), min(self._tree.depths[node], _DEPTHS) - 1
            above = proposed.p_reached[parent - 1] if parent else 1.0
            proposed.add(token, parent, above * self._p_accept[cell[0]][cell[1]])
            self._cells.append(cell)
        candidates = Candidates(self._last, self.name)
        best_first(proposed, candidates)
        candidates.cut(max_nodes)
        return candidates

    def observe(self, step: VerifiedStep, searched: bool) -> None:
        if searched:
            self._learn(step.tokens)
            step = view(step, self._tree)
        self._last = step.tokens[-1]
        self._drafter.observe(step)

    def end(self) -> None:
        self._drafter.end()

    def _learn(self, tokens: Sequence[int]) -> None:
        node = 0
        for token in tokens:
            right = None
            for child, parent in enumerate(self._tree.parents):
                if parent == node and right is None:
                    rank, depth = self._cells[child]
                    hit = self._tree.tokens[child] == token
                    self._p_accept[rank][depth] += _RATE * (hit - self._p_accept[rank][depth])
                    right = child if hit else None
            if right is None:
                return
            node = right
