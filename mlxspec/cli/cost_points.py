"""A cost curve as it is shown: one point per number of rows that was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..plan.live_curve import KnownTime
from ..plan.measurement import RowsTime


@dataclass(frozen=True)
class CostPoint:
    """T(rows) and what follows from it.

    Attributes:
        rows: rows of a step.
        seconds: its wall time.
        cost: T(rows)/T(1).
        error: relative; of a fresh measurement its spread, of a kept one its standard error.
    """

    rows: int
    seconds: float
    cost: float
    error: float

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / self.rows


def measured_points(times: Iterable[RowsTime]) -> list[CostPoint]:
    """The points of a fresh measurement."""
    return _points([(time.rows, time.seconds, time.spread) for time in times])


def kept_points(times: Iterable[KnownTime]) -> list[CostPoint]:
    """The points of what the cache keeps."""
    return _points([(time.rows, time.seconds, time.uncertainty) for time in times])


def _points(times: list[tuple[int, float, float]]) -> list[CostPoint]:
    one_row = times[0][1]
    return [CostPoint(rows, seconds, seconds / one_row, error) for rows, seconds, error in times]
