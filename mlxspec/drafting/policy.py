"""When to draft, and how much: the gain of a draft, and the limits on what drafts may cost.

All times are in plain steps: one is the time of a pipelined step over one row. notes/planner.md,
"Constants", says where the constants come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from .costs import CostCurve
from .drafter import VerifiedStep

SHARE_OF_NOW = 0.8  # weight of this step's best rate in the price of time; the rest is the average
_FIRST_RATE = 1.2
_CHANGE = 0.1  # weight of the newest step in the running averages

_FIRST_BANK = 2.0
_INCOME = 1.02  # per emitted token: the bank keeps its level at 98 % of plain speed
_STAKE = 0.04  # the square of an allowed shortfall, as a fraction of bank times gain

# In plain joint steps: the longest delay of an output, besides a tenth of its time. With a lower
# first patience, the newest of many short outputs would keep all others from drafting.
_FIRST_PATIENCE, _MOST_PATIENCE = 4.0, 64.0
_PATIENCE_PER_STEP = 0.1

_MUCH_GAIN = 1.0
_PROBE_ROUND = 30  # steps
_PROBE = range(12, 18)  # in a row: the first and the last pipelined step are special

_ROWS_OF_A_TREE = 16
_FLAT = 2.0  # the cost of these rows, in plain steps


class Policy:
    """The state of one generation that decides how many of a step's candidates to verify.

    A draft's **gain**, in tokens, is what it adds to a plain step's tokens, less the price of its
    time. Three things restrain drafts:

    - The *guard* is a bank of time that pays for drafts that fail. Each step deposits a little more
      than it emits and withdraws its cost. The more the bank holds and the larger the gain, the
      more a draft may risk; see :func:`allowed_shortfall`. So safe drafts pass at once, bold ones
      only after earlier gains, and drafts with little gain rarely.
    - The *sync overhead* is charged if the next step's forward is dispatched already, since a draft
      interrupts the pipeline.
    - The *probe*: all costs are relative to the time of a plain step. If every step has a draft,
      changing costs look like a change of the machine's speed. So while plain steps are wanted, six
      consecutive steps out of every 30 have no draft, unless drafts certainly gain much. The count
      continues over generations, since short ones never reach 30 steps.

    Args:
        probe_step: the number of steps already counted towards the next probe.

    Attributes:
        probe_step: as given, plus the steps since then while plain steps are wanted.
        rate: running average of tokens per plain step's time.
        gain: running average of the chosen drafts' gains; a step without a draft counts 0.
        bank: the guard's balance, in plain steps.
        ahead: whether the next step's forward is dispatched already.
        patience: how much longer the sequence may wait for others' drafts, in plain joint steps.
    """

    def __init__(self, probe_step: int = 0) -> None:
        self.rate = _FIRST_RATE
        self.gain = 0.0
        self.bank = _FIRST_BANK
        self.patience = _FIRST_PATIENCE
        self.probe_step = probe_step
        self.ahead = False
        self._doubtful = False

    @property
    def probes(self) -> bool:
        """Whether the next step is a probe: a plain step to measure."""
        gains_much = self.gain >= _MUCH_GAIN and not self._doubtful
        return not gains_much and self.probe_step % _PROBE_ROUND in _PROBE

    def settle(
        self,
        step: VerifiedStep,
        cost: float,
        *,
        gain: float,
        probing: bool,
        doubtful: bool = False,
        charge: float | None = None,
    ) -> None:
        """Account for a completed step.

        Args:
            step: the verified step; it has no draft if its forward was dispatched before.
            cost: T(rows) / T(1) of the step.
            gain: the draft's gain, 0 without one.
            probing: whether plain steps are wanted.
            doubtful: whether costs are so uncertain that gains may be imaginary.
            charge: the guard's charge, if several sequences share the step; otherwise its cost.
        """
        emitted = len(step.tokens)
        self.ahead = step.ahead
        self.probe_step = self.probe_step + 1 if probing else 0
        self._doubtful = doubtful
        self.gain += _CHANGE * (gain - self.gain)
        self.rate += _CHANGE * (emitted / cost - self.rate)
        self.bank += _INCOME * emitted - (cost if charge is None else charge)
        patience = self.patience + _PATIENCE_PER_STEP + emitted - cost
        self.patience = min(max(patience, 0.0), _MOST_PATIENCE)


def expected_tokens(p_reached: Sequence[float], sequences: int = 1) -> list[float]:
    """E(n): the average number of tokens of a step that verifies the first ``n`` draft nodes.

    Args:
        p_reached: per draft node, best first, the probability that it is accepted.
        sequences: the number of sequences that share the step.

    Returns:
        E(0), E(1), …; E(0) counts the one token that every step emits for each sequence.
    """
    return list(accumulate(p_reached, initial=float(sequences)))


def price_of_time(expected: Sequence[float], costs: Sequence[float], rate: float) -> float:
    """The price of a plain step's time, in tokens.

    The time that this step saves goes to later steps, at their rate. The prediction of that rate
    combines the best rate possible now, since easy passages last, with the average.

    Args:
        expected: E(n) as from :func:`expected_tokens`.
        costs: ``costs[rows]`` is T(rows) / T(1).
        rate: recent tokens per plain step's time.
    """
    best = max(tokens / costs[rows] for rows, tokens in enumerate(expected, start=1))
    return float(best**SHARE_OF_NOW * rate ** (1 - SHARE_OF_NOW))


def best_draft(
    expected: Sequence[float],
    costs: Sequence[float],
    rate: float,
    restart_cost: float = 0.0,
    allows: Callable[[float, int], bool] = lambda gain, n_draft: True,
) -> tuple[float, int]:
    """The greatest allowed gain, and its number of nodes; 0.0 and 0 if there is none.

    All numbers of nodes are compared, since costs rise in jumps. After a refusal, only half as many
    nodes or fewer are tried: slightly fewer would barely be safer, and each check takes time.

    Args:
        expected: E(n) as from :func:`expected_tokens`.
        costs: ``costs[rows]`` is T(rows) / T(1).
        rate: as for :func:`price_of_time`.
        restart_cost: the cost of any draft besides its rows.
        allows: whether a gain with a number of nodes is allowed.
    """
    price = price_of_time(expected, costs, rate)
    plain = expected[0] - price * costs[1]
    gains = [
        (gain, n_draft)
        for n_draft, tokens in enumerate(expected)
        if (gain := tokens - price * (costs[n_draft + 1] + restart_cost) - plain) > 0
    ]
    most = len(expected)
    for gain, n_draft in sorted(gains, reverse=True):
        if n_draft <= most:
            if allows(gain, n_draft):
                return gain, n_draft
            most = n_draft // 2
    return 0.0, 0


def expected_shortfall(cost: float, *drafts: Sequence[float]) -> float:
    """The expected time by which a step's cost exceeds its tokens: E[max(0, cost - emitted)].

    Args:
        cost: 1 plus the time that the step takes beyond a plain one, over all sequences.
        drafts: per drafting sequence, the probabilities that 1, 2, … or more of its tokens are
            accepted.
    """
    accepted = np.ones(1)  # the probabilities that 0, 1, … tokens are accepted in all
    for p_by_depth in drafts:
        at_least = np.minimum.accumulate(np.array([1.0, *p_by_depth, 0.0]))
        accepted = np.convolve(accepted, at_least[:-1] - at_least[1:])
    missing = cost - 1 - np.arange(len(accepted))
    return float(accepted @ np.maximum(missing, 0.0))


def allowed_shortfall(banks: Sequence[float], gain: float) -> float:
    """The greatest expected shortfall of a draft that the guard allows.

    A draft is a bet, and as with Kelly's criterion (Kelly 1956) the stake grows with the edge: the
    square of the shortfall is at most 4 % of the bank times the gain.

    Args:
        banks: the banks of the sequences that share the step, in plain steps.
        gain: the draft's gain, in tokens.
    """
    return math.sqrt(_STAKE * max(0.0, sum(banks)) * max(0.0, gain))


def trees_pay(curve: CostCurve) -> bool:
    """Whether rows are cheap enough for drafts that branch.

    Branches pay only if sixteen rows cost less than two plain steps. Otherwise a chain is as fast
    and saves the work of growing a tree.
    """
    rows = min(_ROWS_OF_A_TREE, curve.widest)
    return rows > 1 and curve(rows) < _FLAT
