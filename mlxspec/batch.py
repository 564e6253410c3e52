"""Several prompts at a time, with mlx-lm's arguments and response."""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx_lm.generate import BatchResponse
from mlx_lm.generate import batch_generate as generate_in_batch
from mlx_lm.generate_utils import BatchStats
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoders import AutoDecoder
from .decoding.sampling import LogitsProcessor, Sampler
from .errors import OptionError
from .generation import decoder_of
from .models.tier import Tier
from .response import GenerationResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORTH_BATCHING = 2.0
_LABEL = "[batch_generate]"


def batch_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    prompt_caches: Sequence[list[Any]] | None = None,
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
        sampler, logits_processors: as for :func:`mlxspec.stream_generate`.
        completion_batch_size, prefill_batch_size: of mlx-lm's batches.
        prefill_step_size, max_kv_size: the memory of prefill and cache.
        stream: where mlx-lm's batches run.

    Raises:
        PromptError, OptionError: as :func:`mlxspec.stream_generate`.
        TypeError: there is no such option.
    """
    decoder = decoder_of(model, tokenizer)
    budgets = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    if len(budgets) != len(prompts):
        raise OptionError(f"max_tokens are {len(budgets)} for {len(prompts)} prompts: give as many")
    if _batch_pays(decoder, min(len(prompts), completion_batch_size)):
        return generate_in_batch(
            model,
            decoder.tokenizer,
            [list(prompt) for prompt in prompts],
            prompt_caches,
            budgets,
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
    answers = _Answers(len(prompts), verbose)
    caches: list[list[Any]] = []
    for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        cache = copy.deepcopy(prompt_caches[index]) if prompt_caches else None
        if cache is None and return_prompt_caches:
            cache = make_prompt_cache(model, max_kv_size)
        if cache is not None:
            caches.append(cache)
        answers.take(
            decoder.stream(
                prompt,
                budget,
                sampler=sampler,
                logits_processors=logits_processors,
                prefill_step_size=prefill_step_size,
                max_kv_size=max_kv_size,
                prompt_cache=cache,
            ),
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


def _batch_pays(decoder: AutoDecoder, size: int) -> bool:
    """Whether a batch of this size is the better way to give the model rows."""
    if size < 2 or hasattr(decoder.model, "leader"):  # split models run no batches
        return False
    if not all(hasattr(cache, "merge") for cache in make_prompt_cache(decoder.model)):
        return False
    if decoder.chain_tier is Tier.PLAIN:
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
