"""Trial forwards anywhere in a context, on caches that claim to stand further on than they do."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from .step_caches import parts
from .tree_rows import TreeRows

PREFIX = (3, 1, 4)
"""Tokens in front of a trial step."""

_WITH_POSITIONS = (KVCache, RotatingKVCache, ChunkedKVCache)


def can_be_shifted(model: nn.Module) -> bool:
    """Whether a model has positions, and all its caches can claim others than they hold."""
    caches = parts(make_prompt_cache(model))
    return any(isinstance(cache, _WITH_POSITIONS) for cache in caches) and all(
        isinstance(cache, (*_WITH_POSITIONS, ArraysCache)) for cache in caches
    )


def trial_caches(model: nn.Module) -> list[Any]:
    """New caches of a model; :func:`shift` moves them."""

    def on_trial(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(on_trial, cache.caches))
        return ShiftedCache() if isinstance(cache, KVCache | RotatingKVCache) else cache

    return [on_trial(cache) for cache in make_prompt_cache(model)]


def shift(caches: list[Any], positions: int) -> list[Any]:
    """Let trial caches claim to stand so many positions further on; returns them."""
    for cache in parts(caches):
        if isinstance(cache, ShiftedCache):
            cache.base += positions
        elif isinstance(cache, ChunkedKVCache):
            cache.offset += positions
            cache.start_position += positions
    return caches


def filled(caches: list[Any], length: int) -> list[Any]:
    """Trial caches that hold random entries in front of their own, so many in all."""
    key = mx.random.key(0)
    for cache in parts(caches):
        if isinstance(cache, ShiftedCache) and cache.keys is not None:
            for name in ("keys", "values"):
                own = getattr(cache, name)
                shape = (*own.shape[:2], length - own.shape[2], own.shape[3])
                noise = mx.random.normal(shape, own.dtype, key=key)
                setattr(cache, name, mx.concatenate([noise, own], axis=2))
            cache.size = length
    return caches


def logits(model: nn.Module, tokens: tuple[int, ...], caches: list[Any]) -> mx.array:
    """In float32, (len(tokens), vocabulary)."""
    return finite(model(mx.array(tokens)[None], cache=caches)[0].astype(mx.float32))


def finite(logits: mx.array) -> mx.array:
    """Logits that can be subtracted: 0 for tokens that a model rules out."""
    return mx.where(mx.isinf(logits), 0, logits)


def rounding_noise(model: nn.Module) -> float:
    """How far logits of rows computed together lie from those of the rows one by one."""
    tokens = (*PREFIX, 1, 5, 2, 6)
    together, one_by_one = trial_caches(model), trial_caches(model)
    rows = logits(model, tokens, together)
    singles = mx.concatenate([logits(model, (token,), one_by_one) for token in tokens])
    return cast(float, mx.max(mx.abs(rows - singles)).item())


class ShiftedCache:
    """A cache that claims to stand ``base`` positions further on than what it holds.

    It lets a model be tried at long contexts without the memory of one.
    """

    def __init__(self) -> None:
        self.base = 0
        self.size = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.rows: TreeRows | None = None

    @property
    def offset(self) -> int:
        return self.base + self.size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values, self.size = keys, values, keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is not None:
            return self.rows.mask(self.size, window_size)
        return create_attention_mask(N, self.size, return_array, window_size)
