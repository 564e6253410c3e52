"""The keyword arguments that all decoders take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, cast

import mlx.nn as nn
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding import SamplingParams
from ..decoding.sampling import LogitsProcessor, Sampler
from ..errors import OptionError
from ..models.cache_options import CacheOptions, check_quantization
from ..models.prompt_cache import fitting_caches
from ..models.target import Progress
from .session import Session
from .stop_tokens import stop_token_ids


class SamplingOptions(TypedDict, total=False):
    """The fields of :class:`mlxspec.SamplingParams`, one by one."""

    temp: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int]
    logit_bias: Mapping[int, float] | None
    repetition_penalty: float | None
    repetition_context_size: int
    presence_penalty: float | None
    presence_context_size: int
    frequency_penalty: float | None
    frequency_context_size: int
    logits_processors: Sequence[LogitsProcessor] | None
    sampler: Sampler | None


class EndOptions(TypedDict, total=False):
    """What ends the output before it is full."""

    stop: str | Sequence[str]
    stop_tokens: int | str | Collection[int | str]


class MemoryOptions(TypedDict, total=False):
    """The fields of :class:`mlxspec.models.cache_options.CacheOptions`, one by one."""

    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_kv_size: int | None
    prefill_step_size: int


class GenerationOptions(SamplingOptions, EndOptions, MemoryOptions, total=False):
    """What every decoder's ``stream`` takes; see :meth:`mlxspec.Decoder.decode`."""

    sampling: SamplingParams | None
    on_progress: Progress | None
    session: Session | None
    prompt_cache: list[Any] | None


class CheckedOptions(NamedTuple):
    """What the options of a generation amount to.

    Attributes:
        sampling: how to pick a token.
        stop: the texts that end the output.
        stop_tokens: the tokens that end it, the tokenizer's own included.
        cache: the memory of the cache.
    """

    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_tokens: set[int]
    cache: CacheOptions


def sampling_from(
    params: SamplingParams | None, fields: SamplingOptions, vocab_size: int
) -> SamplingParams:
    """The settings, with the fields that are given by name put into them.

    Raises:
        OptionError: as :class:`mlxspec.SamplingParams`, or the model lacks one of the tokens.
    """
    if fields.get("sampler") is greedy_sampler:  # what make_sampler gives at temperature 0
        fields = {**fields, "sampler": None}
    if params is None and fields.get("sampler") is not None:
        # Who passes mlx-lm's sampler expects that repeated calls differ.
        params = SamplingParams(seed=None)
    params = replace(params or SamplingParams(), **fields)
    for name in ("logit_bias", "xtc_special_tokens"):
        for token in getattr(params, name) or ():
            if not 0 <= token < vocab_size:
                raise OptionError(
                    f"{name} holds the id {token}: the model's are 0 to {vocab_size - 1}"
                )
    return params


def sampling_of(options: GenerationOptions, vocab_size: int) -> SamplingParams:
    """The settings among the options of a generation.

    Raises:
        OptionError: as :func:`sampling_from`.
    """
    fields = {name: options.get(name) for name in SamplingOptions.__annotations__ & options.keys()}
    return sampling_from(options.get("sampling"), cast(SamplingOptions, fields), vocab_size)


def check_options(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    max_tokens: int,
    options: GenerationOptions,
) -> CheckedOptions:
    """What :meth:`mlxspec.Decoder.decode` makes of its options; nothing runs.

    Raises:
        OptionError, PromptCacheError: as there.
        TypeError: there is no such option.
    """
    left: dict[str, Any] = {**options}
    stop, stop_tokens = left.pop("stop", ()), left.pop("stop_tokens", ())
    session, prompt_cache = left.pop("session", None), left.pop("prompt_cache", None)
    sampling, _ = left.pop("sampling", None), left.pop("on_progress", None)
    memory = {name: left.pop(name) for name in MemoryOptions.__annotations__ if name in left}
    if max_tokens < 1:
        raise OptionError(f"max_tokens is {max_tokens}: generate at least 1 token")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stop):
        raise OptionError("stop holds an empty string: it would end every output at once")
    if session is not None and prompt_cache is not None:
        raise OptionError("session and prompt_cache are given together: choose one")
    cache = CacheOptions(**memory)
    check_quantization(model, cache)
    if prompt_cache is not None:
        fitting_caches(prompt_cache, model)
    return CheckedOptions(
        sampling_from(sampling, cast(SamplingOptions, left), vocab_size),
        stop,
        stop_token_ids(tokenizer, stop_tokens, vocab_size),
        cache,
    )
