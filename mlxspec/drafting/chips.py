"""The cost curves of chips, measured or estimated.

``chips.json`` has them, with the source of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import OptionError
from .cost_curve import CostCurve

ESTIMATED = "≈"
"""The mark for estimates."""


@dataclass(frozen=True)
class Chip:
    """A chip and its cost curve.

    Attributes:
        name: the name to show.
        curve: the verify cost by rows.
        source: a text that says where the figures come from.
        estimated: the numbers of rows whose cost has not been measured.
    """

    name: str
    curve: CostCurve
    source: str
    estimated: Sequence[int] = ()

    @property
    def about(self) -> str:
        """A clause that names the estimated points; empty if there are none."""
        rows = ", ".join(map(str, self.estimated))
        return f"{ESTIMATED} estimated at {rows} rows" if rows else ""


def chip_names() -> list[str]:
    """The names of the chips with a built-in curve."""
    return list(_known()["chips"])


def nearest_chips() -> dict[str, list[str]]:
    """Apple's chips without a curve, each with the names of the two nearest chips that have one."""
    nearest: dict[str, list[str]] = _known()["nearest"]
    return nearest


def known_chip(name: str) -> Chip:
    """Find a chip by name, ignoring case, spaces and a leading "Apple".

    Raises:
        OptionError: there is no curve for this name; the message names the nearest chips.
    """
    for known, chip in _known()["chips"].items():
        if _plain(known) == _plain(name):
            curve = CostCurve(zip(chip["rows"], chip["cost"], strict=True))
            return Chip(known, curve, chip["source"], tuple(chip.get("estimated", ())))
    choice = f"choose one of {', '.join(chip_names())}"
    for other, nearest in nearest_chips().items():
        if _plain(other) == _plain(name):
            choice = f"the nearest known chips are {' and '.join(nearest)}"
    raise OptionError(
        f"no cost curve for the chip {name!r}: {choice}; on a machine with that chip, mlxspec "
        "calibrate MODEL --json > curve.json measures a curve for --curve curve.json"
    )


def _plain(name: str) -> str:
    """Normalise a chip's name for comparison."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("apple")


@cache
def _known() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads(
        files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    )
    return known
