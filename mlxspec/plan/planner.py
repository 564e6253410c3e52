"""The planner: drafts what emits most per time, the empty draft included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..draft.drafter import Drafter, VerifiedStep
from ..draft.tree import DraftTree, TreeBuilder
from .candidates import Candidates, Source, merged
from .cost_curve import USUAL_SYNC_OVERHEAD, Costs
from .policy import Policy, expected_shortfall, expected_tokens, price_of_time, replayed_costs

# Before the first draft, what one would gain whose tokens are each right with 60 %.
_FIRST_DRAFT = [0.6**depth for depth in range(1, 9)]


class Planner(Drafter):
    """Drafts what maximises expected tokens per time.

    Each step, the sources' candidates are put in the order of their probabilities, and the
    number of them is chosen at which expected tokens less the price of the time are greatest,
    within what the policy allows. Every step corrects the costs and the probabilities.

    Args:
        costs: what steps cost; the planner tells them each step.
        sources: of candidates; with several, the first one's siblings count first.
        branching: whether drafts may be trees; otherwise they are chains.
        replays: whether accepted tokens of a partly rejected draft run again (REPLAY).
        guarded: whether a guard bounds what failed drafts may cost.

    Attributes:
        policy: of the generation at hand.
        predicted_cost: what its steps should have taken so far, in plain tokens.
    """

    def __init__(
        self,
        costs: Costs,
        sources: Sequence[Source],
        *,
        branching: bool = True,
        replays: bool = False,
        guarded: bool = True,
    ) -> None:
        self.costs = costs
        self.branching = branching
        self.predicted_cost = 0.0
        self._sources = sources
        self._replays = replays
        self._guarded = guarded

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]
        self._pending = 0
        self.predicted_cost = 0.0
        self.costs.move_to(len(prompt))
        self.policy = Policy(self._guarded)
        first = _FIRST_DRAFT[: self.costs.curve.widest - 1]
        self.policy.gain = self._gain_of_chain(first, guarded=False)
        for source in self._sources:
            source.begin(prompt)

    def propose(self, max_depth: int) -> DraftTree:
        self._plan = plan = self._choose(max_depth)
        if plan.candidates is None:
            self._draft = DraftTree.chain(self._last)
        elif not plan.rows_beside:
            self._draft = plan.candidates.draft(plan.n_draft)
        else:
            builder = TreeBuilder.of(plan.candidates.draft(plan.n_draft))
            for source in self._sources:
                source.add_rows(builder)
            self._draft = builder.tree()
        return self._draft

    @property
    def pipelined(self) -> bool:  # type: ignore[override]
        """Whether to dispatch the next forward before the next token is known.

        Asked when nothing is drafted now. The token may open a passage worth drafting; to wait
        for it pays where drafts have lately gained more than the waiting costs, or where they
        would if the likeliest token came. Where waiting is expensive, the guard must allow what
        is waited for.
        """
        candidates, sync_overhead = self._plan.candidates, self.costs.sync_overhead
        if self.costs.wants_plain_steps or candidates is None:
            return True
        if self.policy.gain > sync_overhead:
            return False
        branch = candidates.first_branch()
        if len(branch) < 2:
            return True
        then = [probability / branch[0] for probability in branch[1:]]
        guarded = sync_overhead > USUAL_SYNC_OVERHEAD
        return branch[0] * self._gain_of_chain(then, guarded) <= sync_overhead

    def observe(self, step: VerifiedStep) -> None:
        plan, costs = self._plan, self.costs
        cost = costs.curve(self._pending + len(step.tree))
        waiting = costs.sync_overhead if step.rows == 1 and not step.pipelined else 0.0
        self.predicted_cost += cost + waiting
        self.policy.settle(
            step,
            cost,
            chosen=plan.n_draft > 0 or plan.rows_beside > 0,
            gain=plan.gain,
            probing=costs.wants_plain_steps,
        )
        self._pending = step.pending
        self._last = step.tokens[-1]
        for source in self._sources:
            source.observe(step, searched=plan.candidates is not None)
        costs.record(step.rows, step.seconds, step.pipelined)
        costs.move_to(step.context)

    def end(self) -> None:
        for source in self._sources:
            source.end()
        self.costs.end()

    def origins(self) -> tuple[str, ...]:
        """Per node of the tree proposed last: the source that proposed it, or "window"."""
        plan = self._plan
        names = plan.candidates.origins(plan.n_draft) if plan.candidates else []
        return "root", *names, *["window"] * (len(self._draft) - 1 - len(names))

    def window_rows(self) -> dict[tuple[int, int], int]:
        return {row: node for source in self._sources for row, node in source.window_rows().items()}

    def _choose(self, max_depth: int) -> _Plan:
        """Gather the candidates after the current token and choose how many to verify."""
        costs, policy, curve = self.costs, self.policy, self.costs.curve
        if policy.skips_search(curve):
            return _NO_PLAN
        max_nodes = max(0, curve.widest - 1 - self._pending)
        found = [
            source.candidates(max_nodes, max_depth, self.branching, curve.cheapest_rows)
            for source in self._sources
        ]
        candidates = merged(found, max_nodes)
        if policy.probes:
            return _Plan(candidates, 0, 0.0)
        expected = expected_tokens(candidates.p_reached)
        table = self._costs_of(expected)
        restart_cost = policy.restart_cost(costs.sync_overhead)
        for source in self._sources:
            rows, earned = source.rows_beside(expected, table, policy, max_depth)
            if rows:
                return self._with_rows_beside(candidates, expected, table, rows, earned)
        gain, n_draft = policy.best(expected, table, candidates.p_by_depth, restart_cost)
        return _Plan(candidates, n_draft, gain)

    def _with_rows_beside(
        self,
        candidates: Candidates,
        expected: Sequence[float],
        table: Sequence[float],
        rows: int,
        earned: float,
    ) -> _Plan:
        """Choose how many candidates to verify beside rows that earn so many tokens per step."""
        costs = [0.0, *table[1 + rows :]]
        expected = [tokens + earned for tokens in expected[: len(costs) - 1]]
        price = price_of_time(expected, costs, self.policy.rate)
        restart_cost = self.policy.restart_cost(self.costs.sync_overhead)
        gain, n_draft = self.policy.best(
            expected, costs, candidates.p_by_depth, restart_cost, earned=earned
        )
        if not n_draft and not self.policy.allows(expected_shortfall(costs[1], ()) - earned):
            return _Plan(candidates, 0, 0.0)
        gain += earned - price * (costs[1] - table[1])
        return _Plan(candidates, n_draft, max(gain, 0.0), rows)

    def _gain_of_chain(self, p_reached: Sequence[float], guarded: bool) -> float:
        """The gain of a chain whose first 1, 2, … tokens are accepted with these probabilities."""
        expected = expected_tokens(p_reached)
        costs = self._costs_of(expected)
        gain, _ = self.policy.best(expected, costs, lambda n: p_reached[:n], guarded=guarded)
        return gain

    def _costs_of(self, expected: Sequence[float]) -> Sequence[float]:
        """``costs[rows]`` is T(rows) / T(1) of a step with so many rows of its own."""
        table = self.costs.curve.table
        return replayed_costs(expected, table, self._pending) if self._replays else table


class _Plan(NamedTuple):
    """What was found for the current token, how much of it to verify, and the gain of that."""

    candidates: Candidates | None
    n_draft: int
    gain: float
    rows_beside: int = 0


_NO_PLAN = _Plan(None, 0, 0.0)
