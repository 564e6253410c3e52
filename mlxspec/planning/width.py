"""How many rows to verify: expected tokens against the price of time."""

from __future__ import annotations

from collections.abc import Sequence

_SHARE_OF_NOW = 0.8  # of the best possible rate of this step in the price; the rest is the past's


def expected_tokens(reach: Sequence[float]) -> list[float]:
    """E(w): what a step emits on average when the first ``w`` draft nodes are verified.

    Args:
        reach: per draft node, best first, the probability that it is accepted.

    Returns:
        E(0), E(1), …; E(0) = 1, the token that every step emits.
    """
    expected = [1.0]
    for probability in reach:
        expected.append(expected[-1] + probability)
    return expected


def price_of_time(expected: Sequence[float], costs: Sequence[float], rate: float) -> float:
    """What a plain token's time is worth, in tokens.

    Time that this step does not use is spent at the rate of the steps to come. That rate is
    foreseen from the best rate possible now, since easy passages last, and from the average.

    Args:
        expected: E(w) as from :func:`expected_tokens`.
        costs: ``costs[rows]`` is T(rows) / T(1).
        rate: recent tokens per plain token's time.
    """
    best = max(tokens / costs[rows] for rows, tokens in enumerate(expected, start=1))
    return float(best**_SHARE_OF_NOW * rate ** (1 - _SHARE_OF_NOW))


def replayed_costs(expected: Sequence[float], table: Sequence[float], pending: int) -> list[float]:
    """What a step costs where state cannot be cut back, and accepted tokens run once more.

    Pending rows stand in front of the step's own. A draft of which only a part is accepted
    makes the next step wider by what is pending then.

    Args:
        expected: E(w) as from :func:`expected_tokens`.
        table: ``table[rows]`` is T(rows) / T(1), up to the widest draft with its pending rows.
        pending: accepted tokens that this step runs again.

    Returns:
        ``costs[rows]`` for the step's own rows, as :func:`price_of_time` takes them.
    """
    widest = len(table) - 1
    costs = [0.0, table[min(pending + 1, widest)]]
    for width in range(1, len(expected)):
        whole = expected[width] - expected[width - 1]  # the probability that all is accepted
        cost = table[pending + 1 + width]
        if whole < 1:
            accepted = (expected[width] - 1 - width * whole) / (1 - whole)
            rows_then = min(pending + 2 + round(accepted), widest)
            cost += (1 - whole) * (table[rows_then] - table[1])
        costs.append(cost)
    return costs


def widths_by_worth(
    expected: Sequence[float], costs: Sequence[float], price: float, entry_cost: float = 0.0
) -> list[tuple[float, int]]:
    """The widths that are worth more than plain decoding, the best first.

    All widths are compared, since cost curves have stairs.

    Args:
        expected, costs, price: as for :func:`price_of_time`, and what it returns.
        entry_cost: what any draft costs besides, in plain tokens' time.

    Returns:
        pairs of worth, E(w) - price · T(1 + w) less the same for w = 0, and w.
    """
    plain = expected[0] - price * costs[1]
    worths = [
        (worth, width)
        for width, tokens in enumerate(expected)
        if (worth := tokens - price * (costs[width + 1] + entry_cost) - plain) > 0
    ]
    worths.sort(reverse=True)
    return worths
