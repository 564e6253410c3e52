"""Recurrent blocks over several sequences' rows."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlxspec.engine.joint import JointStates
from mlxspec.engine.patches import install
from tests.support.architectures import ARCHITECTURES


def running_sums(x: mx.array, scale: float, cache: ArraysCache) -> tuple[mx.array, mx.array]:
    """Run a block whose state is the sum of its rows; x is (sequences, rows, 1)."""
    assert x.ndim == 3
    before = 0 if cache[0] is None else cache[0]
    sums = before + mx.cumsum(scale * x, axis=1)
    cache[0] = sums[:, -1:]
    return sums, x


def test_each_sequence_goes_on_from_its_own_state() -> None:
    caches = [ArraysCache(1) for _ in range(4)]
    for cache, begun in zip(caches, (100, 200, None, 400), strict=True):
        cache[0] = None if begun is None else mx.array([[[float(begun)]]])
    spans = [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 7)]
    x = mx.arange(7, dtype=mx.float32)[None, :, None]
    states = JointStates(caches, spans)
    sums, same = states.run_block(running_sums, (x,), {"scale": 2.0, "cache": states})
    assert sums[0, :, 0].tolist() == [100, 102, 204, 6, 14, 410, 422]
    assert mx.array_equal(same, x)
    assert [cache[0].item() for cache in caches] == [102, 204, 14, 422]


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "falcon_h1"])
def test_a_model_computes_as_before_with_caches_of_its_own(name: str) -> None:
    model = ARCHITECTURES[name].model()
    tokens = mx.array([[3, 1, 4, 1, 5]])
    before = model(tokens, cache=model.make_cache())
    for _ in range(2):  # the second call changes nothing
        install(model)
    assert mx.array_equal(model(tokens, cache=model.make_cache()), before)
