"""A model's context length, the positions where its rules may change, and its caches' memory.

The first part reads the model's configuration. :func:`cache_kinds` examines the caches that a small
forward fills.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any

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

from ..models.heads.settings import args_of
from .caches import parts
from .params import CacheOptions

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_ctx",
    "n_positions",
    "max_seq_len",
    "model_max_length",
)
_SCALING_NAMES = ("rope_scaling", "rope_parameters")
_EXTENDING = ("linear", "dynamic", "yarn")  # models with other scalings state the extended length
_WORDS = ("position", "window", "chunk", "ctx", "context", "seq", "length", "floor_scale")
_LONGEST_KNOWN = 2**15  # if the configuration states no context length
_NUMBERS = range(16, 2**30)  # numbers that can be positions: an offset has 31 bits
_LONGEST_FILLED = 2**13  # the most entries with which a trial fills every cache
_ENDLESS = 1e18  # more than any context: some tokenizers state 1e30 for no limit


def context_length(model: nn.Module) -> int | None:
    """The longest context, in tokens, that the model's configuration allows; None if it says none.

    If RoPE scaling extends the trained context, this is the extended length.
    """
    return stated_context_length(args_of(model))


def stated_context_length(args: Any) -> int | None:
    """Like :func:`context_length`, but from a model's settings, such as its ``config.json``."""
    for settings in (args, _setting(args, "text_config")):
        for name in _LENGTH_NAMES:
            if stated := _number(_setting(settings, name)):
                return int(_extended(stated, settings))
    return None


def named_positions(model: nn.Module) -> set[int]:
    """The positions at which a rule of the model may change, according to its configuration.

    They are lengths, the sizes of windows and chunks, the ends of scalings, and the start of sparse
    attention.
    """
    numbers = _numbers(args_of(model), lambda name: any(word in name for word in _WORDS))
    numbers |= {context_length(model) or 0, sparse_crossing(model) or 0}
    return {number for number in numbers if number in _NUMBERS}


def crossings(model: nn.Module) -> list[int]:
    """The positions that trial steps straddle: those from :func:`named_positions`, and the powers
    of two within the context.
    """
    longest = min(context_length(model) or _LONGEST_KNOWN, _NUMBERS.stop - 1)
    return sorted(named_positions(model) | {2**k for k in range(4, longest.bit_length())})


def sparse_crossing(model: nn.Module) -> int | None:
    """A length at which sparse attention skips some positions; None without such attention.

    It is a multiple of the size of the attention's blocks, unless that would be very long.
    """
    numbers = _numbers(
        args_of(model),
        lambda name: ("sparse" in name or "index" in name) and ("block" in name or "topk" in name),
    )
    product = math.prod(numbers)
    return min(2 * product * math.ceil(16 / product), _LONGEST_FILLED) if numbers else None


def _extended(stated: float, settings: Any) -> float:
    """The context length after RoPE scaling."""
    scalings = (_setting(settings, name) for name in _SCALING_NAMES)
    scaling = next(filter(None, scalings), None)
    if not isinstance(scaling, dict) or _setting(settings, "rope_local_base_freq"):
        return stated  # Gemma 3 scales only some layers, and states the extended length
    kind = str(scaling.get("type") or scaling.get("rope_type"))
    factor = _number(scaling.get("factor"))
    if factor is None or not any(word in kind for word in _EXTENDING):
        return stated
    original = _number(scaling.get("original_max_position_embeddings")) or stated
    # Many models already state the extended length.
    return max(stated, original * factor)


def _numbers(settings: Any, wanted: Callable[[str], bool]) -> set[int]:
    """All numbers in nested settings whose name is wanted."""
    numbers = set()
    left = [("", settings)]
    while left:
        name, value = left.pop()
        if isinstance(value, list | tuple):
            left += [(name, item) for item in value]
        elif isinstance(value, dict):
            left += [(str(field), item) for field, item in value.items()]
        elif is_dataclass(value):
            left += vars(value).items()
        elif wanted(name) and (number := _number(value)):
            numbers.add(int(number))
    return numbers


def _setting(settings: Any, name: str) -> Any:
    """A value of a dict or of one of mlx-lm's settings objects; None if it is missing."""
    return settings.get(name) if isinstance(settings, dict) else getattr(settings, name, None)


def _number(value: Any) -> float | None:
    """The value if it can be a number of tokens; otherwise None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 1 <= value < _ENDLESS else None


@dataclass(frozen=True)
class CacheKind:
    """Those caches of a model that grow in the same way.

    Attributes:
        name: the name of their class.
        count: the number of caches.
        positions: the most positions that each holds; None if it holds all, or is a recurrent
            state.
        bytes_per_position: the bytes of one position in one cache; for caches that grow.
        state_bytes: the bytes of one cache; for caches whose size does not depend on the context.
    """

    name: str
    count: int = 1
    positions: int | None = None
    bytes_per_position: int | None = None
    state_bytes: int | None = None


def cache_kinds(
    loaded: LoadedModel, options: CacheOptions | None = None, quantized: bool = False
) -> list[CacheKind]:
    """A model's caches by kind; those of its trained head, which are never quantised, come last.

    The graph of a small forward is built for the shapes, but never evaluated.

    Args:
        options: the caches' options.
        quantized: whether to return the kinds that the caches have after quantisation.
    """
    options = options or CacheOptions()
    caches = make_prompt_cache(loaded.model, options.max_kv_size)
    loaded.model(mx.array([[0]]), cache=caches)
    if quantized:
        maybe_quantize_kv_cache(caches, 0, options.kv_group_size, options.kv_bits)
    trained = loaded.trained_head
    kinds = Counter(map(_kind_of, [*parts(caches), *(trained.small_caches() if trained else ())]))
    return [replace(kind, count=count) for kind, count in kinds.items()]


def _kind_of(cache: Any) -> CacheKind:
    name = type(cache).__name__
    if isinstance(cache, ArraysCache):
        return CacheKind(name, state_bytes=cache.nbytes)
    if not isinstance(cache, KVCache | QuantizedKVCache | RotatingKVCache | ChunkedKVCache):
        return CacheKind(name)
    keys = cache.keys[0] if isinstance(cache, QuantizedKVCache) else cache.keys
    positions = getattr(cache, "max_size", None) or getattr(cache, "chunk_size", None)
    return CacheKind(name, positions=positions, bytes_per_position=cache.nbytes // keys.shape[2])
