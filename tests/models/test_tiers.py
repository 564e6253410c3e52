"""Tiers are found by trying; every tier decodes what mlx-lm decodes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlxspec.models.tiers import Tier, cache_tier, find_tier

from ..decoding.drafters import HostileDrafter
from ..decoding.harness import assert_same_output, run
from .random_models import (
    GPT_2,
    LLAMA_3_SCALING,
    MAMBA_2,
    MINISTRAL_SCALING,
    SLIDING_COHERE_2,
    SLIDING_GEMMA_3,
    YARN_SCALING,
    random_model,
    scaled_rope,
)

MODELS = {
    "llama": (Tier.TREE, "llama", {}),
    "llama, linear RoPE": (Tier.TREE, "llama", scaled_rope("linear", factor=2.0)),
    "llama, llama3 RoPE": (Tier.TREE, "llama", LLAMA_3_SCALING),
    "llama, YaRN": (Tier.TREE, "llama", YARN_SCALING),
    "qwen3": (Tier.TREE, "qwen3", {"tie_word_embeddings": True}),
    "mixtral": (Tier.TREE, "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # Its base depends on an integer offset.
    "llama, dynamic RoPE": (Tier.CHAIN, "llama", scaled_rope("dynamic", factor=4.0)),
    # Scales queries by position beyond 8192, outside its RoPE.
    "ministral3": (Tier.CHAIN, "ministral3", MINISTRAL_SCALING),
    # Takes positions from a table.
    "gpt2": (Tier.CHAIN, "gpt2", GPT_2),
    # Sliding windows live in rotating caches.
    "gemma3": (Tier.CHAIN, "gemma3_text", SLIDING_GEMMA_3),
    "cohere2": (Tier.CHAIN, "cohere2", SLIDING_COHERE_2),
    # A state-space model's state cannot be cut back.
    "mamba2": (Tier.PLAIN, "mamba2", MAMBA_2),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_tier_decodes_what_mlx_lm_decodes(name: str) -> None:
    tier, model_type, config = MODELS[name]
    model = random_model(model_type, **config)
    assert find_tier(model) is tier
    prompt, length = [7, 3, 9, 3], 40  # beyond the sliding windows of 16
    expected = [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=length)]
    hostile = HostileDrafter(expected, 64, 5, seed=1)
    outcome = run(model, prompt, hostile, max_tokens=length, tier=tier)
    assert (outcome.accepted > 0) == (tier is not Tier.PLAIN)
    assert_same_output(model, prompt, expected, outcome.tokens)


def test_caches_alone_say_what_is_possible_without_a_forward() -> None:
    assert cache_tier(random_model("ministral3", **MINISTRAL_SCALING)) is Tier.TREE
    assert cache_tier(random_model("gemma3_text", **SLIDING_GEMMA_3)) is Tier.CHAIN
    assert cache_tier(random_model("mamba2", **MAMBA_2)) is Tier.PLAIN
