"""What a generation's latest steps tell a planner about the next one."""

from __future__ import annotations

from ..drafting.drafter import VerifiedStep

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
