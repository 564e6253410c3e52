"""What every decoder is: a model, a drafter, and the loop between them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..decoding import Chooser, RecordTime, SamplingParams, decode
from ..drafting import Drafter, VerifiedStep
from ..errors import OptionError, PromptError
from ..models.loading import context_length, encode_prompt, load
from ..models.target import Progress, Target, vocabulary_size
from ..models.tiers import Tier, chain_tier, find_tier
from ..output import OutputText
from ..planning import StepTimes
from ..response import GenerationResponse, GenerationResult, SpeculationStats, Transcript
from ..terminal import TokenPrinter

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

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return vocabulary_size(self.model)

    def decode(
        self,
        prompt: Prompt,
        drafter: Drafter,
        *,
        max_tokens: int = 250,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        on_progress: Progress | None = None,
        record_time: RecordTime | None = None,
    ) -> Generator[GenerationResponse, None, None]:
        """Generate with a drafter of your own, or with one of mlxspec's.

        Args:
            prompt: text, or token ids that are taken as they are.
            drafter: proposes what the model verifies; it changes the speed, not the output.
            max_tokens: how many tokens to generate at most, at least 1.
            sampling: how the model picks a token; greedy by default.
            stop: texts that end the output before them.
            on_progress: called with prompt tokens done and prompt tokens in all.
            record_time: called after each step; see :func:`mlxspec.decoding.decode`.

        Returns:
            a generator of one response per token. Closing it ends the generation.

        Raises:
            PromptError: the prompt is empty, longer than the model's context, or holds an id
                that is no token of the model.
            OptionError: ``max_tokens`` is below 1, or a stop string is empty.
        """
        tokens = self._prompt_tokens(prompt)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if max_tokens < 1:
            raise OptionError(f"max_tokens is {max_tokens}: generate at least 1 token")
        if not all(stop):
            raise OptionError("stop holds an empty string: it would end every output at once")
        chooser = Chooser(sampling or SamplingParams())
        output = OutputText(
            self.tokenizer.detokenizer, self.tokenizer.eos_token_ids, stop, max_tokens
        )

        def record(rows: int, seconds: float, pipelined: bool) -> None:
            self.step_times.record(rows, seconds, pipelined)
            if record_time:
                record_time(rows, seconds, pipelined)

        return self._responses(tokens, drafter, chooser, output, max_tokens, on_progress, record)

    def _prompt_tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: write a text, or pass the BOS id alone")
            tokens = encode_prompt(self.tokenizer, prompt)
        else:
            tokens = [int(token) for token in prompt]
        if not tokens:
            raise PromptError("the prompt holds no token: pass at least the BOS id")
        if not all(0 <= token < self.vocab_size for token in tokens):
            unknown = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise PromptError(
                f"the prompt holds the id {unknown}: the model's are 0 to {self.vocab_size - 1}"
            )
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
        output: OutputText,
        max_tokens: int,
        on_progress: Progress | None,
        record_time: RecordTime,
    ) -> Generator[GenerationResponse, None, None]:
        """Turn the loop's steps into one response per token."""
        target = Target(self.model, self._tier_for(drafter), self.vocab_size)
        clock = _Clock(len(prompt), on_progress)
        stats = SpeculationStats()
        with wired_limit(self.model, [generation_stream]):
            for step in decode(
                target,
                prompt,
                drafter,
                chooser,
                max_tokens=max_tokens,
                ends=output.add,
                record_time=record_time,
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

    def written(
        self, responses: Iterable[GenerationResponse], color: bool = True
    ) -> GenerationResult:
        """Write a generation's text to standard output as it comes.

        Args:
            responses: from :meth:`decode` or a method that builds on it.
            color: colour accepted draft tokens and the model's own, at a terminal.
        """
        printer = TokenPrinter(color=None if color else False)
        transcript = Transcript()
        for response in responses:
            printer.write(response.text, response.from_draft)
            transcript.add(response)
        printer.finish()
        return transcript.result(self.step_times)

    def _tier_for(self, drafter: Drafter) -> Tier:
        """What the model can verify of this drafter's drafts; chains need no probing."""
        if drafter.branching:
            return self.tier
        return chain_tier(self.model)


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
