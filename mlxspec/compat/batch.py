"""Several prompts at a time, with mlx-lm's arguments and response."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import mlx.nn as nn
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import batch_generate as generate_in_batch
from mlx_lm.generate_utils import BatchStats
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine.caches import parts
from ..engine.params import LogitsProcessor, Sampler
from ..engine.positions import context_length
from ..engine.target import Capability
from ..errors import OptionError
from ..generation.decoders import AutoDecoder
from ..generation.options import GenerationOptions, check_options, prompt_ids
from .generation import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LABEL = "[batch_generate]"
_WORTH_BATCHING = 2.0  # rows for the price of one
_DECODING = ("sampler", "logits_processors", "prefill_step_size", "max_kv_size")
_BATCHING = ("completion_batch_size", "prefill_batch_size", "stream")


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    completion_batch_size: int = 32,
    prefill_batch_size: int = 8,
    prefill_step_size: int = 2048,
    max_kv_size: int | None = None,
    stream: Any = None,
) -> BatchResponse:
    """Answer several prompts: in mlx-lm's batches, or one by one with speculation.

    Both give the model more rows at a time. A batch fills them with tokens that are all kept, so
    it is better for many prompts where rows are cheap. With few prompts, or where rows are
    expensive, a batch gains little, and speculation still helps on text that repeats. So prompts
    go into a batch if the rows of its steps, one for each prompt, cost half of single rows or
    less, by what steps were measured to cost. In measurements (``benchmarks/batch_ways.py``) that
    was the faster way, or as fast, in all cases but one: free text where rows are expensive, on
    which nothing is to be looked up.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompts: token ids.
        prompt_caches: mlx-lm's caches of what precedes each prompt; they are not changed.
        max_tokens: how many tokens to generate at most, for all prompts or for each.
        verbose: print progress, and figures at the end.
        return_prompt_caches: return caches that hold each prompt and its answer.
        return_token_ids: return the answers' tokens, without the one that ended an answer.
        return_logprobs: return the log-probability of each of these tokens.
        sampler, logits_processors: as for :func:`mlxspec.stream_generate`. Those that are not
            known to be pure may count their calls, so the prompts go into mlx-lm's batches.
        completion_batch_size, prefill_batch_size: of mlx-lm's batches.
        prefill_step_size, max_kv_size: the memory of prefill and cache. Where the model heeds
            ``max_kv_size`` the prompts go into mlx-lm's batches, whatever steps cost: batches
            drop the first positions, too, which a prompt alone keeps.
        stream: where mlx-lm's batches run.

    Raises:
        PromptError, PromptCacheError, OptionError: as :func:`mlxspec.stream_generate`, of any
            prompt, before the first one is answered.
        TypeError: there is no such option.
    """
    return prepared(**locals())()


def prepared(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    **options: Any,
) -> Callable[[], BatchResponse]:
    """What :func:`batch_generate` runs, once its arguments, which are these, are checked."""
    decoder = decoder_of(model, tokenizer)
    budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    caches = [None] * len(prompts) if prompt_caches is None else list(prompt_caches)
    for name, given in (("max_tokens", budgets), ("prompt_caches", caches)):
        if len(given) != len(prompts):
            raise OptionError(f"{name} are {len(given)} for {len(prompts)} prompts: give one each")
    longest = context_length(model)
    tokens = [prompt_ids(p, decoder.tokenizer, decoder.vocab_size, longest) for p in prompts]
    decoding = {name: options[name] for name in _DECODING if name in options}
    stateful = False
    for budget, cache in zip(budgets, caches, strict=True):
        each = cast(GenerationOptions, {**decoding, "prompt_cache": cache})
        found = check_options(model, decoder.tokenizer, decoder.vocab_size, budget, each)
        stateful = not found.sampling.allows_drafts
    own = make_prompt_cache(model, options.get("max_kv_size"))
    held = [own if cache is None else cache for cache in caches]
    size = min(len(prompts), options.get("completion_batch_size", 32))
    batched = _can_be_batched(model, held) and (
        stateful or _keeps_start(held) or _batch_pays(decoder, size)
    )
    # A RoPE that depends on a context's length takes no batch.
    if batched and decoder.draft_end is None:
        args = model, decoder.tokenizer, tokens, prompt_caches, budgets
        return partial(generate_in_batch, *args, **options)
    for name in _BATCHING:
        options.pop(name, None)
    return partial(_one_by_one, decoder, tokens, caches, budgets, **options)


def _one_by_one(
    decoder: AutoDecoder,
    prompts: Sequence[list[int]],
    prompt_caches: Sequence[list[Any] | None],
    budgets: Sequence[int],
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Any,
) -> BatchResponse:
    """Answer the prompts with speculation; ``options`` are those of ``decoder.stream``."""
    caches: list[list[Any]] = []
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    stats, drafted, accepted = BatchStats(), 0, 0
    ends = decoder.tokenizer.eos_token_ids
    started = time.perf_counter()
    for index, (prompt, lent, budget) in enumerate(
        zip(prompts, prompt_caches, budgets, strict=True)
    ):
        _show_progress(index, len(prompts), verbose)
        cache = copy.deepcopy(lent)
        if cache is None and return_prompt_caches:
            cache = make_prompt_cache(decoder.model, options.get("max_kv_size"))
        if cache is not None:
            caches.append(cache)
        responses = decoder.stream(prompt, budget, prompt_cache=cache, **options)
        prefill = time.perf_counter()
        for response in responses:
            if response.generation_tokens == 1:
                first = time.perf_counter()
            if response.token not in ends:
                tokens[index].append(response.token)
                if return_logprobs:
                    logprobs[index].append(response.token_logprobs().logprob)
        stats += BatchStats(
            prompt_tokens=response.prompt_tokens,
            prompt_time=first - prefill,
            generation_tokens=response.generation_tokens,
            generation_steps=response.stats.steps,
            decode_time=time.perf_counter() - first,
            peak_memory=response.peak_memory,
        )
        drafted += response.stats.drafted
        accepted += response.stats.accepted
    stats.wall_time = time.perf_counter() - started
    if verbose:
        _show_progress(len(prompts), len(prompts), verbose)
        print(
            f"\n{_LABEL} Prompt: {stats.prompt_tokens} tokens, "
            f"{stats.prompt_tps:.3f} tokens-per-sec\n"
            f"{_LABEL} Generation: {stats.generation_tokens} tokens, "
            f"{stats.generation_tps:.3f} tokens-per-sec\n"
            f"{_LABEL} Speculation: {accepted} of {drafted} draft tokens accepted\n"
            f"{_LABEL} Peak memory: {stats.peak_memory:.3f} GB"
        )
    return BatchResponse(
        texts=[decoder.tokenizer.decode(answer) for answer in tokens],
        stats=stats,
        caches=caches if return_prompt_caches else None,
        token_ids=tokens if return_token_ids else None,
        logprobs=logprobs if return_logprobs else None,
    )


def _show_progress(done: int, count: int, verbose: bool) -> None:
    if verbose:
        print(f"{_LABEL} Finished processing {done}/{count} ...", end="\r", flush=True)


def _can_be_batched(model: nn.Module, caches: Sequence[list[Any]]) -> bool:
    """Whether mlx-lm's batches take a model and the caches of its prompts."""
    split = hasattr(model, "leader")
    return not split and all(hasattr(layer, "merge") for cache in caches for layer in cache)


def _keeps_start(caches: Sequence[list[Any]]) -> bool:
    """Whether a cache of bounded size keeps the first positions.

    In a batch mlx-lm drops these as well, and so gives other answers than one by one.
    """
    return any(getattr(part, "keep", 0) for cache in caches for part in parts(cache))


def _batch_pays(decoder: AutoDecoder, size: int) -> bool:
    """Whether a batch of this size is the better way to give the model rows."""
    if size < 2:
        return False
    if decoder.chain_capability is Capability.PLAIN:
        return True
    curve = decoder.costs.curve
    rows = min(size, curve.widest)
    return rows / curve(rows) >= _WORTH_BATCHING
