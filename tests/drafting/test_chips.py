"""Cost curves of known chips, and the error for unknown ones."""

from __future__ import annotations

import pytest

from mlxspec.drafting.chips import (
    chip_names,
    known_chip,
    nearest_chips,
)
from mlxspec.errors import OptionError


def test_published_curves_have_a_source_and_rise() -> None:
    assert "M4 Pro" in chip_names()
    for name in chip_names():
        chip = known_chip(name)
        assert chip.name == name
        assert chip.curve.table[1:] == sorted(chip.curve.table[1:])
        assert chip.source
    assert known_chip("M4 Pro").curve(8) == 2.69


def test_a_source_that_speaks_of_estimates_says_at_which_rows() -> None:
    for name in chip_names():
        chip = known_chip(name)
        assert bool(chip.estimated) is ("estimate" in chip.source)
        assert set(chip.estimated) <= set(chip.curve.rows) - {1}


def test_what_is_estimated_is_said() -> None:
    chip = known_chip("M4 Pro")  # measured up to 8 rows, estimated from 12 on
    assert chip.about == "≈ estimated at 12, 15, 16, 32 rows"
    assert known_chip("M3 Max").about == ""


@pytest.mark.parametrize("name", ["m4 pro", "M4Pro", "Apple M4 Pro", "apple-m4-PRO", " M4  Pro "])
def test_a_chip_is_found_however_its_name_is_written(name: str) -> None:
    assert known_chip(name).name == "M4 Pro"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("M1", ["M2 Pro"]),
        ("M1 Max", ["M2 Pro"]),
        ("M2 Ultra", ["M2 Pro", "M3 Ultra"]),
        ("M3 Pro", ["M3 Max", "M4 Pro"]),
        ("M4", ["M4 Pro"]),
        ("M4 Max", ["M4 Pro", "M3 Max"]),
        ("M5", ["M5 Max"]),
        ("M5 Pro", ["M5 Max"]),
    ],
)
def test_a_chip_without_a_curve_has_the_nearest_of_its_family_named(
    name: str, nearest: list[str]
) -> None:
    assert nearest_chips()[name][: len(nearest)] == nearest
    with pytest.raises(OptionError) as caught:
        known_chip(name)
    message = str(caught.value)
    assert f"{name!r}: the nearest known chips are {nearest[0]} and " in message
    assert "mlxspec calibrate MODEL --json" in message
    assert "--curve" in message


def test_for_an_unknown_chip_all_curves_are_named() -> None:
    with pytest.raises(OptionError, match=r"'RTX 4090': choose one of M2 Pro, .*linear"):
        known_chip("RTX 4090")
    with pytest.raises(OptionError, match="'': choose one of"):
        known_chip("")


def test_a_chip_of_apple_s_has_a_curve_or_is_among_those_without() -> None:
    assert {"M1", "M4 Max"} <= {*nearest_chips()}
    assert not {*nearest_chips()} & {*chip_names()}
    for name, known in nearest_chips().items():
        with pytest.raises(OptionError, match=f"nearest known chips are {known[0]} and {known[1]}"):
            known_chip(name)
