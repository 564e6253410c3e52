"""A generation as users see it: a response per token, its text, its end, its steps' times."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from statistics import median
from typing import Protocol

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit

from ..draft.drafter import VerifiedStep
from ..engine import step as engine
from ..engine.target import Progress, Target
from .process_end import hold_at_exit
from .response import GenerationResponse, SpeculationStats, StepTime

_log = logging.getLogger(__name__)

_KEPT = 64  # recent steps per number of rows: enough for a median, few enough to show a hot chip

RecordTime = Callable[[int, float, bool], None]
"""Told a step's rows (pending ones included), its wall time in seconds, and whether it was
pipelined."""


class CacheOwner:
    """Owns the caches that a generation continues; by default nobody else uses them meanwhile."""

    keeps = True
    """Whether somebody needs the caches after the generation's end."""

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        """Begin: the target, and how many of the prompt's tokens its cache holds.

        Args:
            close: ends the generation's use of the target; for an owner who gives the caches to
                somebody else before the generation has ended.
        """
        raise NotImplementedError

    def pause(self, context: Sequence[int]) -> None:
        """The consumer gets a response; ``context`` is the prompt and the output so far."""

    def resume(self) -> None:
        """The consumer asks for the next response."""

    def give_back(self, context: Sequence[int]) -> None:
        """The generation has ended, in whatever way."""


class NewCache(CacheOwner):
    """Caches of the generation's own, which end with it."""

    keeps = False

    def __init__(self, new_target: Callable[[], Target]) -> None:
        self._new_target = new_target

    def take(self, close: Callable[[], None]) -> tuple[Target, int]:
        return self._new_target(), 0


class Generation:
    """One generation: who owns its caches, its sequence, and the responses its steps become.

    Args:
        owner: of the caches.
        prompt: token ids.
        new_sequence: makes the sequence, given the target and how many of the prompt's tokens
            its cache holds; its ``ends`` is ``output.add``.
        output: turns tokens into text and finds the end.
        record_times: each is called with the rows and the time of each step.
        on_progress: called with prompt tokens done and prompt tokens in all.

    Attributes:
        context: the prompt and the tokens of the responses so far.
    """

    def __init__(
        self,
        owner: CacheOwner,
        prompt: Sequence[int],
        new_sequence: Callable[[Target, int], engine.Sequence],
        output: OutputText,
        record_times: Sequence[RecordTime],
        on_progress: Progress | None,
    ) -> None:
        self.owner = owner
        self.context = list(prompt)
        self._n_prompt = len(prompt)
        self._new_sequence = new_sequence
        self._output = output
        self._record_times = record_times
        self._on_progress = on_progress
        self._sequence: engine.Sequence | None = None
        self._stats = SpeculationStats()
        self._logged = False

    def take(self) -> engine.Sequence:
        """Take the caches; returns the sequence, which has not begun."""
        target, n_cached = self.owner.take(self._close_sequence)
        self._sequence = self._new_sequence(target, n_cached)
        self._clock = _Clock(self._n_prompt, n_cached, self._on_progress)
        return self._sequence

    def on_progress(self, done: int, total: int) -> None:
        """The prefill has come so far."""
        hold_at_exit()
        self._clock.on_progress(done, total)

    def responses_of(self, step: engine.DecodedStep) -> Iterator[GenerationResponse]:
        """One response per token of a step, up to the last one of the output."""
        verified = step.verified
        for record_time in self._record_times:
            record_time(verified.rows, verified.seconds, verified.pipelined)
        self._stats = _updated(self._stats, verified)
        for index, text in enumerate(self._output.take()):
            generated = len(self.context) - self._n_prompt + 1
            response = _response(
                step, index, text, self._stats, self._clock, generated, self._output
            )
            # Last, so that a token whose response an interrupt prevents is not counted.
            self.context.append(response.token)
            yield response
            if response.finish_reason:
                return

    def close(self) -> None:
        """Give the caches back, and end the sequence; may be called more than once."""
        try:
            self.owner.give_back(self.context)
        finally:
            self._close_sequence()
            self._log_end()

    def _log_end(self) -> None:
        if self._logged or not self._sequence or not _log.isEnabledFor(logging.DEBUG):
            return
        self._logged = True
        stats, clock = self._stats, self._clock
        generated = len(self.context) - self._n_prompt
        _log.debug(
            "generation ended (%s): %d prompt tokens, %d of them kept from before; %d tokens in "
            "%d steps, %.1f a second; %d of %d drafted tokens accepted",
            self._output.finish_reason or "left",
            self._n_prompt,
            clock.n_cached,
            generated,
            stats.steps,
            clock.generation_tps(generated) if stats.steps else 0.0,
            stats.accepted,
            stats.drafted,
        )

    def _close_sequence(self) -> None:
        if self._sequence:
            self._sequence.close()


def responses(generation: Generation) -> Generator[GenerationResponse, None, None]:
    """Run a generation alone.

    The last response comes after everything is closed, so that a consumer who has it may begin
    the conversation's next turn.
    """
    last: GenerationResponse | None = None
    owner, context = generation.owner, generation.context
    try:
        sequence = generation.take()
        with wired_limit(sequence.target.model, [generation_stream]):
            sequence.begin(generation.on_progress)
            while not last:
                hold_at_exit()
                step = engine.step(sequence)
                for response in generation.responses_of(step):
                    if response.finish_reason:
                        last = response
                        break
                    owner.pause(context)
                    yield response
                    owner.resume()
    finally:
        generation.close()
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
    is_last = generated == stats.emitted
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
        finish_reason=output.finish_reason if is_last else None,
        reused_tokens=clock.n_cached,
        stop_string=output.stop_string if is_last else None,
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
        """Prompt tokens per second of the prefill; the last token belongs to the first step."""
        run = self.prompt_tokens - self.n_cached - 1
        return run / (self._prefill_ended - self._prefill_started)

    def generation_tps(self, tokens: int) -> float:
        return tokens / (time.perf_counter() - self._prefill_ended)


class Detokenizer(Protocol):
    """Turns tokens into text as they come; mlx-lm's interface."""

    def reset(self) -> None: ...
    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...
    @property
    def last_segment(self) -> str: ...


class OutputText:
    """Collects tokens as text segments and finds the end of the output.

    A stop string may begin and end inside tokens; text that could be the beginning of one is
    held back until it is decided, so nothing that belongs to a stop string is ever shown.

    Args:
        detokenizer: fresh, ready for the output's first token.
        stop_tokens: token ids that end the output; their own text is not part of it.
        stop_strings: texts that end the output before them.
        max_tokens: with this many tokens the output is full.

    Attributes:
        finish_reason: "stop" or "length" once it has ended.
        stop_string: the one that ended it.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_tokens: Collection[int],
        stop_strings: Sequence[str],
        max_tokens: int,
    ) -> None:
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self._detokenizer = detokenizer
        self._stop_tokens = stop_tokens
        self._stop_strings = stop_strings
        self._left = max_tokens
        self._held = ""
        self._segments: list[str] = []

    def add(self, token: int) -> bool:
        """Append a token; returns whether the output ends with it."""
        self._left -= 1
        if token in self._stop_tokens:
            self.finish_reason = "stop"
        else:
            self._detokenizer.add_token(token)
            if self._left == 0:
                self.finish_reason = "length"
        if self.finish_reason:
            self._detokenizer.finalize()
        self._segments.append(self._release(self._detokenizer.last_segment))
        return self.finish_reason is not None

    def take(self) -> list[str]:
        """The segments since the last call, one per token."""
        segments, self._segments = self._segments, []
        return segments

    def _release(self, segment: str) -> str:
        """What may be shown now that ``segment`` has come."""
        text = self._held + segment
        found = [(at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            cut, self.stop_string = min(found)
            self.finish_reason = "stop"
            self._held = ""
            return text[:cut]
        held = 0 if self.finish_reason else self._undecided(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stop_strings):
                return length
        return 0


class StepTimes:
    """T(rows): the wall time of whole steps by their number of rows.

    A whole step is proposing, forward, reading, acceptance and cache commit. Times hold for one
    model on one machine in one data type. Threads may record at once.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[int, bool], deque[float]] = {}
        self._steps: Counter[tuple[int, bool]] = Counter()
        self._lock = threading.Lock()

    def record(self, rows: int, seconds: float, pipelined: bool = False) -> None:
        """Add the wall time of one step."""
        with self._lock:
            self._recent.setdefault((rows, pipelined), deque(maxlen=_KEPT)).append(seconds)
            self._steps[rows, pipelined] += 1

    def table(self) -> list[StepTime]:
        """One entry per kind of step that has run, fewest rows first."""
        with self._lock:
            seconds = {kind: median(recent) for kind, recent in self._recent.items()}
            steps = self._steps.copy()
        one_row = seconds.get((1, True)) or seconds.get((1, False))
        return [
            StepTime(*kind, steps[kind], time, time / one_row if one_row else None)
            for kind, time in sorted(seconds.items())
        ]
