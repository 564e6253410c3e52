"""The verify cost T(M)/T(1): what a step over M rows costs, in plain steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, cast

import numpy as np

from ..errors import OptionError


class CostCurve:
    """T(rows) / T(1), linear between the points where it is known, and never falling.

    A step could be padded with rows that nobody needs, so a point that costs less than one of
    fewer rows is noise, and counts as that one. What lies beyond the points never costs less,
    either, however noisy they are.

    Args:
        points: pairs of rows and cost, rows ascending; the first is (1, 1).

    Attributes:
        rows: the numbers of rows of the points.
        widest: the most rows at which the cost is known; no draft is planned beyond.
        table: ``table[rows]`` is the cost for 1 <= rows <= widest; ``table[0]`` is 0.
        cheapest_rows: ``cheapest_rows[n]`` is the least that each row beyond 1 + n costs,
            however many are added; infinite at the end.

    Raises:
        OptionError: the points make no such curve.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        points = list(points)
        rows = [row for row, _ in points]
        costs = [cost for _, cost in points]
        first_is_plain = rows[:1] == [1] and costs[0] == 1
        if not first_is_plain or rows != sorted(set(rows)):
            raise OptionError(
                f"cost curve with the points {points[:3]}…: give (rows, cost) pairs "
                "with ascending rows, the first (1, 1)"
            )
        if not all(0 < cost < float("inf") for cost in costs):
            raise OptionError("a cost curve's costs are positive numbers")
        self._points = tuple(zip(rows, accumulate(costs, max), strict=True))
        self.rows = rows
        self.widest = rows[-1]
        points_rows, points_costs = map(np.array, zip(*self._points, strict=True))
        table = np.interp(np.arange(1, self.widest + 1), points_rows, points_costs)
        self.table: list[float] = [0.0, *table.tolist()]
        self.cheapest_rows = _least_slopes(points_rows, points_costs, table)

    def __call__(self, rows: int) -> float:
        """The cost of a step over ``rows`` rows; beyond ``widest`` the last slope goes on."""
        if len(self.rows) == 1:
            return float(rows)
        after = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        (left, low), (right, high) = self._points[after - 1], self._points[after]
        return low + (high - low) * (rows - left) / (right - left)


def _least_slopes(rows: np.ndarray, costs: np.ndarray, table: np.ndarray) -> list[float]:
    """Per number of rows the least slope of a line to a later point; infinite for the last.

    Args:
        rows, costs: the points.
        table: the cost for 1, 2, … rows, linear between the points.
    """
    further = rows - np.arange(1, len(table) + 1)[:, None]
    slopes = np.full(further.shape, np.inf)
    np.divide(costs - table[:, None], further, out=slopes, where=further > 0)
    return cast(list[float], slopes.min(axis=1).tolist())


USUAL_SYNC_OVERHEAD = 0.02
"""The sync overhead until some plain steps have waited for a token (docs/planner-notes.md,
"The wait for a token")."""


class Costs(Protocol):
    """What steps cost; a planner reads it, and records every step there."""

    @property
    def curve(self) -> CostCurve:
        """T(rows) / T(1); the same object until a cost has changed noticeably."""

    @property
    def hopeful(self) -> CostCurve:
        """What drafts are planned with: below ``curve`` where rows may plausibly cost less, so
        that what is hardly known is tried; else the same object."""

    @property
    def sync_overhead(self) -> float:
        """What a plain step costs more if its forward is dispatched only after the last token
        was read, as a share of a pipelined one."""

    @property
    def wants_plain_steps(self) -> bool:
        """Whether plain steps should run between drafted ones, to be measured."""

    def move_to(self, context: int) -> None:
        """Tell how many positions the context has now."""

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Learn from a step; see :class:`mlxspec.drafting.drafter.VerifiedStep`."""

    def end(self) -> None:
        """The generation has ended."""


@dataclass
class FixedCosts:
    """Costs that no step corrects."""

    curve: CostCurve
    sync_overhead: float = USUAL_SYNC_OVERHEAD
    wants_plain_steps: bool = False

    @property
    def hopeful(self) -> CostCurve:
        """The curve: there is nothing to find out."""
        return self.curve

    def move_to(self, context: int) -> None:
        """Nothing to do: they hold for all contexts."""

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Nothing to do: they stay as they are."""

    def end(self) -> None:
        """Nothing to do."""
