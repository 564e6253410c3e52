"""Comparison of policies on recorded outputs."""

import pytest

from mlxspec.bench.policies import AUTO, POLICIES, policies_with_memory
from mlxspec.bench.prompts import Completion, chosen
from mlxspec.bench.replay import compare
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.errors import OptionError

OUTPUT = list(range(100, 160))
TWICE = [Completion("a", [prompt], 1, OUTPUT) for prompt in (1, 2)]
CURVES = {
    "flat": CostCurve([(1, 1), (64, 1.1)]),
    "linear": CostCurve([(1, 1), (64, 64)]),
}


def test_a_memory_knows_an_output_that_was_there_before() -> None:
    reports = compare(TWICE, b"", {AUTO: POLICIES[AUTO], **policies_with_memory("1M")}, CURVES)
    assert reports["flat"]["auto"]["tokens_per_step"] == 1  # nothing in it repeats
    assert reports["flat"]["memory 1M"]["tokens_per_step"] > 1.5
    assert reports["linear"]["memory 1M"]["speedup"] >= 0.98


def test_every_policy_is_replayed_on_every_chip() -> None:
    shares: list[float] = []
    reports = compare(
        TWICE, b"", chosen("prompt-lookup,auto", POLICIES), CURVES, on_progress=shares.append
    )
    assert shares == pytest.approx([turn / 8 for turn in range(1, 9)])
    assert {chip: list(by_name) for chip, by_name in reports.items()} == {
        chip: ["prompt-lookup", "auto"] for chip in CURVES
    }


@pytest.mark.parametrize("name", ["plain", "lookahead", "warp"])
def test_for_an_unknown_decoder_the_known_ones_are_named(name: str) -> None:
    with pytest.raises(OptionError, match=f"there is no decoder '{name}': choose from auto, "):
        chosen(name, POLICIES)
