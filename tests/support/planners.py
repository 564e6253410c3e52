"""The default planner with fixed costs."""

from __future__ import annotations

from typing import Any

from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.suffix_source import SuffixSource


def suffix_planner(curve: CostCurve, sync_overhead: float = 0.02, **options: Any) -> Planner:
    """Return a planner with a suffix source."""
    branching = options.pop("branching", True)
    source = SuffixSource(**options)
    return Planner(FixedCosts(curve, sync_overhead), [source], branching=branching)
