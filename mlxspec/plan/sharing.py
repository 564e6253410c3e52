"""Sharing the rows of a joint step: each row goes to the sequence that needs it most."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from .cost_curve import Costs
from .planner import Candidates, JointStep, Limits, Plan, Planner
from .policy import allowed_shortfall, expected_tokens, gains_of


def share_rows(
    planners: Sequence[Planner],
    max_depths: Sequence[int],
    costs: Costs,
    *,
    sequences: int,
    rows_taken: int = 0,
    patient: bool = False,
) -> None:
    """Plan the next step of several sequences together.

    The candidates of all of them are sorted by their probabilities, and the number is chosen at
    which the tokens expected of all sequences less the price of the step's time are greatest, as
    far as the guard allows: for one sequence that is what :class:`Planner` does. A token counts
    by the time that it saves, the less the faster its sequence is: what is easily copied waits,
    and is still there to be copied.

    Everybody waits for a draft, so there are two guards. The sequences share their banks: what
    these hold in all pays for a step that fails, and what a step costs beyond a plain one is
    charged to those who draft, in proportion to their rows. And none waits for the others longer
    than its patience: all in all a few plain joint steps, and a tenth of its time.

    Args:
        planners: of the sequences that plan their drafts, in the middle of a generation.
        max_depths: per planner, how deep its draft may be.
        costs: of joint steps of so many sequences: one row is a plain step of all, each further
            row is one of a draft.
        sequences: how many sequences share the step, those without a planner included.
        rows_taken: rows that the step has in any case, beside one of each sequence.
        patient: whether sequences may wait for others as long as all gain together.
    """
    curve = costs.hopeful
    max_nodes = max(0, curve.widest - 1 - rows_taken)
    weights = _weights(planners)
    found: list[Candidates | None] = []
    for planner, max_depth, weight in zip(planners, max_depths, weights, strict=True):
        # A row takes time from all sequences.
        least_p = [sequences / weight * cost for cost in curve.cheapest_rows]
        try:
            limits = Limits(max_nodes, max_depth, planner.branching, least_p)
            found.append(planner.search(curve, limits))
        except Exception as error:  # the others go on
            planner.fails_with(error)
            found.append(None)
    table = [0.0, *curve.table[1 + min(rows_taken, curve.widest - 1) :]]
    drafting = {
        index: candidates
        for index, (planner, candidates) in enumerate(zip(planners, found, strict=True))
        if candidates is not None and not planner.policy.probes
    }
    # In the order in which they are chosen; a node's parent is before it.
    best_first = heapq.merge(
        *(
            [(-p * weights[index], index) for p in candidates.p_reached]
            for index, candidates in drafting.items()
        )
    )
    order = [(index, -p) for p, index in best_first][:max_nodes]
    gain, shares = _best(
        order, drafting, table, planners, weights, sequences, costs.sync_overhead, patient
    )
    n_draft = sum(shares.values())
    further = sequences * (table[n_draft + 1] / table[1] - 1)
    # A probe of one sequence is not waited for by the others, so all plain steps are pipelined.
    pipelined = not n_draft and (
        costs.wants_plain_steps
        or _gain_of_waiting(planners, found, table, sequences, costs.sync_overhead)
        <= sequences * costs.sync_overhead
    )
    for index, (planner, candidates) in enumerate(zip(planners, found, strict=True)):
        part = shares[index] / n_draft if n_draft else 0.0
        joint = JointStep(costs, 1 + part * further, pipelined)
        planner.plan_is(Plan(candidates, shares[index], part * gain, joint=joint))


def _weights(planners: Sequence[Planner]) -> list[float]:
    """What a token of each sequence counts, 1 on average: the time that it usually takes."""
    times = [1 / planner.policy.rate for planner in planners]
    return [time * len(times) / sum(times) for time in times]


def _gain_of_waiting(
    planners: Sequence[Planner],
    found: Sequence[Candidates | None],
    table: Sequence[float],
    sequences: int,
    sync_overhead: float,
) -> float:
    """What drafts after the next tokens gain, if the step waits for these."""
    gain = sum(planner.policy.gain for planner in planners)
    if gain > sequences * sync_overhead:
        return gain
    # Whoever drafts pays for what its rows take from all.
    costs = [0.0, *(1 + sequences * (cost / table[1] - 1) for cost in table[1:])]
    return sum(
        planner.gain_of_waiting(candidates, costs, sync_overhead)
        for planner, candidates in zip(planners, found, strict=True)
    )


def _best(
    order: Sequence[tuple[int, float]],
    drafting: Mapping[int, Candidates],
    table: Sequence[float],
    planners: Sequence[Planner],
    weights: Sequence[float],
    sequences: int,
    sync_overhead: float,
    patient: bool,
) -> tuple[float, Counter[int]]:
    """The greatest gain that the guard allows, and each planner's part of the nodes that have it.

    Args:
        order: of the nodes, the best first: whose each is, and its probability times its weight.
        drafting: the candidates of those who may draft.
        table: ``table[1 + n]`` is what a step with ``n`` nodes costs, in plain joint steps.
        weights: what a token of each planner's sequence counts.
        patient: as for :func:`share_rows`.
    """
    policies = [planner.policy for planner in planners]
    expected = [sequences - 1 + tokens for tokens in expected_tokens([p for _, p in order])]
    rates = (policy.rate * weight for policy, weight in zip(policies, weights, strict=True))
    rate = sum(rates) + sequences - len(policies)
    restart = min((policy.restart_cost(sync_overhead) for policy in policies), default=0.0)
    if any(policy.ahead for policy in policies):  # who has just joined does not know it
        restart = sync_overhead
    gains = gains_of(expected, table, rate, restart)
    guarded = any(policy.guarded for policy in policies)
    banks = [policy.bank for policy in policies]
    while gains:
        gain, n = max(gains)
        shares = Counter(index for index, _ in order[:n])
        further = table[n + 1] / table[1] - 1
        shortfall = _joint_shortfall(
            sequences * further,
            [drafting[index].p_by_depth(own) for index, own in shares.items()],
        )
        waits = (
            further - sum(drafting[index].p_reached[: shares[index]]) if shares[index] else further
            for index in range(len(policies))
        )
        endured = patient or all(
            wait <= policy.patience for wait, policy in zip(waits, policies, strict=True)
        )
        allowed = not guarded or shortfall <= allowed_shortfall(banks, gain)
        if allowed and endured:
            return gain, shares
        # Few tries, since each takes a while: a little less would hardly be safer.
        gains = [(fewer_gain, fewer) for fewer_gain, fewer in gains if fewer <= n // 2]
    return 0.0, Counter()


def _joint_shortfall(cost: float, drafts: Sequence[Sequence[float]]) -> float:
    """The expected part of a time that accepted drafts do not earn: E[max(0, cost - accepted)].

    Args:
        cost: the time that a step of all takes beyond a plain one, in tokens.
        drafts: per sequence, the probabilities that at least 1, 2, … of its tokens are accepted.
    """
    accepted = np.ones(1)  # the probabilities that 0, 1, … are accepted in all
    for p_by_depth in drafts:
        at_least = np.minimum.accumulate(np.array([1.0, *p_by_depth, 0.0]))
        accepted = np.convolve(accepted, at_least[:-1] - at_least[1:])
    missing = cost - np.arange(len(accepted))
    return float(accepted @ np.maximum(missing, 0.0))
