"""Several prompts at a time, with mlx-lm's arguments and response."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Sequence
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
from ..generation.response import GenerationResponse
from .generation import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WORTH_BATCHING = 2.0
_LABEL = "[batch_generate]"
_CHECKED = ("sampler", "logits_processors", "prefill_step_size", "max_kv_size")
_OF_BATCHES = ("completion_batch_size", "prefill_batch_size", "stream")


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

    Both are ways to give the model more rows at a time. A batch fills them with tokens that are
    all kept, so with many prompts and cheap rows it is the better one. With few prompts, or where
    rows are dear, it gains little, and speculation still does on text that repeats. So it is a
    batch if the rows of its steps, one for each prompt, come at half their price or less by what
    steps were measured to cost. In measurements (``benchmarks/batch_ways.py``) that was the
    faster way, or as fast, in all cases but one: free text where rows are dear, on which nothing
    is to be looked up.

    Args:
        model, tokenizer: from :func:`mlxspec.load` or ``mlx_lm.load``.
        prompts: token ids.
        prompt_caches: mlx-lm's caches of what precedes each prompt; they are not changed.
        max_tokens: how many tokens to generate at most, for all prompts or for each.
        verbose: print progress, and figures at the end.
        return_prompt_caches: return caches that hold each prompt and its answer.
        return_token_ids: return the answers' tokens, less the one that ended an answer.
        return_logprobs: return the log-probability of each of these tokens.
        sampler, logits_processors: as for :func:`mlxspec.stream_generate`. With those that are
            not known to be pure it is mlx-lm's batches, whose calls they count.
        completion_batch_size, prefill_batch_size: of mlx-lm's batches.
        prefill_step_size, max_kv_size: the memory of prefill and cache. Where the model heeds
            ``max_kv_size`` it is mlx-lm's batches, whatever steps cost: they drop the first
            positions, too, which one prompt alone keeps.
        stream: where mlx-lm's batches run.

    Raises:
        PromptError, PromptCacheError, OptionError: as :func:`mlxspec.stream_generate`, of any
            prompt, before the first one is answered.
        TypeError: there is no such option.
    """
    run = prepared(
        model,
        tokenizer,
        prompts,
        prompt_caches,
        max_tokens,
        verbose,
        return_prompt_caches,
        return_token_ids,
        return_logprobs,
        sampler=sampler,
        logits_processors=logits_processors,
        completion_batch_size=completion_batch_size,
        prefill_batch_size=prefill_batch_size,
        prefill_step_size=prefill_step_size,
        max_kv_size=max_kv_size,
        stream=stream,
    )
    return run()


def prepared(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    *wanted: bool,
    **options: Any,
) -> Callable[[], BatchResponse]:
    """What :func:`batch_generate` runs, once all its arguments are known to be good.

    Args:
        model, tokenizer, prompts, prompt_caches, max_tokens: as there.
        wanted, options: its other arguments.
    """
    decoder = decoder_of(model, tokenizer)
    budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    caches = [None] * len(prompts) if prompt_caches is None else list(prompt_caches)
    for name, given in (("max_tokens", budgets), ("prompt_caches", caches)):
        if len(given) != len(prompts):
            raise OptionError(f"{name} are {len(given)} for {len(prompts)} prompts: give one each")
    longest = context_length(model)
    tokens = [prompt_ids(p, decoder.tokenizer, decoder.vocab_size, longest) for p in prompts]
    checked = {name: options[name] for name in _CHECKED if name in options}
    stateful = False
    for budget, cache in zip(budgets, caches, strict=True):
        each = cast(GenerationOptions, {**checked, "prompt_cache": cache})
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
        args = model, decoder.tokenizer, tokens, prompt_caches, budgets, *wanted
        return partial(generate_in_batch, *args, **options)
    for name in _OF_BATCHES:
        options.pop(name, None)
    return partial(_one_by_one, decoder, tokens, caches, budgets, *wanted, **options)


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
    answers = _Answers(len(prompts), verbose)
    caches: list[list[Any]] = []
    for prompt, lent, budget in zip(prompts, prompt_caches, budgets, strict=True):
        cache = copy.deepcopy(lent)
        if cache is None and return_prompt_caches:
            cache = make_prompt_cache(decoder.model, options.get("max_kv_size"))
        if cache is not None:
            caches.append(cache)
        answers.take(
            decoder.stream(prompt, budget, prompt_cache=cache, **options),
            decoder.tokenizer.eos_token_ids,
            return_logprobs,
        )
    answers.finish()
    return BatchResponse(
        texts=[decoder.tokenizer.decode(tokens) for tokens in answers.tokens],
        stats=answers.stats,
        caches=caches if return_prompt_caches else None,
        token_ids=answers.tokens if return_token_ids else None,
        logprobs=answers.logprobs if return_logprobs else None,
    )


def _can_be_batched(model: nn.Module, caches: Sequence[list[Any]]) -> bool:
    """Whether mlx-lm's batches take a model and the caches of its prompts."""
    split = hasattr(model, "leader")
    return not split and all(hasattr(layer, "merge") for cache in caches for layer in cache)


def _keeps_start(caches: Sequence[list[Any]]) -> bool:
    """Whether a cache of bounded size keeps the first positions.

    In a batch mlx-lm drops these as well, so that its answers are others than one by one.
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


class _Answers:
    """What comes of prompts that are answered one by one.

    Args:
        count: how many prompts there are.
        verbose: print progress, and figures at the end.
    """

    def __init__(self, count: int, verbose: bool) -> None:
        self.tokens: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.stats = BatchStats()
        self._count = count
        self._verbose = verbose
        self._drafted, self._accepted = 0, 0
        self._started = time.perf_counter()
        self._show_progress()

    def take(
        self,
        responses: Iterable[GenerationResponse],
        ends: Collection[int],
        with_logprobs: bool,
    ) -> None:
        """Run a generation to its end."""
        tokens: list[int] = []
        logprobs: list[float] = []
        started = time.perf_counter()
        for response in responses:
            if response.generation_tokens == 1:
                first = time.perf_counter()
            if response.token not in ends:
                tokens.append(response.token)
                if with_logprobs:
                    logprobs.append(response.token_logprobs().logprob)
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.stats += BatchStats(
            prompt_tokens=response.prompt_tokens,
            prompt_time=first - started,
            generation_tokens=response.generation_tokens,
            generation_steps=response.stats.steps,
            decode_time=time.perf_counter() - first,
            peak_memory=response.peak_memory,
        )
        self._drafted += response.stats.drafted
        self._accepted += response.stats.accepted
        self._show_progress()

    def finish(self) -> None:
        """To be called after the last prompt."""
        self.stats.wall_time = time.perf_counter() - self._started
        if not self._verbose:
            return
        stats = self.stats
        print(
            f"\n{_LABEL} Prompt: {stats.prompt_tokens} tokens, "
            f"{stats.prompt_tps:.3f} tokens-per-sec\n"
            f"{_LABEL} Generation: {stats.generation_tokens} tokens, "
            f"{stats.generation_tps:.3f} tokens-per-sec\n"
            f"{_LABEL} Speculation: {self._accepted} of {self._drafted} draft tokens accepted\n"
            f"{_LABEL} Peak memory: {stats.peak_memory:.3f} GB"
        )

    def _show_progress(self) -> None:
        if self._verbose:
            done = f"{len(self.tokens)}/{self._count}"
            print(f"{_LABEL} Finished processing {done} ...", end="\r", flush=True)
