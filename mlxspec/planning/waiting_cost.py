"""What plain steps cost more if the first of them waits for a token to be read."""

from __future__ import annotations

import math

USUAL_WAITING_COST = 0.02
"""What a plain step is taken to cost more that is not pipelined, until some have waited."""

_MOST = 0.5
_DOUBT = 0.1**2  # variances: of the usual cost at first,
_CHANGE = 0.005**2  # and of its change from one run of plain steps to the next
_STEPS_NOISE = 6  # a run's surplus over 2 T(1): a step of 2 T(1), a short one, and T(1) itself
_CLIP = 3.0  # standard deviations


class WaitingCost:
    """The cost of waiting, as a share of a pipelined plain step, learned from runs of such steps.

    The first step of a run waits for its token and for a part of the second's forward, and the
    last one finds its own forward nearly done. What both take beyond 2 T(1) is a small difference
    of large times: where other programs disturb the steps, one run says next to nothing. So each
    run counts as much as its noise allows (a Kalman filter of one number).
    """

    def __init__(self) -> None:
        self._mean, self._variance = USUAL_WAITING_COST, _DOUBT

    @property
    def value(self) -> float:
        """From 0 to 0.5."""
        return min(max(self._mean, 0.0), _MOST)

    def learn(self, surplus: float, noise: float) -> None:
        """Learn from a run of plain steps.

        Args:
            surplus: by how many T(1) its first and last step took longer than pipelined ones.
            noise: relative standard deviation of a step's time.
        """
        variance = self._variance + _CHANGE
        of_surplus = variance + _STEPS_NOISE * noise * noise
        limit = _CLIP * math.sqrt(of_surplus)
        error = min(max(surplus - self._mean, -limit), limit)
        self._mean += variance / of_surplus * error
        self._variance = variance - variance / of_surplus * variance
