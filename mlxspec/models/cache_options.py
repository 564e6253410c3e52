"""How much memory the KV cache may take: mlx-lm's options and their meaning."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from ..errors import OptionError

_BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (32, 64, 128)
_SMALLEST_MAX_SIZE = 8  # the first 4 tokens are kept, and some have to come after them


@dataclass(frozen=True)
class CacheOptions:
    """What bounds the memory of KV cache and prefill; the names and meanings are mlx-lm's.

    Attributes:
        kv_bits: bits of a quantised key or value; None does not quantise.
        kv_group_size: how many of them share a scale.
        quantized_kv_start: so many positions are cached before quantisation begins.
        max_kv_size: cache so many positions at most: the first 4 and the latest. Models that
            bring a cache of their own (sliding windows, state) ignore it, as in mlx-lm.
        prefill_step_size: how many prompt tokens are processed at a time.

    Raises:
        OptionError: a value is outside its range.
    """

    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    max_kv_size: int | None = None
    prefill_step_size: int = 2048

    def __post_init__(self) -> None:
        if self.kv_bits is not None and self.kv_bits not in _BITS:
            raise OptionError(f"kv_bits is {self.kv_bits}: choose one of {_listed(_BITS)}")
        if self.kv_group_size not in _GROUP_SIZES:
            raise OptionError(
                f"kv_group_size is {self.kv_group_size}: choose one of {_listed(_GROUP_SIZES)}"
            )
        if self.quantized_kv_start < 0:
            raise OptionError(
                f"quantized_kv_start is {self.quantized_kv_start}: choose 0 positions or more"
            )
        if self.max_kv_size is not None and self.max_kv_size < _SMALLEST_MAX_SIZE:
            raise OptionError(
                f"max_kv_size is {self.max_kv_size}: cache {_SMALLEST_MAX_SIZE} positions or more"
            )
        if self.prefill_step_size < 1:
            raise OptionError(
                f"prefill_step_size is {self.prefill_step_size}: process 1 token or more at a time"
            )


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def check_quantization(model: nn.Module, options: CacheOptions) -> None:
    """Refuse to quantise what cannot be quantised, before a generation has come that far.

    The graph of two small forwards is built and never evaluated.

    Raises:
        OptionError: mlx-lm has no quantised cache for this model, or not with these options.
    """
    if options.kv_bits is None:
        return
    cache = make_prompt_cache(model, options.max_kv_size)
    token = mx.array([[0]])
    try:
        model(token, cache=cache)
        maybe_quantize_kv_cache(cache, 0, options.kv_group_size, options.kv_bits)
        model(token, cache=cache)
    except NotImplementedError as error:
        raise OptionError(
            "kv_bits: a cache that drops old positions cannot be quantised; leave kv_bits out"
            + (" or max_kv_size" if options.max_kv_size is not None else "")
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"kv_bits {options.kv_bits} with kv_group_size {options.kv_group_size} does not suit "
            f"this model's cache: {' '.join(str(error).split())[:150]}"
        ) from error
