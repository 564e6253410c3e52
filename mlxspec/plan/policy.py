"""When to draft, and how much: the price of time, the guard, the back-off and the probe."""

from __future__ import annotations

from collections.abc import Sequence

from ..draft.drafter import VerifiedStep
from .cost_curve import CostCurve

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


_ROWS_OF_A_TREE = 16
_FLAT = 2.0


def trees_pay(curve: CostCurve) -> bool:
    """Whether rows are cheap enough for drafts that branch.

    Only where sixteen rows cost less than two plain steps do branches pay for themselves;
    elsewhere a chain is as fast and spares the work of growing a tree.
    """
    rows = min(_ROWS_OF_A_TREE, curve.widest)
    return rows > 1 and curve(rows) < _FLAT


_FIRST_BANK = 0.35
_GAIN = 1.02
_RISKED_SHARE = 0.15


class Guard:
    """A bank of time, in plain tokens, out of which a completion pays for its failed drafts.

    Each step earns 1.02 per emitted token and pays its cost, so at 98 % of plain decoding's
    speed the bank would stay as it is. A draft is allowed while its expected shortfall, the
    time by which the step costs more than it emits, is at most 15 % of the bank: sure drafts
    pass where bold ones must wait until something was gained.

    Attributes:
        bank: what is left; it starts anew with each completion.
    """

    def __init__(self) -> None:
        self.bank = _FIRST_BANK

    def begin(self) -> None:
        """Start a completion."""
        self.bank = _FIRST_BANK

    def allows(self, shortfall: float) -> bool:
        """Whether a draft of this expected shortfall may be verified."""
        return shortfall <= _RISKED_SHARE * self.bank

    def settle(self, emitted: int, cost: float) -> None:
        """Account for a step that ran."""
        self.bank += _GAIN * emitted - cost


def expected_shortfall(cost: float, reached: Sequence[float]) -> float:
    """The expected time that a step costs beyond what it emits, in plain tokens.

    That is E[max(0, cost - emitted)], where ``1 + n`` tokens are emitted when ``n`` draft
    tokens are accepted.

    Args:
        cost: T(rows) / T(1) of the step.
        reached: per depth from 1, the probability that at least so many are accepted.
    """
    shortfall = cost - 1
    for depth, probability in enumerate(reached, start=1):
        if depth >= cost:
            break
        shortfall -= probability * min(1.0, cost - depth)
    return shortfall


_STEEP = 0.6  # of a plain step, that a row costs at least; published curves of Macs stay below 0.3
_PATIENCE = 8
_STEPS_PER_SEARCH = 4


class Rest:
    """Where rows are dear, drafts seldom pay, and to look for one in each step is felt.

    There, after eight steps without a draft only every fourth step looks for one.
    """

    def __init__(self) -> None:
        self._steps_without = 0

    def due(self, curve: CostCurve) -> bool:
        """Whether the next step shall look for no draft."""
        return (
            self._steps_without >= _PATIENCE
            and self._steps_without % _STEPS_PER_SEARCH != 0
            and curve.cheapest_rows[0] > _STEEP
        )

    def count(self, *, drafted: bool) -> None:
        """A step has run, for which a draft was found or not."""
        self._steps_without = 0 if drafted else self._steps_without + 1


_ROUND = 30
_PLAIN = range(12, 18)  # pipelined steps come in a row, and the first and last tell nothing


class PlainSteps:
    """Of every 30 steps in which plain ones are sought, six in a row go without a draft.

    All costs relate to the time of a plain step. Where every step has a draft, nothing tells
    it apart from the speed of the machine.

    Attributes:
        sought: whether plain steps are in need of measurement.
    """

    def __init__(self) -> None:
        self.sought = False
        self._steps = 0

    @property
    def due(self) -> bool:
        """Whether the next step shall be a plain one."""
        return self._steps % _ROUND in _PLAIN

    def count(self) -> None:
        """A step has run."""
        self._steps = self._steps + 1 if self.sought else 0


_FIRST_RATE = 1.2
_CHANGE = 0.1  # weight of the newest step in the averages


class RecentSteps:
    """Running averages over the steps of one generation.

    Attributes:
        rate: tokens that a step emits per plain token's time.
        worth: of the draft that was chosen, in tokens; that of none is 0.
    """

    def __init__(self) -> None:
        self.rate = _FIRST_RATE
        self.worth = 0.0
        self._drafted = False

    def entry_cost(self, waiting_cost: float) -> float:
        """What any draft costs now besides its rows, in plain tokens' time.

        After a plain step a draft interrupts the pipeline, and the next plain step waits.

        Args:
            waiting_cost: what a plain step costs more that is not pipelined.
        """
        return 0.0 if self._drafted else waiting_cost

    def add(self, step: VerifiedStep, cost: float, worth: float) -> None:
        """A step has run.

        Args:
            step: what was verified, which is nothing if a plain step was under way.
            cost: T(rows) / T(1) of the step.
            worth: of the draft that was chosen, whether it was verified or not.
        """
        self._drafted = step.drafted > 0
        self.worth += _CHANGE * (worth - self.worth)
        self.rate += _CHANGE * (len(step.tokens) / cost - self.rate)
