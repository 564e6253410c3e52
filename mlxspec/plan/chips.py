"""Cost curves of chips, published or estimated; ``chips.json`` names each one's source."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import OptionError
from .cost_curve import CostCurve


def chip_names() -> list[str]:
    """The chips whose curves come with the package."""
    return list(_chips())


def chip_curve(name: str) -> CostCurve:
    """The verify cost of a chip.

    Raises:
        OptionError: there is no curve of that name.
    """
    chip = _chip(name)
    return CostCurve(zip(chip["rows"], chip["cost"], strict=True))


def chip_source(name: str) -> str:
    """Where the figures of a chip come from, and which of them are estimates.

    Raises:
        OptionError: there is no curve of that name.
    """
    return str(_chip(name)["source"])


def _chip(name: str) -> dict[str, Any]:
    try:
        return _chips()[name]
    except KeyError:
        raise OptionError(
            f"no cost curve for the chip {name!r}: choose one of {', '.join(chip_names())}"
        ) from None


@cache
def _chips() -> dict[str, dict[str, Any]]:
    text = files(__package__).joinpath("chips.json").read_text(encoding="utf-8")
    chips: dict[str, dict[str, Any]] = json.loads(text)["chips"]
    return chips
