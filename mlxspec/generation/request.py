"""A request: one generation, from being asked for to its last response."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from enum import StrEnum
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.tokenizer_utils import StreamingDetokenizer

from ..drafting.costs import LiveCosts
from ..drafting.drafter import Drafter
from ..engine import step as steps
from ..engine.joint import JointMode
from ..engine.target import Target
from .options import CheckedOptions, GenerationOptions, MakeDrafter, Prompt
from .response import GenerationResponse, OutputText, SpeculationStats, StepTimes
from .session import CacheLease

if TYPE_CHECKING:
    from ..engine.grammar import GrammarState


_log = logging.getLogger(__name__)


RecordTime = Callable[[int, float, bool], None]
"""Called with a step's rows (pending ones included), its wall time in seconds, and whether it was
pipelined."""


class State(StrEnum):
    """The stage that a request is in."""

    WAITING = "queued"
    PREFILL = "prefill"
    DECODE = "decoding"
    PAUSED = "paused"
    DONE = "ended"


class DecoderLike(Protocol):
    """What requests and engines need of a :class:`mlxspec.Decoder`."""

    step_times: StepTimes

    @property
    def plans(self) -> bool: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def costs(self) -> LiveCosts: ...
    @property
    def joint_mode(self) -> JointMode: ...
    def new_request(
        self,
        prompt: Prompt,
        max_tokens: int,
        options: GenerationOptions,
        make_drafter: MakeDrafter | None = None,
        receive: Callable[[GenerationResponse], object] = ...,
    ) -> Request: ...
    def drafter_of(self, request: Request) -> Drafter: ...
    def lease_for(self, request: Request) -> CacheLease: ...
    def new_sequence(self, request: Request, target: Target) -> steps.Sequence: ...
    def new_detokenizer(self) -> StreamingDetokenizer: ...


class Request:
    """One generation, from being asked for to its last response.

    :meth:`mlxspec.Decoder.new_request` makes it. It runs alone in :func:`responses`, or with
    others in an :class:`mlxspec.generation.engine.Engine`.

    Args:
        decoder: whose model and tokenizer it uses.
        prompt: token ids.
        max_tokens: how many tokens to generate at most.
        options: checked.
        make_drafter: makes its drafter when it starts, given the session.
        receive: called with each response in an engine.

    Attributes:
        record_times: each is called with the rows and the time of each step.
        lease_more: wraps the lease of the model's caches in a lease of further caches.
        state: the stage that it is in.
        error: what ended it, if that was a fault.
        finish_reason: of its last response, once that has come.
        context: the prompt and the tokens of the responses so far.
        stats: of its steps so far.
        n_cached: how many of the prompt's tokens were in a cache.
        prefilled: how many of them have run, or were in a cache.
        plain_seconds: how long the tokens of its joint steps would have taken without drafts, as
            far as that is known.
        decode_seconds: how long these steps took.
        unread: responses that its consumer has not read yet, where an engine counts them.
        grammar, output: from :meth:`prepare` on.
        drafter, lease: from :meth:`prepare` to :meth:`close`.
        sequence: its decoding state, from :meth:`start` to :meth:`close`.
        prefill: the chunks of its prompt that are left, once the first has run.
    """

    grammar: GrammarState | None
    output: OutputText

    def __init__(
        self,
        decoder: DecoderLike,
        prompt: Sequence[int],
        max_tokens: int,
        options: CheckedOptions,
        make_drafter: MakeDrafter,
        receive: Callable[[GenerationResponse], object] = lambda response: None,
    ) -> None:
        self.decoder = decoder
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.options = options
        self.make_drafter = make_drafter
        self.receive = receive
        self.record_times: list[RecordTime] = [decoder.step_times.record]
        self.lease_more: Callable[[CacheLease], CacheLease] = lambda lease: lease
        self.state = State.WAITING
        self.error: Exception | None = None
        self.finish_reason: str | None = None
        self.context: list[int] = []
        self.stats = SpeculationStats()
        self.n_cached = self.prefilled = 0
        self.plain_seconds = 0.0
        self.decode_seconds = 0.0
        self.unread = 0
        self.drafter: Drafter | None = None
        self.lease: CacheLease | None = None
        self.sequence: steps.Sequence | None = None
        self.prefill: Generator[tuple[int, int], None, None] | None = None
        self._prefill_started = self._prefill_ended = 0.0

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state is State.DONE

    @property
    def generated(self) -> int:
        """How many tokens have been handed out in responses."""
        return max(0, len(self.context) - len(self.prompt))

    def prepare(self) -> None:
        """Make the drafter, and arrange for the caches; :meth:`start` does so otherwise.

        Raises:
            DrafterError: ``make_drafter`` returned something else.
        """
        decoder, options = self.decoder, self.options
        self.context = list(self.prompt)
        self.grammar = options.grammar.begin() if options.grammar else None
        self.drafter = decoder.drafter_of(self)
        self.output = OutputText(
            decoder.new_detokenizer(), options.stop_tokens, options.stop, self.max_tokens
        )
        self.lease = self.lease_more(decoder.lease_for(self))

    def start(self) -> steps.Sequence:
        """Take the caches; returns the sequence, whose prompt has not run yet.

        Raises:
            DrafterError: as :meth:`prepare`.
            OptionError, PromptCacheError: the caches cannot be used.
        """
        if self.lease is None:
            self.prepare()
        assert self.lease is not None
        self.state = State.PREFILL
        target, self.n_cached = self.lease.take(self._close_sequence)
        self.sequence = self.decoder.new_sequence(self, target)
        self.prefilled = self.n_cached
        self._prefill_started = time.perf_counter()
        return self.sequence

    def on_progress(self, done: int, total: int) -> None:
        """Note how many tokens of the prompt have run; the last call marks the prefill's end."""
        hold_at_exit()
        self.prefilled = self.n_cached + done
        self._prefill_ended = time.perf_counter()
        if self.options.on_progress:
            self.options.on_progress(done, total)

    def on_step(self, step: steps.DecodedStep, seconds: float, plain_seconds: float | None) -> None:
        """Called by an engine after each step, before the step's responses.

        Args:
            step: its part in the step.
            seconds: the wall time of the whole step.
            plain_seconds: how long its tokens would have taken without drafts, if known.
        """
        if plain_seconds is not None:
            self.decode_seconds += seconds
            self.plain_seconds += plain_seconds

    def on_response(self, response: GenerationResponse) -> None:
        """Called by an engine with each response."""
        self.receive(response)

    def on_end(self) -> None:
        """Called by an engine at the end, after the last response if there is one."""

    def responses_of(self, step: steps.DecodedStep) -> Iterator[GenerationResponse]:
        """One response per token of a step, up to the last one of the output."""
        verified = step.verified
        for record_time in self.record_times:
            record_time(verified.rows, verified.seconds, verified.pipelined)
        stats = self.stats
        self.stats = SpeculationStats(
            steps=stats.steps + 1,
            rows=stats.rows + len(verified.tree),
            drafted=stats.drafted + verified.drafted,
            accepted=stats.accepted + len(verified.accepted),
            emitted=stats.emitted + len(verified.tokens),
        )
        for index, text in enumerate(self.output.take()):
            response = self._response(step, index, text)
            self.finish_reason = response.finish_reason
            # Last, so that a token whose response an interrupt prevents is not counted.
            self.context.append(response.token)
            yield response
            if response.finish_reason:
                return

    def _response(self, step: steps.DecodedStep, index: int, text: str) -> GenerationResponse:
        generated, n_prompt = self.generated + 1, len(self.prompt)
        # The prompt's last token belongs to the first step.
        prefill_seconds = self._prefill_ended - self._prefill_started
        is_last = generated == self.stats.emitted
        return GenerationResponse(
            text=text,
            token=step.verified.tokens[index],
            logprobs=step.logprobs[index],
            from_draft=index < len(step.verified.accepted),
            prompt_tokens=n_prompt,
            prompt_tps=(n_prompt - self.n_cached - 1) / prefill_seconds,
            generation_tokens=generated,
            generation_tps=self._generation_tps(generated),
            peak_memory=mx.get_peak_memory() / 1e9,
            stats=self.stats,
            finish_reason=self.output.finish_reason if is_last else None,
            reused_tokens=self.n_cached,
            stop_string=self.output.stop_string if is_last else None,
        )

    def _generation_tps(self, tokens: int) -> float:
        return tokens / (time.perf_counter() - self._prefill_ended)

    def close(self) -> None:
        """Give the caches back, and end the sequence; may be called more than once."""
        try:
            if self.lease:
                self.lease.give_back(self.context)
        finally:
            self._close_sequence()
            if self.sequence and _log.isEnabledFor(logging.DEBUG):
                self._log_end()
            # A finished request that is kept must not keep caches and index alive.
            self.drafter = self.lease = self.sequence = self.prefill = None

    def _log_end(self) -> None:
        stats, generated = self.stats, self.generated
        _log.debug(
            "generation ended (%s): %d prompt tokens, %d of them kept from before; %d tokens in "
            "%d steps, %.1f a second; %d of %d drafted tokens accepted",
            self.output.finish_reason or "left",
            len(self.prompt),
            self.n_cached,
            generated,
            stats.steps,
            self._generation_tps(generated) if stats.steps else 0.0,
            stats.accepted,
            stats.drafted,
        )

    def _close_sequence(self) -> None:
        if self.sequence:
            self.sequence.close()


def responses(
    request: Request, record_time: RecordTime | None = None
) -> Generator[GenerationResponse, None, None]:
    """Run a request alone.

    A loop of its own, not an engine with one request: each response of a step is yielded with
    the caches as documented, which a consumer may use before it asks for the next one.

    Args:
        request: has not begun.
        record_time: called with the rows and the time of each step.

    Raises:
        DrafterError: as :meth:`Request.prepare`, before the first response is asked for.
    """
    request.prepare()
    if record_time:
        request.record_times.append(record_time)
    return _responses(request)


def _responses(request: Request) -> Generator[GenerationResponse, None, None]:
    last: GenerationResponse | None = None
    lease, context = request.lease, request.context
    assert lease
    try:
        sequence = request.start()
        with wired_limit(sequence.target.model, [generation_stream]):
            sequence.begin(request.on_progress)
            while not last:
                hold_at_exit()
                for response in request.responses_of(steps.step(sequence)):
                    if response.finish_reason:
                        last = response
                        break
                    lease.pause(context)
                    yield response
                    lease.resume()
    finally:
        request.state = State.DONE
        request.close()
    # After everything is closed, so that the consumer of the last response may begin the next turn.
    yield last


PATIENCE = 10.0  # seconds; a step, or a chunk of a prompt, takes less
THREADS_END = 0.05  # seconds for a thread to end, or to come back from its consumer

_other_threads = False
"""Whether a thread besides the main one has generated."""

_ending: tuple[int, float] | None = None
"""Once the process ends: the thread that ends it, and until when others are held."""


def hold_at_exit() -> None:
    """Block this thread once the process is ending; called before each step and chunk.

    Up to Python 3.13 a finalizing interpreter stops every other thread that asks for its lock. MLX
    cannot be stopped like that: the process would be aborted ("terminate called without an active
    exception"). A thread that waits here does not ask for the lock.
    """
    global _other_threads
    if not _other_threads and threading.current_thread() is not threading.main_thread():
        _other_threads = True
    if _ending and _ending[0] != threading.get_ident():
        # Not forever: at its end the program may join this thread.
        threading.Event().wait(max(0.0, _ending[1] - time.monotonic()))


@atexit.register
def _hold_threads() -> None:
    """Wait until no other thread generates."""
    global _ending, _other_threads
    until = time.monotonic() + PATIENCE
    _ending = threading.get_ident(), until
    while _others_generate() and time.monotonic() < until:
        _other_threads = True
        time.sleep(0.001)
    if _other_threads:
        time.sleep(THREADS_END)  # without the interpreter's lock


_ROOMS = "mlxspec.compat.", "mlxspec.engine.", "mlxspec.generation."


def _others_generate() -> bool:
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return any(map(_generates, frames.values()))


def _generates(frame: FrameType | None) -> bool:
    """Whether the thread of this frame is in code that may run the model, and is not held."""
    while frame:
        if frame.f_code is hold_at_exit.__code__:
            return False
        if frame.f_globals.get("__name__", "").startswith(_ROOMS):
            return True
        frame = frame.f_back
    return False
