"""The loop's steps as users see them: one response per token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from ..draft.drafter import Drafter, VerifiedStep
from ..engine.chooser import Chooser
from ..engine.prompt_cache import Loan
from ..engine.step import DecodedStep, RecordTime, decode
from ..engine.target import Progress, Target
from .response import GenerationResponse, SpeculationStats
from .text import OutputText


def responses(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter,
    chooser: Chooser,
    output: OutputText,
    *,
    max_tokens: int,
    n_cached: int = 0,
    deepest_draft: Callable[[int], int],
    on_progress: Progress | None,
    record_time: RecordTime,
) -> Generator[GenerationResponse, None, None]:
    """Run the loop and turn its steps into responses; the arguments are the loop's."""
    clock = _Clock(len(prompt), n_cached, on_progress)
    stats = SpeculationStats()
    generated = 0
    steps = decode(
        target,
        prompt,
        drafter,
        chooser,
        max_tokens=max_tokens,
        ends=output.add,
        n_cached=n_cached,
        deepest_draft=deepest_draft,
        record_time=record_time,
        on_progress=clock.on_progress,
    )

    try:
        with wired_limit(target.model, [generation_stream]):
            for step in steps:
                stats = _updated(stats, step.verified)
                segments = output.take()
                for index, text in enumerate(segments):
                    generated += 1
                    finish_reason = output.finish_reason if generated == stats.emitted else None
                    yield _response(step, index, text, stats, clock, generated, finish_reason)
    finally:
        steps.close()


def on_loan(
    loan: Loan,
    prompt: Sequence[int],
    start: Callable[[], Generator[GenerationResponse, None, None]],
) -> Generator[GenerationResponse, None, None]:
    """Run a generation on caches that are lent, which follow the responses that are taken.

    Args:
        loan: of the caches, which the generation takes when it begins.
        prompt: without what the caches hold already.
        start: gives the generation's responses.
    """
    context = list(prompt)
    try:
        responses = start()
        loan.end = responses.close
        for response in responses:
            context.append(response.token)
            if response.finish_reason:
                break
            loan.pause(context)
            yield response
            loan.resume()
    finally:
        loan.give_back(context, complete=len(context) > len(prompt))
    yield response


def _response(
    step: DecodedStep,
    index: int,
    text: str,
    stats: SpeculationStats,
    clock: _Clock,
    generated: int,
    finish_reason: str | None,
) -> GenerationResponse:
    return GenerationResponse(
        text=text,
        token=step.verified.tokens[index],
        logprobs=step.logprobs[index],
        from_draft=index < len(step.verified.accepted),
        prompt_tokens=clock.prompt_tokens,
        prompt_tps=clock.prompt_tps,
        generation_tokens=generated,
        generation_tps=clock.generation_tps(generated),
        peak_memory=mx.get_peak_memory() / 1e9,
        stats=stats,
        finish_reason=finish_reason,
        reused_tokens=clock.n_cached,
    )


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

    def __init__(self, prompt_tokens: int, n_cached: int, on_progress: Progress | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.n_cached = n_cached
        self._report = on_progress
        self._prefill_started = time.perf_counter()

    def on_progress(self, done: int, total: int) -> None:
        self._prefill_ended = time.perf_counter()
        if self._report:
            self._report(done, total)

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second that were run; the last one belongs to the first step."""
        run = self.prompt_tokens - self.n_cached - 1
        return run / (self._prefill_ended - self._prefill_started)

    def generation_tps(self, tokens: int) -> float:
        return tokens / (time.perf_counter() - self._prefill_ended)
