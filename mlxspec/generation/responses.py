"""A generation as users see it: one response per token, from caches that somebody owns."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from ..draft.drafter import VerifiedStep
from ..engine import step as engine
from ..engine.target import Progress, Target
from .response import GenerationResponse, SpeculationStats, StepTimes
from .text import OutputText


class CacheOwner(Protocol):
    """Whose caches a generation continues, and what they see of it."""

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        """Begin: the target, and how many of the prompt's tokens its cache holds.

        Args:
            close: ends the generation's use of the target; for an owner who gives the caches to
                somebody else before the generation has ended.
        """

    def pause(self, context: Sequence[int]) -> None:
        """The consumer gets a response; ``context`` is the prompt and the output so far."""

    def resume(self) -> None:
        """The consumer asks for the next response."""

    def give_back(self, context: Sequence[int]) -> None:
        """The generation has ended, in whatever way."""


class NewCache:
    """Caches of the generation's own, which end with it."""

    def __init__(self, new_target: Callable[[], Target]) -> None:
        self._new_target = new_target

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        return self._new_target(), 0

    def pause(self, context: Sequence[int]) -> None:
        """Nobody else sees them."""

    def resume(self) -> None:
        """Nobody else has used them."""

    def give_back(self, context: Sequence[int]) -> None:
        """Nobody wants them."""


def responses(
    owner: CacheOwner,
    prompt: Sequence[int],
    new_sequence: Callable[[Target, int], engine.Sequence],
    output: OutputText,
    step_times: StepTimes,
    on_progress: Progress | None,
) -> Generator[GenerationResponse, None, None]:
    """Run a sequence and turn its steps into responses.

    The last response comes when all is closed, so that the conversation's next turn may begin
    with it at hand.

    Args:
        owner: of the caches.
        prompt: token ids.
        new_sequence: makes the sequence of a target that holds so many of the prompt's tokens.
        output: where the tokens become text and the end is found.
        step_times: told each step's.
        on_progress: told how far the prompt is.
    """
    context = list(prompt)
    sequence: engine.Sequence | None = None
    last: GenerationResponse | None = None

    def close() -> None:
        if sequence:
            sequence.close()

    target, n_cached = owner.take(close)
    try:
        sequence = new_sequence(target, n_cached)
        with wired_limit(target.model, [generation_stream]):
            clock = _Clock(len(prompt), n_cached, on_progress)
            sequence.begin(clock.on_progress)
            stats = SpeculationStats()
            while not last:
                (step,) = engine.step([sequence])
                verified = step.verified
                step_times.record(verified.rows, verified.seconds, verified.pipelined)
                stats = _updated(stats, verified)
                for index, text in enumerate(output.take()):
                    context.append(verified.tokens[index])
                    response = _response(
                        step, index, text, stats, clock, len(context) - len(prompt), output
                    )
                    if response.finish_reason:
                        last = response
                        break
                    owner.pause(context)
                    yield response
                    owner.resume()
    finally:
        try:
            close()
        finally:
            owner.give_back(context)
    yield last


def _response(
    step: engine.DecodedStep,
    index: int,
    text: str,
    stats: SpeculationStats,
    clock: _Clock,
    generated: int,
    output: OutputText,
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
        finish_reason=output.finish_reason if generated == stats.emitted else None,
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
