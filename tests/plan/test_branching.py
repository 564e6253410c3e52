"""Where drafts may branch."""

from __future__ import annotations

import pytest

from mlxspec.plan.cost_curve import CostCurve, chip_curve
from mlxspec.plan.policy import trees_pay


@pytest.mark.parametrize(
    ("chip", "pay"),
    [("H200-like", True), ("CPU fp32 OpenBLAS", True), ("M4 Pro", False), ("linear", False)],
)
def test_trees_pay_where_rows_are_nearly_free(chip: str, pay: bool) -> None:
    assert trees_pay(chip_curve(chip)) is pay


def test_a_model_that_verifies_no_drafts_gets_no_trees() -> None:
    assert not trees_pay(CostCurve([(1, 1)]))
