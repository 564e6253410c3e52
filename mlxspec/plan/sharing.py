"""Planning the drafts of a step: each row goes to the sequence that needs it most."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..draft.drafter import DraftTree, Limits
from .cost_curve import Costs
from .policy import (
    allowed_shortfall,
    best_allowed,
    expected_shortfall,
    expected_tokens,
    gains_of,
    price_of_time,
)

if TYPE_CHECKING:
    from .planner import Planner


class Plan(NamedTuple):
    """What a sequence verifies in one step.

    Attributes:
        candidates: for the current token, the likeliest first; None where none were searched for.
        n_draft: how many of them to verify.
        gain: what these gain, in tokens.
        rows_beside: rows of a window that are verified beside them.
        pipelined: whether the next step may be dispatched before this one's tokens are known, if
            nothing is drafted.
        joint: what steps of so many sequences cost; None for a step of the sequence alone.
        charge: the part of a joint step's time that the sequence's guard pays, in plain steps.
        fault: what has failed in planning it.
    """

    candidates: DraftTree | None = None
    n_draft: int = 0
    gain: float = 0.0
    rows_beside: int = 0
    pipelined: bool = True
    joint: Costs | None = None
    charge: float = 1.0
    fault: Exception | None = None


NO_PLAN = Plan()
"""A plain step."""


def plan_drafts(
    planners: Sequence[Planner],
    max_depths: Sequence[int],
    costs: Costs,
    *,
    sequences: int = 1,
    rows_taken: int = 0,
    patient: bool = False,
) -> list[Plan]:
    """Plan the drafts of the next step, of one sequence or of several together.

    The candidates of all of them are sorted by their probabilities, and the number is chosen at
    which the tokens expected of all sequences less the price of the step's time are greatest, as
    far as the guard allows. A token counts by the time that it saves, the less the faster its
    sequence is: what is easily copied waits, and is still there to be copied.

    Everybody waits for a draft, so several sequences have two guards. They share their banks: what
    these hold in all pays for a step that fails, and what a step costs beyond a plain one is
    charged to those who draft, in proportion to their rows. And none waits for the others longer
    than its patience: all in all a few plain joint steps, and a tenth of its time.

    Args:
        planners: of the sequences that plan their drafts, in the middle of a generation.
        max_depths: per planner, how deep its draft may be.
        costs: of steps of so many sequences: one row is a plain step of all, each further row is
            one of a draft.
        sequences: how many sequences share the step, those without a planner included.
        rows_taken: rows that the step has in any case, beside one of each sequence.
        patient: whether sequences may wait for others as long as all gain together.

    Returns:
        per planner its plan; where its drafters have raised something, that as the plan's fault.
    """
    step = _Step(planners, costs, sequences, rows_taken)
    plans = step.search(max_depths)
    if step.alone and not step.drafting:
        return plans
    gain, n_draft, window = step.choose(max_depths, patient)
    pipelined = not n_draft and not window and step.is_pipelined(plans)
    if step.alone:
        return [Plan(plans[0].candidates, n_draft, gain, window, pipelined)]
    shares = step.shares(n_draft)
    parts = [shares[index] / n_draft if n_draft else 0.0 for index in range(len(plans))]
    return [
        plan._replace(
            n_draft=shares[index],
            gain=part * gain,
            pipelined=pipelined,
            joint=costs,
            charge=1 + part * step.further(n_draft),
        )
        for index, (plan, part) in enumerate(zip(plans, parts, strict=True))
    ]


class _Step:
    """A step whose drafts are planned.

    Args:
        planners, costs, sequences, rows_taken: as for :func:`plan_drafts`.

    Attributes:
        alone: whether one sequence has the step for itself.
        drafting: by the planner's number, the candidates of those who may draft.
    """

    def __init__(
        self, planners: Sequence[Planner], costs: Costs, sequences: int, rows_taken: int
    ) -> None:
        self.alone = sequences == 1
        self.drafting: dict[int, DraftTree] = {}
        self._planners = planners
        self._policies = [planner.policy for planner in planners]
        self._costs = costs
        self._curve = costs.hopeful
        self._sequences = sequences
        self._max_nodes = max(0, self._curve.widest - 1 - rows_taken)
        # What a token of each sequence counts, 1 on average: the time that it usually takes.
        self._weights = [1.0]
        self._table: Sequence[float] = self._curve.table
        if not self.alone:
            times = [1 / policy.rate for policy in self._policies]
            self._weights = [time * len(times) / sum(times) for time in times]
            taken = min(rows_taken, self._curve.widest - 1)
            self._table = [0.0, *self._curve.table[1 + taken :]]

    def search(self, max_depths: Sequence[int]) -> list[Plan]:
        """Ask each planner for its candidates: plans that verify none of them yet."""
        plans: list[Plan] = []
        curve, max_nodes = self._curve, self._max_nodes
        least_p, costs = curve.cheapest_rows, curve.table
        for index, planner in enumerate(self._planners):
            if not self.alone:  # a row takes time from all sequences
                scale = self._sequences / self._weights[index]
                least_p, costs = [scale * cost for cost in curve.cheapest_rows], []
            limits = Limits(max_depths[index], max_nodes, planner.branching, least_p, costs)
            try:
                found = planner.search(curve, limits)
            except Exception as error:  # the others go on
                plans.append(Plan(fault=error))
                continue
            plans.append(Plan(found))
            if found is not None and not planner.policy.probes:
                self.drafting[index] = found
        self._sort()
        return plans

    def _sort(self) -> None:
        """Sort all nodes, the best first; a node's parent is before it."""
        if self.alone:
            p_reached: Sequence[float] = self.drafting[0].p_reached if self.drafting else ()
            self._owners = [0] * len(p_reached)
        else:
            best_first = heapq.merge(
                *(
                    [(-p * self._weights[index], index) for p in candidates.p_reached]
                    for index, candidates in self.drafting.items()
                )
            )
            order = list(islice(best_first, self._max_nodes))
            p_reached = [-p for p, _ in order]
            self._owners = [index for _, index in order]
        self._expected = expected_tokens(p_reached, self._sequences)
        if self.alone:
            self._table = self._planners[0].step_costs(self._expected, self._table)

    def shares(self, n_draft: int) -> Counter[int]:
        """How many of the first nodes each planner has."""
        return Counter(self._owners[:n_draft])

    def choose(self, max_depths: Sequence[int], patient: bool) -> tuple[float, int, int]:
        """The greatest gain that the guard allows.

        Returns:
            the gain in tokens, the number of nodes, and the rows of a window.
        """
        costs, expected, gained, window, earned = self._table, self._expected, 0.0, 0, 0.0
        if self.alone:  # a window is verified beside the draft of one sequence only
            (planner,), (max_depth,) = self._planners, max_depths
            window, earned = planner.window_beside(expected, costs, max_depth)
        if len(expected) == 1 and not window:
            return 0.0, 0, 0
        policies, overhead = self._policies, self._costs.sync_overhead
        rate = sum(one.rate * weight for one, weight in zip(policies, self._weights, strict=True))
        rate += self._sequences - len(policies)
        # Who has just joined does not know what was dispatched.
        restart = overhead if any(policy.ahead for policy in policies) else 0.0
        if window:
            costs = [0.0, *costs[1 + window :]]
            expected = [tokens + earned for tokens in expected[: len(costs) - 1]]
            gained = earned - price_of_time(expected, costs, rate) * (costs[1] - self._table[1])
        banks = [policy.bank for policy in policies]

        def allows(gain: float, n_draft: int) -> bool:
            shares = self.shares(n_draft)
            cost = costs[n_draft + 1] if self.alone else 1 + self.further(n_draft)
            drafts = [self.drafting[index].p_by_depth(own) for index, own in shares.items()]
            shortfall = expected_shortfall(cost, *drafts) - earned
            allowed = shortfall <= allowed_shortfall(banks, gain + gained)
            return allowed and (self.alone or patient or self._is_endured(n_draft, shares))

        gains = gains_of(expected, costs, rate, restart)
        gain, n_draft = best_allowed(gains, allows)
        gain += gained
        if window and not n_draft and not allows(0.0, 0):
            return 0.0, 0, 0
        return max(gain, 0.0), n_draft, window

    def further(self, n_draft: int) -> float:
        """The time that so many nodes take beyond a plain step, from all sequences together."""
        return self._sequences * (self._table[n_draft + 1] / self._table[1] - 1)

    def _is_endured(self, n_draft: int, shares: Counter[int]) -> bool:
        """Whether nobody waits for these nodes longer than its patience."""
        further = self.further(n_draft) / self._sequences
        tokens = [0.0] * len(self._policies)
        for index, own in shares.items():
            tokens[index] = sum(self.drafting[index].p_reached[:own])
        return all(
            further - own <= policy.patience
            for own, policy in zip(tokens, self._policies, strict=True)
        )

    def is_pipelined(self, plans: Sequence[Plan]) -> bool:
        """Whether a step without drafts need not wait for its tokens, since drafts after these
        would hardly gain more than the wait costs."""
        if not self.alone and self._costs.wants_plain_steps:
            # A probe of one sequence is not waited for by the others.
            return True
        most = self._sequences * self._costs.sync_overhead
        if sum(policy.gain for policy in self._policies) > most:
            return False
        table: Sequence[float] | None = None
        if not self.alone:  # whoever drafts pays for what its rows take from all
            table = [0.0, *(1 + self.further(n) for n in range(len(self._table) - 1))]
        gains = (
            planner.gain_of_waiting(plan.candidates, table)
            for planner, plan in zip(self._planners, plans, strict=True)
        )
        return sum(gains) <= most
