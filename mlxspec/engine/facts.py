"""What a loaded model is: its size, its caches, and the drafts that it verifies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from .caches import parts
from .capability import Finding, examine
from .costs import model_identity
from .positions import context_length
from .target import vocabulary_size


@dataclass(frozen=True)
class CacheFacts:
    """Caches of one kind.

    Attributes:
        name: of mlx-lm's class.
        count: how many the model has.
        positions: how many a cache holds at most; None where it holds all, or none but state.
        bytes_per_position: of one cache; None for state.
        state_bytes: of one cache, however long the context; None where it grows.
    """

    name: str
    count: int
    positions: int | None = None
    bytes_per_position: int | None = None
    state_bytes: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What ``mlxspec inspect`` shows.

    Attributes:
        type: as in ``config.json``.
        parameters: how many, quantised ones counted as such.
        bits_per_weight: the average in memory, scales included. On the CPU half-precision weights
            and scales have become float32, so it is more than the checkpoint's.
        quantised_layers: how many layers have which bits and group size.
        layers: blocks of the model.
        vocabulary: token ids, those that pad the output layer included.
        context: the longest in tokens, None where the configuration states none.
        caches: by kind.
        finding: the capability of drafts, and why no richer one.
    """

    type: str
    parameters: int
    bits_per_weight: float
    quantised_layers: dict[tuple[int, int], int]
    layers: int
    vocabulary: int
    context: int | None
    caches: tuple[CacheFacts, ...]
    finding: Finding


def facts_of(model: nn.Module) -> ModelFacts:
    """Look a model over and try what drafts it verifies, with a hundred small forwards or so."""
    identity = model_identity(model)
    return ModelFacts(
        type=str(identity["type"]),
        parameters=int(identity["parameters"] or 0),
        bits_per_weight=float(identity["bits_per_weight"] or 0),
        quantised_layers=_quantised_layers(model),
        layers=len(model.layers),
        vocabulary=vocabulary_size(model),
        context=context_length(model),
        caches=_cache_facts(model),
        finding=examine(model),
    )


def _quantised_layers(model: nn.Module) -> dict[tuple[int, int], int]:
    """How many layers have these (bits, group size), the most frequent first."""
    found = Counter(
        (module.bits, module.group_size)
        for module in model.modules()
        if hasattr(module, "bits") and hasattr(module, "group_size")
    )
    return dict(found.most_common())


def _cache_facts(model: nn.Module) -> tuple[CacheFacts, ...]:
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)  # for the shapes; the graph is never evaluated
    kinds = Counter(_facts_of_one(cache) for cache in parts(caches))
    return tuple(
        CacheFacts(name, count, positions, per_position, state)
        for (name, positions, per_position, state), count in kinds.items()
    )


def _facts_of_one(cache: Any) -> tuple[str, int | None, int | None, int | None]:
    name = type(cache).__name__
    if isinstance(cache, ArraysCache):
        return name, None, None, cache.nbytes
    if isinstance(cache, KVCache | RotatingKVCache | ChunkedKVCache):
        positions = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
        return name, positions, cache.nbytes // cache.keys.shape[2], None
    return name, None, None, None
