"""Sharing the rows of a joint step: each row goes to the sequence that needs it most."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from .cost_curve import Costs
from .planner import Plan, Planner
from .policy import expected_shortfall, expected_tokens, price_of_time


def share_rows(
    planners: Sequence[Planner],
    max_depths: Sequence[int],
    costs: Costs,
    *,
    sequences: int,
    rows_taken: int = 0,
) -> None:
    """Plan the next step of several sequences together.

    The candidates of all of them are sorted by their probabilities, and the number is chosen at
    which the tokens expected of all sequences less the price of the step's time are greatest: for
    one sequence that is what :class:`Planner` does. What the drafts cost beyond a plain step of
    all is charged to the sequences that draft, in proportion to their rows, and each one's guard
    has to allow its part.

    Args:
        planners: of the sequences that plan their drafts, in the middle of a generation.
        max_depths: per planner, how deep its draft may be.
        costs: of joint steps of so many sequences: one row is a plain step of all, each further
            row is one of a draft.
        sequences: how many sequences share the step, those without a planner included.
        rows_taken: draft rows and pending rows that the step has in any case.
    """
    widest = costs.curve.widest
    max_nodes = max(0, widest - 1 - rows_taken)
    # A row takes time from all sequences.
    least_p = [sequences * cost for cost in costs.curve.cheapest_rows]
    found = [
        planner.search(max_nodes, max_depth, costs.curve, least_p)
        for planner, max_depth in zip(planners, max_depths, strict=True)
    ]
    drafting = {
        index: candidates
        for index, (planner, candidates) in enumerate(zip(planners, found, strict=True))
        if candidates is not None and not planner.policy.probes
    }
    table = [0.0, *costs.curve.table[1 + rows_taken :]]
    rate = sum(planner.policy.rate for planner in planners) + sequences - len(planners)
    restart_cost = min(planner.policy.restart_cost(costs.sync_overhead) for planner in planners)
    shares: Counter[int] = Counter()
    gain = extra = 0.0
    while drafting:
        # In the order in which they are chosen; a node's parent is before it.
        best_first = heapq.merge(
            *([(-p, index) for p in candidates.p_reached] for index, candidates in drafting.items())
        )
        order = [(index, -p) for p, index in best_first][:max_nodes]
        expected = [sequences - 1 + tokens for tokens in expected_tokens([p for _, p in order])]
        price = price_of_time(expected, table, rate)
        gain, n_draft = max(
            (
                tokens
                - expected[0]
                - price * (table[n + 1] - table[1] + (restart_cost if n else 0)),
                n,
            )
            for n, tokens in enumerate(expected)
        )
        shares = Counter(index for index, _ in order[:n_draft])
        extra = sequences * (table[n_draft + 1] / table[1] - 1) / max(n_draft, 1)
        refused = {
            index
            for index, n in shares.items()
            if not planners[index].policy.allows(
                expected_shortfall(1 + extra * n, drafting[index].p_by_depth(n))
            )
        }
        if not refused:
            break
        for index in refused:
            del drafting[index]
        shares.clear()
    total = sum(shares.values())
    for index, (planner, candidates) in enumerate(zip(planners, found, strict=True)):
        n_draft = shares[index]
        own_gain = gain * n_draft / total if n_draft else 0.0
        plan = Plan(candidates, n_draft, own_gain, 0, costs, 1 + extra * n_draft, sequences)
        planner.plan_is(plan)
