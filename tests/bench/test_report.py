"""Reports of several runs, against values worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from mlxspec.bench.measure import (
    Difference,
    MeasuredPrompt,
    Report,
    TimedRun,
    bench_report,
    exactness,
    verdict,
)
from mlxspec.generation.response import SpeculationStats

FACTS = {
    "model": {"name": "tiny", "parameters": 1234567, "bits_per_weight": 4.5, "dtype": "float16"},
    "machine": {
        **{"chip": "M9", "device": "gpu", "system": "macOS"},
        **dict.fromkeys(("mlx", "mlx_lm", "mlxspec", "python"), "1.0"),
    },
    "settings": {"max_tokens": 10, "repeats": 2},
}


def run(rate: float) -> TimedRun:
    stats = SpeculationStats(steps=4, rows=10, drafted=6, accepted=6, emitted=10)
    return TimedRun(tuple(range(10)), "text", 0.5, 10 / rate, stats)


def measured(
    rates: dict[str, list[float]],
    category: str = "code",
    differences: dict[str, list[Difference]] | None = None,
) -> MeasuredPrompt:
    return MeasuredPrompt(
        category=category,
        runs={name: [run(r) for r in of] for name, of in rates.items()},
        differences={key: [] for key in rates} | (differences or {}),
    )


def report(*prompts: MeasuredPrompt) -> Report:
    return bench_report(prompts, FACTS)


def test_a_ratio_is_the_median_of_ratios_taken_run_by_run() -> None:
    # In both second runs the machine was three times slower.
    result = report(measured({"plain": [30, 10, 30], "fast": [60, 20, 90]}))
    assert result["decoders"]["fast"]["speedup"] == pytest.approx(2)
    assert result["decoders"]["fast"]["tokens_per_second"] == pytest.approx(60)
    assert result["decoders"]["plain"]["speedup"] == 1


def test_over_all_every_category_has_the_same_weight() -> None:
    result = report(
        measured({"plain": [10], "fast": [80]}, "code"),
        measured({"plain": [10], "fast": [20]}, "code"),
        measured({"plain": [10], "fast": [9]}, "talk"),
    )
    assert result["categories"]["code"]["decoders"]["fast"]["speedup"] == pytest.approx(4)
    assert result["categories"]["code"]["prompts"] == 2
    assert result["decoders"]["fast"]["speedup"] == pytest.approx(math.sqrt(4 * 0.9))


def test_speeds_are_against_plain_decoding_and_mlx_lm() -> None:
    rates = {"plain": [10.0], "mlx-lm": [20.0], "fast": [40.0]}
    result = report(measured(rates))
    assert result["decoders"]["fast"]["vs_mlx_lm"] == pytest.approx(2)
    result = report(measured({name: of * 2 for name, of in rates.items()}))
    assert verdict(result) == "fast is fastest: 4.00 times the speed of plain."


def test_the_spread_is_that_of_the_repeats_speed_ups() -> None:
    result = report(
        measured({"plain": [10, 10], "fast": [20, 30]}, "code"),
        measured({"plain": [10, 20], "fast": [80, 120]}, "code"),
        measured({"plain": [10, 10], "fast": [10, 40]}, "talk"),
    )
    fast = result["decoders"]["fast"]
    # The first repeat has √(2 × 8) for code and 1 for talk, the second √(3 × 6) and 4.
    assert fast["lowest"] == pytest.approx(2)
    assert fast["highest"] == pytest.approx(math.sqrt(math.sqrt(18) * 4))
    assert [result["decoders"]["plain"][name] for name in ("lowest", "highest")] == [1, 1]


def test_nothing_is_fastest_within_the_scatter() -> None:
    rates = {"plain": [10, 10, 10], "auto": [20, 22, 21], "lookup": [19, 20, 20], "wide": [8, 8, 8]}
    assert verdict(report(measured(rates))) == (
        "auto (default) had 2.10 times the speed of plain; within the scatter of the repeats, "
        "lookup had as much."
    )
    rates["lookup"] = [19, 19.9, 19]
    assert verdict(report(measured(rates))) == (
        "auto (default) is fastest: 2.10 times the speed of plain."
    )
    slower = {"plain": [10, 10], "auto": [11, 8]}
    assert verdict(report(measured(slower))) == (
        "plain had 1.00 times the speed of plain; within the scatter of the repeats, "
        "auto (default) had as much."
    )


def test_one_repeat_shows_no_scatter() -> None:
    result = bench_report(
        [measured({"plain": [10], "auto": [20]})],
        FACTS | {"settings": {"max_tokens": 10, "repeats": 1}},
    )
    assert verdict(result) == (
        "auto (default) had 2.00 times the speed of plain in one repeat, which shows no scatter."
    )


def test_one_wrong_output_takes_its_category_s_speedup_and_that_over_all() -> None:
    rates = {"plain": [10.0], "fast": [40.0], "wrong": [90.0]}
    result = report(measured(rates), measured(rates, "talk", {"wrong": [Difference(3, 2.5, 1e-4)]}))
    code, talk = (category["decoders"] for category in result["categories"].values())
    assert code["wrong"]["speedup"] == pytest.approx(9)
    assert [of["wrong"]["speedup"] for of in (result["decoders"], talk)] == [None, None]
    everywhere = (result["decoders"], code, talk)
    assert all(of["fast"]["speedup"] == pytest.approx(4) for of in everywhere)
    (line,) = result["wrong"]
    assert line == (
        "wrong differs from plain decoding on prompt 2 (talk) at token 3: "
        "the gap is 2.5, but rounding explains only 0.0001"
    )
    assert "90" not in verdict(result)


def test_near_ties_are_counted_and_keep_the_speedup() -> None:
    ties = [Difference(3, 2e-5), Difference(5, 3e-5)]
    result = report(measured({"plain": [10], "fast": [20]}, differences={"fast": ties}))
    fast = result["decoders"]["fast"]
    assert fast["speedup"] == pytest.approx(2)
    assert result["wrong"] == []
    assert result["exactness"] == {"outputs": 1, "differ": 1, "largest_margin": 3e-5}
    assert exactness(result) == (
        "0 of 1 outputs are identical to plain decoding's, in float16. Where an output diverges "
        "from plain decoding's, the two tokens' logits are at most 3e-05 apart."
    )


def test_outputs_are_counted_by_prompt_and_decoder_without_plain() -> None:
    rates = {"plain": [10.0], "fast": [20.0], "wide": [20.0]}
    early = {"fast": [Difference(3, math.inf)], "plain": [Difference(4, 1e-5)]}
    result = report(measured(rates), measured(rates, differences=early))
    assert result["exactness"] == {"outputs": 4, "differ": 1, "largest_margin": None}
    assert exactness(result) == ("3 of 4 outputs are identical to plain decoding's, in float16.")


def test_if_plain_decoding_contradicts_itself_nothing_is_faster() -> None:
    result = report(
        measured({"plain": [10, 10], "fast": [20, 20]}, differences={"plain": [Difference(1, 9.0)]})
    )
    assert result["decoders"]["fast"]["speedup"] is None
    assert "No speed-up" in verdict(result)


def test_plain_decoding_alone_has_no_speedup() -> None:
    assert verdict(report(measured({"plain": [10]}))) == "Only plain decoding was measured."


def test_an_output_that_ends_early_has_no_margin_in_json() -> None:
    early = Difference(3, math.inf)
    result = report(measured({"plain": [10], "fast": [20]}, differences={"fast": [early]}))
    assert json.loads(json.dumps(result, allow_nan=False))["exactness"]["largest_margin"] is None
    assert "ended before the other" in result["wrong"][0]
