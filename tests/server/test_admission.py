"""The estimated memory of a request covers its caches and is not much higher."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlxspec
from mlxspec.cache_files import cache_directory
from mlxspec.engine.heads import TrainedHead
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.params import CacheOptions
from mlxspec.server import served_model
from mlxspec.server.served_model import CacheMemory
from tests.support import heads
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import endless_tokenizer

# Full, sliding-window and recurrent caches; other models combine these.
NAMES = [
    *("llama3", "gemma3", "lfm2"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "mamba2",
            "deepseek_v32",
            "llama4",
            "recurrent_gemma",
            "qwen3_next",
            "gemma4",
            "jamba",
        )
    ),
]


def random_tokens(n: int) -> list[int]:
    return random.Random(n).choices(range(3, 63), k=n)


def taken(model: nn.Module | LoadedModel, n: int, **options: Any) -> int:
    """Return the bytes of a session after its second turn."""
    decoder, session = mlxspec.PromptLookupDecoder(model, endless_tokenizer()), mlxspec.Session()
    prompt = random_tokens(n)
    for end in (n // 2, n):
        for _ in decoder.stream(prompt[:end], 8, session=session, **options):
            pass
    return session.nbytes


def wide(name: str) -> nn.Module:
    """Return a model whose keys and values can be quantised."""
    config = {**ARCHITECTURES[name].config, "head_dim": 32}
    return replace(ARCHITECTURES[name], config=config).model()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_what_caches_take(name: str) -> None:
    model = ARCHITECTURES[name].model()
    memory = CacheMemory(LoadedModel(model))
    slack = memory.bytes_for(0)  # the growth step of caches, and all states
    for n in (20, 300, 1500):
        real = taken(model, n)
        assert real <= memory.bytes_for(n + 8) <= 1.05 * real + slack
    growth = memory.bytes_for(20_000) - memory.bytes_for(10_000)
    if name == "mamba2":
        assert growth == 0
    if name == "llama3":
        assert growth == pytest.approx(10_000 * real / 1536, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("make_head", [heads.eagle3, heads.dflash])
@pytest.mark.parametrize("options", [{}, {"kv_bits": 8, "quantized_kv_start": 0}])
def test_the_caches_of_a_head_are_a_part_of_the_estimate(
    make_head: Callable[..., Any], options: dict[str, int]
) -> None:
    model = wide("qwen3")
    trained = TrainedHead(make_head(model)[1], model)
    caches = {"kv_group_size": 32, "prefill_step_size": 64, **options}
    with_head, alone = (
        CacheMemory(one, CacheOptions(**caches))
        for one in (trained.new_model(), LoadedModel(model))
    )
    for n in (100, 1500):
        real = taken(trained.new_model(), n, **caches)
        assert real <= with_head.bytes_for(n + 8)
    growth = [memory.bytes_for(9000) - memory.bytes_for(8000) for memory in (with_head, alone)]
    layers, own = len(trained.head.make_cache()), 2 * 2 * 8 * 4  # 2 heads of 8 in float32
    assert growth[0] - growth[1] == 1000 * layers * own


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0, "prefill_step_size": 64},
        {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 700, "prefill_step_size": 64},
        {"max_kv_size": 64, "prefill_step_size": 128},
    ],
)
def test_options_that_save_memory_are_taken_into_account(options: dict[str, int]) -> None:
    model = wide("qwen3")
    memory, plain = (
        CacheMemory(LoadedModel(model), one) for one in (CacheOptions(**options), CacheOptions())
    )
    for n in (100, 1500):
        real = taken(model, n, **options)
        assert real <= memory.bytes_for(n + 8)
    start = options.get("quantized_kv_start", 0)
    if not start:
        assert memory.bytes_for(n + 8) <= 1.05 * real + memory.bytes_for(0)
    assert memory.bytes_for(50_000) < 0.5 * plain.bytes_for(50_000)


@pytest.mark.slow
def test_the_memory_of_a_forward_is_measured_with_few_rows() -> None:
    model = ARCHITECTURES["llama3"].model()
    estimates, found = [], []
    # The peak varies by a few percent, even at the median: it depends on how far MLX's thread lags
    # behind the one that frees.
    for _ in range(9):
        mx.synchronize()
        mx.reset_peak_memory()
        before, real = mx.get_active_memory(), taken(model, 130, prefill_step_size=64)
        found.append(mx.get_peak_memory() - before - real)
        shutil.rmtree(cache_directory() / "forward_memory", ignore_errors=True)
        estimates.append(CacheMemory(LoadedModel(model)).forward_bytes(130, rows=64))
    assert 0.1 * median(estimates) < median(found) < 1.05 * median(estimates)


def test_the_memory_of_a_forward_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, bytes_found = ARCHITECTURES["llama3"].model(), [(1000, 2.5), (3, 0.0)]
    shutil.rmtree(cache_directory() / "forward_memory", ignore_errors=True)
    monkeypatch.setattr(served_model, "forward_memory", lambda *_: bytes_found.pop(0))
    for _ in range(2):  # like after a restart
        assert CacheMemory(LoadedModel(model)).forward_bytes(100, rows=2) == 2 * (1000 + 250)
    window = CacheMemory(LoadedModel(model), CacheOptions(max_kv_size=64))
    assert window.forward_bytes(100, rows=2) == 6
    assert not bytes_found
    shutil.rmtree(cache_directory() / "forward_memory")
