"""Cost curves of chips, published or estimated; ``chips.json`` names each one's source."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import OptionError
from .costs import CostCurve

ESTIMATED = "≈"
"""Marks what rests on estimates."""

REPORT_FORM = "https://github.com/mlxspec/mlxspec/issues/new?template=bench-report.yml"
"""Where users send the curves of their machines."""


@dataclass(frozen=True)
class Chip:
    """What is known of a chip.

    Attributes:
        name: as it is shown.
        curve: its verify cost.
        source: where the figures come from.
        estimated: the row counts of the curve's points that are not measured.
    """

    name: str
    curve: CostCurve
    source: str
    estimated: Sequence[int] = ()

    @property
    def label(self) -> str:
        """The name, marked where a part of the curve is an estimate."""
        return f"{self.name} {ESTIMATED}" if self.estimated else self.name

    @property
    def about(self) -> str:
        """Which points are estimates, in a clause; empty where none is."""
        rows = ", ".join(map(str, self.estimated))
        return f"{ESTIMATED} estimated at {rows} rows" if rows else ""


def chip_names() -> list[str]:
    """The chips whose curves come with the package."""
    return list(_known()["chips"])


def nearest_chips() -> dict[str, list[str]]:
    """Apple's chips without a curve, each with the two known chips that are nearest to it."""
    nearest: dict[str, list[str]] = _known()["nearest"]
    return nearest


def known_chip(name: str) -> Chip:
    """A chip by its name, in whatever case and with or without spaces or "Apple" before it.

    Raises:
        OptionError: there is no curve of that name; it names the nearest ones.
    """
    for known, chip in _known()["chips"].items():
        if _plain(known) == _plain(name):
            curve = CostCurve(zip(chip["rows"], chip["cost"], strict=True))
            return Chip(known, curve, chip["source"], tuple(chip.get("estimated", ())))
    for other, (first, second) in nearest_chips().items():
        if _plain(other) == _plain(name):
            raise OptionError(
                f"no cost curve for the chip {name!r}: the nearest known ones are {first} and "
                f"{second}; on that machine, mlxspec calibrate MODEL --json > curve.json measures "
                f"one for --curve curve.json, and {REPORT_FORM} takes it for the next version"
            )
    raise OptionError(
        f"no cost curve for the chip {name!r}: choose one of {', '.join(chip_names())}, or "
        "give a curve of your own with --curve FILE"
    )


def _plain(name: str) -> str:
    """A chip's name as it is compared."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("apple")


@cache
def _known() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = json.loads(text)
    return known
