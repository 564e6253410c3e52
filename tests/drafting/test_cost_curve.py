"""Measured and published cost curves."""

import pytest

from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.errors import OptionError


def test_is_linear_between_and_beyond_its_points() -> None:
    curve = CostCurve([(1, 1), (2, 1.5), (4, 3.5)])
    assert [curve(rows) for rows in (1, 2, 3, 4, 6)] == [1, 1.5, 2.5, 3.5, 5.5]
    assert curve.widest == 4
    assert curve.table == [0, 1, 1.5, 2.5, 3.5]


def test_the_cheapest_further_row_looks_over_stairs() -> None:
    curve = CostCurve([(1, 1), (2, 3), (4, 3), (5, 6)])
    assert curve.row_costs == pytest.approx([2 / 3, 0, 0, 3, float("inf")])


def test_never_falls_however_noisy_its_points_are() -> None:
    curve = CostCurve([(1, 1), (8, 1.2), (16, 0.8)])
    assert [curve(rows) for rows in (1, 8, 12, 16)] == [1, 1.2, 1.2, 1.2]
    assert CostCurve([(1, 1), (2, 0.5)]).table == [0, 1, 1]


def test_of_one_point_costs_are_the_rows() -> None:
    curve = CostCurve([(1, 1)])
    assert curve.widest == 1
    assert curve(3) == 3


def test_rows_beyond_its_end_cost_at_least_their_share() -> None:
    flat_end = CostCurve([(1, 1), (4, 2), (8, 2)])
    assert [flat_end(rows) for rows in (8, 12, 16, 32)] == pytest.approx([2, 3, 4, 8])
    steep_end = CostCurve([(1, 1), (4, 1), (8, 9)])
    assert steep_end(12) == pytest.approx(17)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(2, 1)],
        [(1, 2), (2, 3)],
        [(1, 1), (3, 2), (2, 3)],
        [(1, 1), (2, float("nan"))],
        [(1, 1), (2, -1)],
    ],
)
def test_an_invalid_curve_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(OptionError, match="cost"):
        CostCurve(points)
