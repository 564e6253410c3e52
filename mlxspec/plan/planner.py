"""The planner: suffix drafting whose every draft is chosen by what it costs and should earn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..draft.context_index import ContextIndex, OutputMemory
from ..draft.drafter import VerifiedStep
from ..draft.suffix_index import SuffixIndex, TextStore
from ..draft.tree import DraftTree
from .cost_curve import CostCurve
from .live_costs import USUAL_WAITING_COST
from .p_accept import HazardModel
from .policy import (
    Guard,
    PlainSteps,
    RecentSteps,
    Rest,
    expected_shortfall,
    expected_tokens,
    price_of_time,
    replayed_costs,
    widths_by_worth,
)
from .suffix_source import CandidateTree

CHILDREN = 6
"""Per node of a tree; more are never likely enough."""

# Before the first draft, what one would be worth whose tokens are each right with 60 %.
_FIRST_DRAFT = [0.6**depth for depth in range(1, 9)]


class PlannedDrafter:
    """Drafts what maximises expected tokens per time, the empty draft included.

    Each step, the earlier occurrences of the text's end are gathered, their continuations are
    ranked and given probabilities, and the number of rows is chosen at which expected tokens
    less the price of the time are greatest, within what the guard allows. The probabilities
    are learned from every emitted token, drafted or not.

    Args:
        curve: the verify cost. May be replaced between steps (attribute ``curve``) by a newly
            measured one.
        waiting_cost: what a plain step costs more when its forward is dispatched only after the
            last token was read, as a share of a pipelined one. May be replaced too.
        branching: whether drafts may be trees; otherwise they are chains.
        replays: whether accepted tokens of a partly rejected draft run again (REPLAY).
        guard: bounds what failed drafts may cost; None does not.
        memory: earlier outputs to draft from, to which each output is added at its end.
        store: other texts to draft from.
        token_classes: see :func:`mlxspec.plan.p_accept.token_classes`.
        index: of the conversation's last turn, to be extended; by default a new one.
    """

    def __init__(
        self,
        curve: CostCurve,
        *,
        waiting_cost: float = USUAL_WAITING_COST,
        branching: bool = True,
        replays: bool = False,
        guard: Guard | None = None,
        memory: OutputMemory | None = None,
        store: TextStore | None = None,
        token_classes: bytes = b"",
        index: ContextIndex | None = None,
    ) -> None:
        self.curve = curve
        self.waiting_cost = waiting_cost
        self.plain_steps = PlainSteps()
        """While they are sought, steps are pipelined wherever nothing is drafted."""
        self.branching = branching
        self._replays = replays
        self._pending = 0
        self._guard = guard
        self._memory = memory
        self._store = store
        self._hazards = HazardModel(token_classes)
        self._kept_context = index

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation; the index is built beside the prefill, in a thread."""
        self._context = self._kept_context or ContextIndex()
        self._context.begin(prompt, self._memory.text() if self._memory else [])
        self._index: SuffixIndex | None = None
        self._hazards.begin(memory_end=self._context.memory_end)
        self._rest = Rest()
        self._pending = 0
        self._recent = RecentSteps()
        first = _FIRST_DRAFT[: self.curve.widest - 1]
        self._recent.worth = self._worth_of_chain(first, guarded=False)
        if self._guard:
            self._guard.begin()

    def propose(self, max_depth: int) -> DraftTree:
        self._plan = _NO_PLAN if self._rest.due(self.curve) else self._choose(max_depth)
        if self._plan.tree is None:
            return DraftTree.chain(self._text().tokens[-1])
        return self._plan.tree.draft(self._plan.width)

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last, where it came from."""
        return "root", *["suffix"] * self._plan.width

    @property
    def pipelined(self) -> bool:
        """Whether to dispatch the next forward before the next token is known.

        Asked when nothing is drafted now. The token may open a passage worth drafting; to wait
        for it pays where drafts have lately been worth more than the waiting costs, or where
        they would be if the likeliest token came. Where waiting is dear, the guard must allow
        what is waited for.
        """
        tree = self._plan.tree
        if self.plain_steps.sought or tree is None:
            return True
        if self._recent.worth > self.waiting_cost:
            return False
        reach = tree.first_branch()
        if len(reach) < 2:
            return True
        then = [probability / reach[0] for probability in reach[1:]]
        dear = self.waiting_cost > USUAL_WAITING_COST
        return reach[0] * self._worth_of_chain(then, guarded=dear) <= self.waiting_cost

    def observe(self, step: VerifiedStep) -> None:
        tokens = step.tokens
        cost = self.curve(self._pending + len(step.tree))
        self._pending = step.pending
        self._rest.count(drafted=self._plan.width > 0)
        self.plain_steps.count()
        if self._plan.tree:
            self._plan.tree.learn(tokens)
        self._recent.add(step, cost, self._plan.worth)
        if self._guard:
            self._guard.settle(len(tokens), cost)
        self._text().extend(tokens)

    def end(self) -> None:
        if self._memory:
            self._memory.add(self._context.output)
        self._index = None

    def _text(self) -> SuffixIndex:
        if self._index is None:
            self._index = self._context.index
        return self._index

    def _choose(self, max_depth: int) -> _Plan:
        """Grow the candidates after the current token and choose how many to verify."""
        self._hazards.refresh()
        tree = CandidateTree(
            self._text(),
            self._hazards,
            max_nodes=max(0, self.curve.widest - 1 - self._pending),
            max_depth=max_depth,
            branching=CHILDREN if self.branching else 1,
            least_reach=self.curve.cheapest_rows,
            store=self._store,
        )
        if self.plain_steps.due:
            return _Plan(tree, 0, 0.0)
        entry_cost = self._recent.entry_cost(self.waiting_cost)
        worth, width = self._best(tree.reach, tree.reach_by_depth, entry_cost)
        return _Plan(tree, width, worth)

    def _worth_of_chain(self, reach: Sequence[float], guarded: bool) -> float:
        """The worth of a chain whose first 1, 2, … tokens are accepted with these probabilities."""
        worth, _ = self._best(reach, lambda width: reach[:width], guarded=guarded)
        return worth

    def _best(
        self,
        reach: Sequence[float],
        reach_by_depth: Callable[[int], Sequence[float]],
        entry_cost: float = 0.0,
        guarded: bool = True,
    ) -> tuple[float, int]:
        """The greatest worth that the guard allows, and the width that has it; 0 and 0 for none.

        Args:
            reach: per draft node, best first, the probability that it is accepted.
            reach_by_depth: of so many first nodes, the probability that 1, 2, … are accepted.
            entry_cost: what any draft costs besides, in plain tokens' time.
            guarded: False asks no guard.
        """
        expected = expected_tokens(reach)
        costs: Sequence[float] = self.curve.table
        if self._replays:
            costs = replayed_costs(expected, costs, self._pending)
        guard = self._guard if guarded else None
        price = price_of_time(expected, costs, self._recent.rate)
        for worth, width in widths_by_worth(expected, costs, price, entry_cost):
            shortfall = expected_shortfall(costs[width + 1], reach_by_depth(width))
            if guard is None or guard.allows(shortfall):
                return worth, width
        return 0.0, 0


class _Plan(NamedTuple):
    """What was found for the current token: the candidates, how many to verify, their worth."""

    tree: CandidateTree | None
    width: int
    worth: float


_NO_PLAN = _Plan(None, 0, 0.0)
