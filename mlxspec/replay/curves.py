"""Verify-cost curves by name, or from a file that ``mlxspec calibrate --json`` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..json_text import load_json
from ..planning.cost_curve import CostCurve

_WIDEST = 1024  # rows; far more than any draft has
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


def read_curve(path: Path) -> CostCurve:
    """Read a curve.

    The file holds the JSON of ``mlxspec calibrate``, or ``{"rows": [1, ...], "cost": [1, ...]}``.

    Raises:
        OptionError: it cannot be read, or holds no curve or several, or one of too many rows.
    """
    try:
        content = load_json(path.read_text(encoding="utf-8-sig"))
        points = _points(content)
    except _UNUSABLE as error:
        raise OptionError(
            f"{path}: no cost curve; write one with mlxspec calibrate MODEL --json"
        ) from error
    widest = max((rows for rows, _ in points), default=0)
    if widest > _WIDEST:
        raise OptionError(
            f"{path}: a cost curve up to {widest} rows; leave out what is beyond {_WIDEST}"
        )
    return CostCurve(points)


def _points(content: Any) -> list[tuple[int, float]]:
    if "curves" in content:
        (content,) = content["curves"]
    if "times" in content:
        return [(int(time["rows"]), float(time["cost"])) for time in content["times"]]
    rows, costs = content["rows"], content["cost"]
    return [(int(row), float(cost)) for row, cost in zip(rows, costs, strict=True)]
