"""Quantised and bounded caches give mlx-lm's output, also for trees."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from mlxspec.engine.capability import check_quantization
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.target import Capability
from mlxspec.errors import OptionError
from tests.support.architectures import ARCHITECTURES, Architecture
from tests.support.drafters import HostileDrafter
from tests.support.examples import examples
from tests.support.harness import assert_same_output, run

pytestmark = pytest.mark.slow

PROMPTS = {"one token": [5], "short": [7, 3, 9, 3], "long": [(7 * i * i) % 64 for i in range(37)]}
LENGTH = examples(44, long=60)  # longer than all sizes and starts but the last
WIDE_HEADS = {"head_dim": 32}  # the smallest group of a quantised cache


def model_of(name: str, **config: object) -> nn.Module:
    known = ARCHITECTURES[name]
    return Architecture(known.capability, known.model_type, "", {**known.config, **config}).model()


def assert_same_as_mlx_lm(model: nn.Module, capability: Capability, options: CacheOptions) -> None:
    settings = vars(options)
    for seed, prompt in enumerate(PROMPTS.values()):
        steps = list(generate_step(mx.array(prompt), model, max_tokens=LENGTH, **settings))
        expected = [token for token, _ in steps]
        hostile = HostileDrafter(expected, 64, 5, seed)
        outcome = run(
            model, prompt, hostile, max_tokens=LENGTH, capability=capability, cache=options
        )
        assert_same_output(model, prompt, expected, outcome.tokens)
        logprobs = mx.stack([logprobs for _, logprobs in steps])
        assert mx.max(mx.abs(outcome.logprobs - logprobs)).item() < 1e-4
        assert outcome.accepted > LENGTH / 2


@pytest.mark.parametrize("start", [0, 10, 39, 5000])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_cache_is_quantised_between_the_same_tokens(bits: int, start: int) -> None:
    model = model_of("llama3", **WIDE_HEADS)
    assert_same_as_mlx_lm(model, Capability.TREE, CacheOptions(bits, 32, start))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("start", [10, 39])
def test_a_quantised_cache_beside_state_that_is_replayed(start: int) -> None:
    model = model_of("qwen3_next", **WIDE_HEADS)
    assert_same_as_mlx_lm(model, Capability.REPLAY, CacheOptions(8, 32, start))


@pytest.mark.parametrize("size", [8, 24, 33, 200])
def test_a_bounded_cache_shows_drafts_its_first_tokens(size: int) -> None:
    model = ARCHITECTURES["mixtral"].model()
    assert_same_as_mlx_lm(model, Capability.TREE, CacheOptions(max_kv_size=size))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kv_bits": 7}, "kv_bits is 7: choose one of 2, 3, 4, 5, 6, 8"),
        ({"kv_group_size": 48}, "kv_group_size is 48: choose one of 32, 64, 128"),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1"),
        ({"max_kv_size": 4}, "max_kv_size is 4: choose 8 or more"),
    ],
)
def test_options_outside_their_range_are_named(options: dict[str, int], part: str) -> None:
    with pytest.raises(OptionError, match=part):
        CacheOptions(**options)


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("gemma3", {"kv_bits": 8}, "RotatingKVCache.*leave out kv_bits"),
        ("qwen3", {"kv_bits": 8, "max_kv_size": 16}, "leave out kv_bits, or max_kv_size"),
        ("llama3", {"kv_bits": 8}, "kv_bits 8 with kv_group_size 64 does not suit"),
    ],
)
def test_a_cache_that_cannot_be_quantised_is_refused_before_anything_runs(
    name: str, options: dict[str, int], part: str
) -> None:
    with pytest.raises(OptionError, match=part):
        check_quantization(ARCHITECTURES[name].model(), CacheOptions(**options))
