"""Two ranks on one host, with the ring back end, generate what one process generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxspec.bench.measure import first_difference
from mlxspec.engine.sampling import SamplingParams
from mlxspec.engine.target import Capability
from mlxspec.generation.decoder import Decoder
from tests.distributed.conftest import SECONDS, launched
from tests.support.drafters import drafted
from tests.support.harness import NEAR_TIES, assert_same_output, plain
from tests.support.rank import ARCHITECTURE_PROMPT, HYBRIDS, PROMPT, SETTINGS

pytestmark = pytest.mark.slow

QUANTISED_KV = 1e-2
"""The margin of near ties with quantised keys and values."""


@pytest.fixture(scope="module")
def hybrids() -> dict[str, list[int]]:
    """The output of one process for each hybrid model."""
    options: dict[str, Any] = {"max_tokens": 12, "capability": Capability.REPLAY}
    return {
        name: plain(hybrid.model(), ARCHITECTURE_PROMPT, **options)
        for name, hybrid in HYBRIDS.items()
    }


@pytest.fixture(scope="module")
def decoder(small_model: Path) -> Decoder:
    """A decoder in this process."""
    return Decoder(small_model)


@pytest.fixture(scope="module")
def report(small_model: Path, hybrids: dict[str, list[int]]) -> dict[str, Any]:
    """The output of :mod:`tests.support.rank` at rank 0."""
    command = ("-m", "tests.support.rank", str(small_model), json.dumps(hybrids))
    with launched(*command) as launcher:
        output, errors = launcher.communicate(timeout=SECONDS)
    assert errors == ""
    return json.loads(output)


@pytest.mark.parametrize("name", SETTINGS)
def test_output_equals_one_process(name: str, report: dict[str, Any], decoder: Decoder) -> None:
    options = SETTINGS[name].options
    responses = drafted(decoder, PROMPT, SETTINGS["plain"].drafter(), **options)
    expected = [response.token for response in responses]
    sampling = {key: options[key] for key in ("temp", "top_p", "seed") if key in options}
    difference = first_difference(
        decoder.model, PROMPT, expected, report["outputs"][name], SamplingParams(**sampling)
    )
    if difference is not None:
        print(f"first difference at {difference.index}, margin {difference.margin:.2e}")
        assert difference.margin < (QUANTISED_KV if "kv_bits" in options else difference.bound)
        NEAR_TIES.append(difference.margin)


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"plain"}))
def test_drafts_are_accepted_and_rejected(name: str, report: dict[str, Any]) -> None:
    assert 0 < report[name]["accepted"] < report[name]["drafted"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_computes_its_states_again_on_all_ranks(
    name: str, report: dict[str, Any], hybrids: dict[str, list[int]]
) -> None:
    assert report[name]["capability"] == Capability.REPLAY.value
    assert 0 < report[name]["accepted"] < len(hybrids[name]) - 1
    model = HYBRIDS[name].model()
    assert_same_output(model, ARCHITECTURE_PROMPT, hybrids[name], report[name]["tokens"])


def test_ranks_go_on_together_after_an_interrupt(report: dict[str, Any]) -> None:
    # The outputs above were generated after the interrupt.
    assert report["interrupted"] >= 3


def test_heads_that_do_not_divide_are_refused(report: dict[str, Any]) -> None:
    assert "cannot be split into 2 equal parts" in report["unsplittable"]


@pytest.mark.nightly
def test_only_rank_0_prints(small_model: Path, decoder: Decoder) -> None:
    prompt = ",".join(map(str, PROMPT))
    # Plain steps need no measured costs, which would cause a note on a busy machine.
    options = ("--prompt-ids", prompt, "--max-tokens", "8", "--json", "--decoder", "plain")
    command = ("decoder.py", "--model", str(small_model), *options)
    with launched(*command) as launcher:
        output, errors = launcher.communicate(timeout=SECONDS)
    assert errors == ""
    plain = drafted(decoder, PROMPT, SETTINGS["plain"].drafter(), max_tokens=8)
    assert json.loads(output)["tokens"] == [response.token for response in plain]
