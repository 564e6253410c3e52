"""Capabilities are found by probing, whatever a model's name."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.engine.capability import (
    Capability,
    cache_capability,
    chain_capability,
    examine_joint,
    logits,
    rounding_noise,
)
from mlxspec.engine.joint import JointMode
from mlxspec.engine.loaded_model import LoadedModel
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import HostileDrafter
from tests.support.harness import assert_same_output, examined, run
from tests.support.random_models import LLAMA_3_SCALING, YARN_SCALING, random_model, scaled_rope

ROPES = {
    "plain": (Capability.TREE, {}),
    "linear": (Capability.TREE, scaled_rope("linear", factor=2.0)),
    "llama3": (Capability.TREE, LLAMA_3_SCALING),
    "yarn": (Capability.TREE, YARN_SCALING),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROPES)
def test_every_rope_decodes_what_mlx_lm_decodes(name: str) -> None:
    capability, config = ROPES[name]
    model = random_model("llama", **config)
    assert examined(model)[0] is capability
    prompt, length = [7, 3, 9, 3], 40
    expected = [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=length)]
    hostile = HostileDrafter(expected, 64, 5, seed=1)
    outcome = run(model, prompt, hostile, max_tokens=length, capability=capability)
    assert outcome.accepted > 0
    assert_same_output(model, prompt, expected, outcome.tokens)


def test_caches_alone_say_what_is_possible_without_a_forward() -> None:
    def capability(name: str) -> Capability:
        return cache_capability(make_prompt_cache(ARCHITECTURES[name].model()))

    assert capability("ministral3") is capability("gemma3") is Capability.TREE
    assert capability("llama4") is Capability.CHAIN
    assert capability("mamba2") is capability("falcon_h1") is Capability.REPLAY


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba2", "ArraysCache cannot be trimmed"),
        ("llama4", "ChunkedKVCache can be trimmed, but takes no tree mask"),
        # Scales its queries from position 8192 on, separately from RoPE.
        ("ministral3", "differ from separate branches at position 8187"),
        # Takes positions from a table.
        ("gpt2", "differ from separate branches at position 0"),
    ],
)
def test_the_finding_says_what_keeps_a_model_from_trees(name: str, reason: str) -> None:
    assert reason in examined(ARCHITECTURES[name].model())[1]


def test_a_model_whose_rows_disturb_each_other_verifies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chain_capability(LoadedModel(random_model("llama"))) is Capability.CHAIN
    monkeypatch.setattr(llama, "create_attention_mask", lambda *_, **__: None)  # rows see all rows
    model = random_model("llama")
    assert chain_capability(LoadedModel(model)) is Capability.PLAIN
    assert "than in separate forwards" in examined(model)[1]
    mode, reason = examine_joint(LoadedModel(model), Capability.PLAIN)
    assert mode is JointMode.ALONE
    assert "than in separate forwards" in reason


@pytest.mark.parametrize("name", ["phi3small", "llama3"])
def test_a_fault_does_not_pass_as_rounding(name: str) -> None:
    model = ARCHITECTURES[name].model()
    found = logits(model, (3, 1, 4), make_prompt_cache(model))
    assert rounding_noise(LoadedModel(model)) < 2e-3 * (mx.max(found) - mx.min(found)).item()
    # Joint forwards are found to differ as well.
    alone = examine_joint(LoadedModel(model), Capability.CHAIN)[0] is JointMode.ALONE
    assert alone == (name == "phi3small")
