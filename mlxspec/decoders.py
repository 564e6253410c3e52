"""The decoders: a model, a drafter, and the loop between them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decoding import Chooser, SamplingParams, decode
from .drafting import Drafter, NoDraft, PromptLookupDrafter, VerifiedStep
from .drafting.lookup_names import parse_lookup_config
from .errors import OptionError, PromptError
from .models.loading import context_length, encode_prompt, load
from .models.target import Progress, Target
from .models.tiers import Tier, cache_tier, find_tier
from .output import OutputText
from .planning import StepTimes
from .response import GenerationResponse, GenerationResult, SpeculationStats, Transcript
from .terminal import TokenPrinter

Prompt = str | Sequence[int] | mx.array


class Decoder:
    """Decodes with any drafter. Each generation has a cache of its own.

    Args:
        model: a directory or Hub repository that :func:`mlxspec.load` takes, or a loaded
            mlx-lm model.
        tokenizer: the tokenizer of a loaded model.

    Raises:
        LoadError: the model cannot be found or read.
        OptionError: a loaded model comes without its tokenizer.
    """

    def __init__(
        self,
        model: str | Path | nn.Module = "mlx_model",
        tokenizer: TokenizerWrapper | None = None,
    ) -> None:
        if isinstance(model, (str, Path)):
            model, tokenizer = load(model)
        elif tokenizer is None:
            raise OptionError("tokenizer is None: pass the loaded model's tokenizer with it")
        self.model = model
        self.tokenizer = tokenizer
        self.step_times = StepTimes()
        """Wall time of this decoder's steps by their number of rows."""

    @cached_property
    def tier(self) -> Tier:
        """What drafts the model can verify; found out on first use, with a few forwards."""
        return find_tier(self.model)

    def decode(
        self,
        prompt: Prompt,
        drafter: Drafter,
        *,
        max_tokens: int = 250,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        on_progress: Progress | None = None,
    ) -> Iterator[GenerationResponse]:
        """Generate with a drafter of your own, or with one of mlxspec's.

        Args:
            prompt: text, or token ids that are taken as they are.
            drafter: proposes what the model verifies; it changes the speed, not the output.
            max_tokens: how many tokens to generate at most, at least 1.
            sampling: how the model picks a token; greedy by default.
            stop: texts that end the output before them.
            on_progress: called with prompt tokens done and prompt tokens in all.

        Returns:
            a generator of one response per token. Closing it ends the generation.

        Raises:
            PromptError: the prompt is empty or longer than the model's context.
            OptionError: ``max_tokens`` is below 1, or a stop string is empty.
        """
        tokens = self._prompt_tokens(prompt)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if max_tokens < 1:
            raise OptionError(f"max_tokens is {max_tokens}: generate at least 1 token")
        if not all(stop):
            raise OptionError("stop holds an empty string: it would end every output at once")
        chooser = Chooser(sampling or SamplingParams())
        return self._responses(tokens, drafter, chooser, max_tokens, stop, on_progress)

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: write a text, or pass the BOS id alone")
            tokens = encode_prompt(self.tokenizer, prompt)
        else:
            tokens = prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)
        if not tokens:
            raise PromptError("the prompt holds no token: pass at least the BOS id")
        longest = context_length(self.model)
        if longest is not None and len(tokens) > longest:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens and the model's context {longest}: "
                "shorten the prompt"
            )
        return tokens

    def _responses(
        self,
        prompt: list[int],
        drafter: Drafter,
        chooser: Chooser,
        max_tokens: int,
        stop: tuple[str, ...],
        on_progress: Progress | None,
    ) -> Iterator[GenerationResponse]:
        """Turn the loop's steps into one response per token."""
        output = OutputText(
            self.tokenizer.detokenizer, self.tokenizer.eos_token_ids, stop, max_tokens
        )
        clock = _Clock(len(prompt), on_progress)
        stats = SpeculationStats()
        target = Target(self.model, self._tier_for(drafter))
        with wired_limit(self.model, [generation_stream]):
            for step in decode(
                target,
                prompt,
                drafter,
                chooser,
                max_tokens=max_tokens,
                ends=output.add,
                step_times=self.step_times,
                on_progress=clock.on_progress,
            ):
                generated = stats.emitted
                stats = _updated(stats, step.verified)
                for index, segment in enumerate(output.take()):
                    generated += 1
                    last = generated == stats.emitted
                    yield GenerationResponse(
                        text=segment,
                        token=step.verified.tokens[index],
                        logprobs=step.logprobs[index],
                        from_draft=index < len(step.verified.accepted),
                        prompt_tokens=len(prompt),
                        prompt_tps=clock.prompt_tps,
                        generation_tokens=generated,
                        generation_tps=clock.generation_tps(generated),
                        peak_memory=mx.get_peak_memory() / 1e9,
                        stats=stats,
                        finish_reason=output.finish_reason if last else None,
                    )

    def _tier_for(self, drafter: Drafter) -> Tier:
        """What the model can verify of this drafter's drafts; chains need no probing."""
        if drafter.branching:
            return self.tier
        return Tier.PLAIN if cache_tier(self.model) is Tier.PLAIN else Tier.CHAIN


class PromptLookupDecoder(Decoder):
    """Speculates on text that repeats: code edits, summaries, quotations, structured output.

    The draft is what followed the context's last n-gram earlier in prompt or output; see
    :class:`mlxspec.drafting.PromptLookupDrafter`.
    """

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        n_draft: int = 10,
        ngram_max: int = 3,
        ngram_min: int = 1,
        *,
        temp: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        on_progress: Progress | None = None,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        prompt_lookup_config: str | Sequence[object] | None = None,
    ) -> Iterator[GenerationResponse]:
        """Generate one response per token.

        Args:
            prompt: text, or token ids.
            max_tokens: how many tokens to generate at most.
            n_draft: draft tokens per step at most; 0 is plain decoding.
            ngram_max: the longest n-gram looked up.
            ngram_min: the shortest.
            temp, top_p, top_k, min_p, seed: see :class:`mlxspec.SamplingParams`.
            stop: texts that end the output before them.
            on_progress: called with prompt tokens done and prompt tokens in all.
            prompt_lookup_num_tokens: transformers' and TensorRT-LLM's name for ``n_draft``.
            max_matching_ngram_size: their name for ``ngram_max``.
            prompt_lookup_config: TensorRT-LLM's form for both, ``"[10,2,[0]]"``; a device list
                is ignored with a warning.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        if prompt_lookup_config is not None:
            n_draft, ngram_max, note = parse_lookup_config(prompt_lookup_config)
            if note:
                warnings.warn(note, stacklevel=2)
        if prompt_lookup_num_tokens is not None:
            n_draft = prompt_lookup_num_tokens
        if max_matching_ngram_size is not None:
            ngram_max = max_matching_ngram_size
        return self.decode(
            prompt,
            NoDraft() if n_draft == 0 else PromptLookupDrafter(n_draft, ngram_max, ngram_min),
            max_tokens=max_tokens,
            sampling=SamplingParams(temp, top_p, top_k, min_p, seed),
            stop=stop,
            on_progress=on_progress,
        )

    def prompt_lookup(
        self,
        prompt: Prompt,
        max_tokens: int = 250,
        n_draft: int = 10,
        ngram_max: int = 3,
        ngram_min: int = 1,
        temp: float = 0.0,
        seed: int = 0,
        color: bool = True,
        **options: Any,
    ) -> GenerationResult:
        """Generate, write the text to standard output as it comes, and return the result.

        Args:
            prompt, max_tokens, n_draft, ngram_max, ngram_min, temp, seed: as in :meth:`stream`.
            color: colour accepted draft tokens and the model's own, at a terminal.
            options: :meth:`stream`'s other options.

        Raises:
            PromptError, OptionError: as :meth:`Decoder.decode`.
        """
        responses = self.stream(
            prompt, max_tokens, n_draft, ngram_max, ngram_min, temp=temp, seed=seed, **options
        )
        printer = TokenPrinter(color=None if color else False)
        transcript = Transcript()
        for response in responses:
            printer.write(response.text, response.from_draft)
            transcript.add(response)
        printer.finish()
        return transcript.result(self.step_times)


def _updated(stats: SpeculationStats, step: VerifiedStep) -> SpeculationStats:
    return SpeculationStats(
        steps=stats.steps + 1,
        rows=stats.rows + len(step.tree),
        drafted=stats.drafted + step.drafted,
        accepted=stats.accepted + len(step.accepted),
        emitted=stats.emitted + len(step.tokens),
    )


class _Clock:
    """Rates of prefill and generation; the prefill ends when the first step begins."""

    def __init__(self, prompt_tokens: int, on_progress: Progress | None) -> None:
        self._prompt_tokens = prompt_tokens
        self._report = on_progress
        self._prefill_started = time.perf_counter()

    def on_progress(self, done: int, total: int) -> None:
        self._prefill_ended = time.perf_counter()
        if self._report:
            self._report(done, total)

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second; the last one belongs to the first step."""
        return (self._prompt_tokens - 1) / (self._prefill_ended - self._prefill_started)

    def generation_tps(self, tokens: int) -> float:
        return tokens / (time.perf_counter() - self._prefill_ended)
