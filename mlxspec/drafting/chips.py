"""Cost curves of chips, published or estimated; ``chips.json`` names each one's source."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
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

# Apple's chips by name, with their memory bandwidth in GB/s as Apple gives it; of several
# variants the fastest one's.
_BANDWIDTH = {
    **{"M1": 68, "M1 Pro": 200, "M1 Max": 400, "M1 Ultra": 800},
    **{"M2": 100, "M2 Pro": 200, "M2 Max": 400, "M2 Ultra": 800},
    **{"M3": 100, "M3 Pro": 150, "M3 Max": 400, "M3 Ultra": 819},
    **{"M4": 120, "M4 Pro": 273, "M4 Max": 546},
    **{"M5": 153, "M5 Pro": 307, "M5 Max": 614},
}
# Generations whose GPUs are of one family.
_FAMILIES = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
_APPLE = re.compile(r"m([1-9][0-9]?)(pro|max|ultra)?")


@dataclass(frozen=True)
class Chip:
    """What is known of a chip.

    Attributes:
        name: as it is shown.
        curve: its verify cost.
        source: where the figures come from.
        estimated: the numbers of rows of the curve's points that nobody has measured.
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
        if not self.estimated:
            return ""
        rows = [str(rows) for rows in self.estimated]
        *first, last = rows
        return f"{ESTIMATED} estimated at {', '.join(first)}{' and ' if first else ''}{last} rows"

    def is_estimate(self, rows: int) -> bool:
        """Whether the cost at ``rows`` rows rests on an estimated point."""
        known = self.curve.rows
        after = min(bisect_left(known, rows), len(known) - 1)
        points = (
            {known[after]} if known[after] == rows else {known[max(after - 1, 0)], known[after]}
        )
        return not points.isdisjoint(self.estimated)


def chip_names() -> list[str]:
    """The chips whose curves come with the package."""
    return list(_chips())


def chips_without_curve() -> list[str]:
    """Apple's chips that no curve is known of."""
    return [name for name in _BANDWIDTH if name not in _chips()]


def known_chip(name: str) -> Chip:
    """A chip by its name, in whatever case and with or without spaces or "Apple" before it.

    Raises:
        OptionError: there is no curve of that name; it names the nearest ones.
    """
    wanted = _plain(name)
    for known, chip in _chips().items():
        if _plain(known) == wanted:
            curve = CostCurve(zip(chip["rows"], chip["cost"], strict=True))
            return Chip(known, curve, str(chip["source"]), tuple(chip.get("estimated", ())))
    apple = _APPLE.fullmatch(wanted)
    if apple is None:
        raise OptionError(
            f"no cost curve for the chip {name!r}: choose one of {', '.join(chip_names())}, or "
            "give a curve of your own with --curve FILE"
        )
    first, second = nearest_chips(name)[:2]
    raise OptionError(
        f"no cost curve for the chip {name!r}: the nearest known ones are {first} and {second}; "
        "with that machine, mlxspec calibrate MODEL --json > curve.json measures one for "
        f"--curve curve.json, and {REPORT_FORM} takes it, so that it comes with mlxspec"
    )


def chip_curve(name: str) -> CostCurve:
    """The verify cost of a chip; raises as :func:`known_chip`."""
    return known_chip(name).curve


def nearest_chips(name: str) -> list[str]:
    """Apple's chips with known curves, those first that are likely to have a similar one.

    First come those whose GPU is of the same family, or of a near one. Of these the first ones
    are near in generation and memory bandwidth: the weights are read once a step, while the
    arithmetic grows with the rows.

    Args:
        name: of a chip of Apple's, such as "M4 Max".
    """
    generation, bandwidth = _generation(name), _bandwidth(name)

    def distance(known: str) -> tuple[int, float]:
        family = abs(_family(_generation(known)) - _family(generation))
        octaves = abs(math.log2(_bandwidth(known) / bandwidth))
        return family, abs(_generation(known) - generation) + octaves

    return sorted(
        (known for known in chip_names() if _APPLE.fullmatch(_plain(known))), key=distance
    )


def _plain(name: str) -> str:
    """A chip's name as it is compared."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("apple")


def _generation(name: str) -> int:
    apple = _APPLE.fullmatch(_plain(name))
    assert apple is not None
    return int(apple[1])


def _family(generation: int) -> int:
    return _FAMILIES.get(generation, max(_FAMILIES.values()))


def _bandwidth(name: str) -> float:
    """GB/s; of a chip that is not known, what the newest one of its tier has."""
    by_name = {_plain(chip): bandwidth for chip, bandwidth in _BANDWIDTH.items()}
    tier = re.sub(r"^m[0-9]+", "", _plain(name))
    of_tier = [value for chip, value in by_name.items() if re.sub(r"^m[0-9]+", "", chip) == tier]
    return by_name.get(_plain(name), of_tier[-1])


@cache
def _chips() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    chips: dict[str, dict[str, Any]] = json.loads(text)["chips"]
    return chips
