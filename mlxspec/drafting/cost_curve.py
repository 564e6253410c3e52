"""The verify cost T(M)/T(1): the cost of a step over M rows, in plain steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import numpy as np

from ..errors import OptionError


class CostCurve:
    """T(rows) / T(1), linear between known points, and never falling.

    More rows never really cost less, since a step with fewer rows could be padded. So a point that
    costs less than a point with fewer rows is noise, and gets the cost of the latter.

    Args:
        points: pairs of rows and cost, with ascending rows; the first is (1, 1).

    Attributes:
        rows: the numbers of rows of the points.
        widest: the most rows with a known cost; no wider draft is planned.
        table: ``table[rows]`` is the cost for 1 <= rows <= widest; ``table[0]`` is 0.
        row_costs: ``row_costs[n]`` is the lowest cost per additional row when rows are added to
            1 + n, however many; infinite at the end.

    Raises:
        OptionError: the points do not form such a curve.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        points = list(points)
        rows = [row for row, _ in points]
        costs = [cost for _, cost in points]
        positive = all(0 < cost < math.inf for cost in costs)
        if points[:1] != [(1, 1)] or rows != sorted(set(rows)) or not positive:
            raise OptionError(
                f"cost curve with the points {points[:3]}…: give pairs (rows, cost) with "
                "ascending rows and positive costs, of which the first is (1, 1)"
            )
        self.rows = rows
        self.widest = rows[-1]
        at, known = np.array(rows), np.array([*accumulate(costs, max)])
        everywhere = np.arange(1, self.widest + 1)
        table = np.interp(everywhere, at, known)
        self.table: list[float] = [0.0, *table.tolist()]
        # For each number of rows, the least slope of the lines to all later points.
        further = at - everywhere[:, None]
        slopes = np.full(further.shape, np.inf)
        np.divide(known - table[:, None], further, out=slopes, where=further > 0)
        self.row_costs: list[float] = slopes.min(axis=1).tolist()

    def __call__(self, rows: int) -> float:
        """The cost of a step over ``rows`` rows.

        Beyond ``widest``, the last slope continues, but the cost rises at least in proportion to
        the rows. If it stayed flat, any number of further rows would be free.
        """
        if rows <= self.widest:
            return self.table[rows]
        before = self.rows[-2] if len(self.rows) > 1 else 0
        slope = (self.table[-1] - self.table[before]) / (self.widest - before)
        return self.table[-1] + max(slope, self.table[-1] / self.widest) * (rows - self.widest)
