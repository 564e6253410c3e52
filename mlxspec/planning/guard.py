"""The guard: how much time a completion may lose to drafts that fail."""

from __future__ import annotations

from collections.abc import Sequence

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
