"""The planner: suffix drafting whose every draft is chosen by what it costs and should earn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..drafting.context_index import ContextIndex
from ..drafting.continuations import TextStore
from ..drafting.drafter import VerifiedStep
from ..drafting.output_memory import OutputMemory
from ..drafting.suffix_index import SuffixIndex
from ..drafting.tree import DraftTree
from .candidate_tree import CandidateTree
from .cost_curve import CostCurve
from .guard import Guard, expected_shortfall
from .hazard import HazardModel
from .live_costs import USUAL_WAITING_COST
from .plain_steps import PlainSteps
from .rest import Rest
from .width import expected_tokens, price_of_time, replayed_costs, widths_by_worth

CHILDREN = 6
"""Per node of a tree; more are never likely enough."""

_FIRST_RATE = 1.2
_RATE_CHANGE = 0.1

# Before the first draft, what one would be worth whose tokens are each right with 60 %.
_FIRST_DRAFT = [0.6**depth for depth in range(1, 9)]
_WORTH_CHANGE = 0.1


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
        replays: whether accepted tokens of a partly rejected draft run again (tier REPLAY).
        guard: bounds what failed drafts may cost; None does not.
        memory: earlier outputs to draft from, to which each output is added at its end.
        store: other texts to draft from.
        token_classes: see :func:`mlxspec.planning.token_classes.token_classes`.
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
        self._drafting = False
        self._rest = Rest()
        self._pending = 0
        self._rate = _FIRST_RATE
        expected = expected_tokens(_FIRST_DRAFT[: self.curve.widest - 1])
        worths = self._worths(expected, self._costs(expected))
        self._worth = worths[0][0] if worths else 0.0
        if self._guard:
            self._guard.begin()

    def propose(self, budget: int) -> DraftTree:
        self._plan = _NO_PLAN if self._rest.due(self.curve) else self._choose(budget)
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
        if self._worth > self.waiting_cost:
            return False
        reach = tree.first_branch()
        if len(reach) < 2:
            return True
        then = [probability / reach[0] for probability in reach[1:]]
        dear = self.waiting_cost > USUAL_WAITING_COST
        worth, _ = self._best(then, lambda width: then[:width], guarded=dear)
        return reach[0] * worth <= self.waiting_cost

    def observe(self, step: VerifiedStep) -> None:
        tokens = step.tokens
        cost = self.curve(self._pending + len(step.tree))
        self._pending = step.pending
        self._drafting = step.drafted > 0
        self._rest.count(drafted=self._plan.width > 0)
        self.plain_steps.count()
        if self._plan.tree:
            self._plan.tree.learn(tokens)
        self._worth += _WORTH_CHANGE * (self._plan.worth - self._worth)
        self._rate += _RATE_CHANGE * (len(tokens) / cost - self._rate)
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
        # After a plain step a draft interrupts the pipeline, and the next plain step waits.
        entry_cost = 0.0 if self._drafting else self.waiting_cost
        worth, width = self._best(tree.reach, tree.reach_by_depth, entry_cost)
        return _Plan(tree, width, worth)

    def _best(
        self,
        reach: Sequence[float],
        reach_by_depth: Callable[[int], list[float]],
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
        costs = self._costs(expected)
        for worth, width in self._worths(expected, costs, entry_cost):
            shortfall = expected_shortfall(costs[width + 1], reach_by_depth(width))
            if not guarded or self._allows(shortfall):
                return worth, width
        return 0.0, 0

    def _worths(
        self, expected: Sequence[float], costs: Sequence[float], entry_cost: float = 0.0
    ) -> list[tuple[float, int]]:
        price = price_of_time(expected, costs, self._rate)
        return widths_by_worth(expected, costs, price, entry_cost)

    def _costs(self, expected: Sequence[float]) -> Sequence[float]:
        if not self._replays:
            return self.curve.table
        return replayed_costs(expected, self.curve.table, self._pending)

    def _allows(self, shortfall: float) -> bool:
        return self._guard is None or self._guard.allows(shortfall)


class _Plan(NamedTuple):
    """What was found for the current token: the candidates, how many to verify, their worth."""

    tree: CandidateTree | None
    width: int
    worth: float


_NO_PLAN = _Plan(None, 0, 0.0)
