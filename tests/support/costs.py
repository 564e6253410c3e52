"""Costs that begin with given step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import LiveCosts


def live_costs(times: Mapping[int, Sequence[StepTime]]) -> LiveCosts:
    """Return costs from step times by context length; no file keeps them."""
    return LiveCosts({context: Calibration([*known]) for context, known in times.items()})
