"""What steps cost: wall time by number of rows, measured on the steps that run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

_KEPT = 64  # recent steps per number of rows: enough for a median, and a hot chip is noticed


@dataclass(frozen=True)
class StepTime:
    """T(rows) as measured.

    Attributes:
        rows: rows per forward.
        steps: how many steps of this width ran.
        seconds: median wall time of the recent ones.
        cost: T(rows) / T(1), the verify cost; None while no step of one row has run.
    """

    rows: int
    steps: int
    seconds: float
    cost: float | None


class StepTimes:
    """T(rows): the wall time of whole steps by their number of rows.

    A whole step is proposing, forward, reading, acceptance and cache commit. Times hold for one
    model on one machine in one data type.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._steps: dict[int, int] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Add the wall time of one step."""
        self._recent.setdefault(rows, deque(maxlen=_KEPT)).append(seconds)
        self._steps[rows] = self._steps.get(rows, 0) + 1

    def table(self) -> list[StepTime]:
        """One entry per number of rows that has run, fewest rows first."""
        one_row = median(self._recent[1]) if 1 in self._recent else None
        table = []
        for rows in sorted(self._recent):
            seconds = median(self._recent[rows])
            cost = seconds / one_row if one_row else None
            table.append(StepTime(rows, self._steps[rows], seconds, cost))
        return table
