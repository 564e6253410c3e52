"""The maximum context is the extended one, however a configuration states it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm import stream_generate

from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.engine.model_sizes import context_length, crossings, sparse_crossing
from mlxspec.generation.decoder import Decoder
from mlxspec.models.model import load
from mlxspec.models.model_files import DEMO
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import drafted
from tests.support.random_models import random_model


def scaled(length: int, **scaling: Any) -> dict[str, Any]:
    return {"max_position_embeddings": length, "rope_scaling": scaling}


PUBLISHED = {
    "Qwen 2.5's recipe": (
        131072,
        scaled(32768, type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "YaRN by its newer name": (
        131072,
        {
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
        },
    ),
    "Llama 2 with linear scaling": (16384, scaled(4096, type="linear", factor=4.0)),
    "InternLM 2.5": (65536, scaled(32768, type="dynamic", factor=2.0)),
    # These state the length before the extension.
    "Llama 3.2": (
        131072,
        scaled(131072, rope_type="llama3", factor=32.0, original_max_position_embeddings=8192),
    ),
    "DeepSeek V3": (
        163840,
        scaled(163840, type="yarn", factor=40, original_max_position_embeddings=4096),
    ),
    "gpt-oss": (
        131072,
        scaled(131072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096),
    ),
    "Phi 3": (
        131072,
        scaled(131072, type="longrope", original_max_position_embeddings=4096),
    ),
    "Gemma 3": (
        131072,
        scaled(131072, rope_type="linear", factor=8.0) | {"rope_local_base_freq": 1e4},
    ),
    "a model of images and text": (
        131072,
        {"text_config": scaled(32768, rope_type="yarn", factor=4.0)},
    ),
    # No information.
    "no scaling": (512, {"max_position_embeddings": 512, "rope_scaling": None}),
    "no number": (512, scaled(512, type="yarn", factor="4")),
    "no table": (512, {"max_position_embeddings": 512, "rope_scaling": "yarn"}),
    "no bound": (None, {"max_position_embeddings": 1e30}),
    "nothing": (None, {}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_context_is_the_extended_one(name: str) -> None:
    length, config = PUBLISHED[name]
    model = nn.Module()
    model.args = SimpleNamespace(**config)
    assert context_length(model) == length


@pytest.mark.parametrize("model_type", ["llama3", "youtu_llm", "qwen2_vl"])
def test_wherever_a_model_keeps_its_configuration(model_type: str) -> None:
    assert context_length(ARCHITECTURES[model_type].model()) == 32768


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_prompts_beyond_the_original_context_are_answered(kind: str) -> None:
    model, (_, tokenizer) = random_model("llama", **scaled(32, type=kind, factor=4.0)), load(DEMO)
    prompt = [(7 * i * i + 3 * i) % 61 + 3 for i in range(60)]
    expected = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=30)]
    decoder = Decoder(model, tokenizer)
    responses = drafted(decoder, prompt, PromptLookupDrafter(ngram_max=1), max_tokens=30)
    assert [response.token for response in responses] == expected


def test_crossings_are_what_the_configuration_names_and_powers_of_two() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    model = random_model("llama", max_position_embeddings=100, rope_scaling=scaling)
    assert crossings(model) == [16, 32, 64, 100, 128, 256, 400]
    assert sparse_crossing(model) is None


def test_the_length_where_attention_becomes_sparse_is_whole_blocks_beyond_what_it_picks() -> None:
    def length(**config: Any) -> int | None:
        model = nn.Module()
        model.args = config
        return sparse_crossing(model)

    assert length(index_topk=2048) == 4096
    assert length(index_topk=1) == 32
    nested = {"sparse_block_size": 128, "sparse_topk_blocks": 16, "sparse_local_block": 1}
    assert length(text_config={"sparse_attention_config": nested}) == 4096
    assert length(sparse_block_size=10**12, sparse_topk_blocks=0.5) == 8192
