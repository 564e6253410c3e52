"""Verify-cost curves by name, or from a file that ``mlxspec calibrate --json`` has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..planning.cost_curve import CostCurve


def read_curve(path: Path) -> CostCurve:
    """Read a curve.

    The file holds the JSON of ``mlxspec calibrate``, or ``{"rows": [1, ...], "cost": [1, ...]}``.

    Raises:
        OptionError: it cannot be read, or holds no curve or several.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        points = _points(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"{path}: no cost curve; write one with mlxspec calibrate MODEL --json"
        ) from error
    return CostCurve(points)


def _points(content: Any) -> list[tuple[int, float]]:
    if "curves" in content:
        (content,) = content["curves"]
    if "times" in content:
        return [(int(time["rows"]), float(time["cost"])) for time in content["times"]]
    rows, costs = content["rows"], content["cost"]
    return [(int(row), float(cost)) for row, cost in zip(rows, costs, strict=True)]
