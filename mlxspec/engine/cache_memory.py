"""What a model's caches take: their kinds, and how each grows with the context."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from .caches import parts
from .params import CacheOptions


@dataclass(frozen=True)
class CacheKind:
    """Caches of one model that grow alike.

    Attributes:
        name: the class.
        count: how many there are.
        positions: how many one holds at most; None where it holds all, or is a state.
        bytes_per_position: what one position takes in one cache, for a kind that grows.
        state_bytes: the size of one cache, for a kind that stays the same however long the
            context is.
    """

    name: str
    count: int
    positions: int | None
    bytes_per_position: int | None
    state_bytes: int | None


def cache_kinds(
    model: nn.Module, options: CacheOptions | None = None, quantized: bool = False
) -> list[CacheKind]:
    """A model's caches by their kinds.

    The graph of a small forward is built for the shapes and never evaluated.

    Args:
        model: an mlx-lm model.
        options: of the caches.
        quantized: the caches as they are once they have been quantised as the options say.
    """
    options = options or CacheOptions()
    caches = make_prompt_cache(model, options.max_kv_size)
    model(mx.array([[0]]), cache=caches)
    if quantized:
        maybe_quantize_kv_cache(caches, 0, options.kv_group_size, options.kv_bits)
    kinds = Counter(map(_kind_of, parts(caches)))
    return [replace(kind, count=count) for kind, count in kinds.items()]


def _kind_of(cache: Any) -> CacheKind:
    kind = CacheKind(type(cache).__name__, 1, None, None, None)
    if isinstance(cache, ArraysCache):
        return replace(kind, state_bytes=cache.nbytes)
    if isinstance(cache, QuantizedKVCache):
        return replace(kind, bytes_per_position=cache.nbytes // cache.keys[0].shape[2])
    if isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache):
        positions = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
        each = cache.nbytes // cache.keys.shape[2]
        return replace(kind, positions=positions, bytes_per_position=each)
    return kind
