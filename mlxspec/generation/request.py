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
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..drafting.combined import with_forced
from ..drafting.drafter import Drafter, NoDraft, checked_drafter
from ..drafting.planner import Planner
from ..engine import step as steps
from ..engine.capability import capability_with
from ..engine.draft_model import DraftModelDrafter
from ..engine.prompt_cache import Loan, lent_caches
from ..engine.sampling import Chooser
from ..engine.target import Capability, Target, target_for
from ..errors import OptionError
from .loaded import LoadedModel
from .options import (
    GenerationOptions,
    MakeDrafter,
    cache_options_from,
    check_names,
    checked_max_tokens,
    grammar_of,
    sampling_from,
    stop_texts,
    stop_token_ids,
)
from .response import GenerationResponse, OutputText, SpeculationStats
from .session import CacheLease, SessionTurn

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


class Request:
    """One generation, from being asked for to its last response.

    :meth:`mlxspec.Decoder.new_request` makes it. It runs alone in :func:`.engine.responses`, or
    with others in an :class:`.engine.Engine`.

    Args:
        decoder: the model and its tokenizer.
        prompt: token ids.
        max_tokens: how many tokens to generate at most.
        options: as for :meth:`mlxspec.Decoder.decode`; they are checked here.
        make_drafter: makes its drafter when it starts, given the session.
        receive: called with each response.

    Raises:
        OptionError, PromptCacheError, TypeError: as :meth:`mlxspec.Decoder.decode`, of options.

    Attributes:
        sampling, constraint, stop, stop_tokens, cache_options, session: the options, checked, with
            their defaults; stop_tokens with the tokenizer's own.
        prompt_cache: as many of the given caches as the model uses; None without any.
        report_progress: the option ``on_progress``.
        draft_model: a drafter whose caches go back to the caller, too.
        record_times: each is called with the rows and the time of each step.
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
        decoder: LoadedModel,
        prompt: Sequence[int],
        max_tokens: int,
        options: GenerationOptions,
        make_drafter: MakeDrafter,
        receive: Callable[[GenerationResponse], object] = lambda response: None,
    ) -> None:
        check_names(options)
        self.decoder = decoder
        self.prompt = prompt
        self.max_tokens = checked_max_tokens(max_tokens)
        self.make_drafter = make_drafter
        self.receive = receive
        self.stop = stop_texts(options.get("stop", ()))
        self.session, self.prompt_cache = options.get("session"), options.get("prompt_cache")
        if self.session is not None and self.prompt_cache is not None:
            raise OptionError("session and prompt_cache are given together: choose one")
        self.cache_options = cache_options_from(options, decoder.model)
        if self.prompt_cache is not None:
            self.prompt_cache = lent_caches(self.prompt_cache, decoder.model)
        model = decoder.tokenizer, decoder.vocab_size
        self.sampling = sampling_from(options, decoder.vocab_size)
        self.constraint = grammar_of(options.get("constraint"), *model)
        self.stop_tokens = stop_token_ids(options.get("stop_tokens", ()), *model)
        self.report_progress = options.get("on_progress")
        self.draft_model: DraftModelDrafter | None = None
        self.record_times: list[RecordTime] = [decoder.step_times.record]
        self.state = State.WAITING
        self.error: Exception | None = None
        self.finish_reason: str | None = None
        self.context: list[int] = []
        self.stats = SpeculationStats()
        self.n_cached = self.prefilled = 0
        self.plain_seconds = self.decode_seconds = 0.0
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
        self.context = list(self.prompt)
        self.grammar = self.constraint.begin() if self.constraint else None
        self.drafter = self._new_drafter()
        detokenizer = self.decoder.new_detokenizer()
        self.output = OutputText(detokenizer, self.stop_tokens, self.stop, self.max_tokens)
        self.lease = self._new_lease(self.drafter.branching)

    def _new_drafter(self) -> Drafter:
        """The drafter, which also drafts what the grammar forces."""
        decoder = self.decoder
        drafter: Drafter = NoDraft()
        if self.sampling.allows_drafts and decoder.chain_capability is not Capability.PLAIN:
            drafter = checked_drafter(self.make_drafter(self.session))
        if isinstance(drafter, Planner):
            drafter.guide = self.grammar
        elif self.grammar and not isinstance(drafter, NoDraft):
            drafter = with_forced(drafter, self.grammar)
        return decoder.wrap_drafter(drafter) if decoder.wrap_drafter else drafter

    def _new_lease(self, branching: bool) -> CacheLease:
        """The caches to use, of a target that verifies what this request's drafter proposes."""
        decoder, options = self.decoder, self.cache_options
        model, vocab_size, prompt = decoder.model, decoder.vocab_size, [*self.prompt]
        capability = decoder.capability if branching else decoder.chain_capability
        if self.session is not None:
            return SessionTurn(self.session, prompt, model, capability, vocab_size, options)

        def new_target(caches: Sequence[Any] | None = None) -> Target:
            able = capability if caches is None else capability_with(caches, capability)
            return target_for(model, able, vocab_size, options, caches)

        loan = None if self.prompt_cache is None else Loan(self.prompt_cache, model)
        return CacheLease(new_target, prompt, loan, self.draft_model)

    def start(self) -> steps.Sequence:
        """Take the caches; returns the sequence, whose prompt has not run yet.

        Raises:
            DrafterError: as :meth:`prepare`.
            OptionError, PromptCacheError: the caches cannot be used.
        """
        if self.lease is None:
            self.prepare()
        decoder = self.decoder
        self.state = State.PREFILL
        target, self.n_cached = cast(CacheLease, self.lease).take(self._close_sequence)
        self.sequence = steps.Sequence(
            target,
            self.prompt,
            cast(Drafter, self.drafter),
            Chooser(self.sampling, self.grammar),
            max_tokens=self.max_tokens,
            ends=self.output.add,
            n_cached=self.n_cached,
            limits=steps.PositionLimits(
                decoder.first_crossing, lambda: decoder.draft_end, decoder.chunks_matter
            ),
        )
        self.prefilled = self.n_cached
        self._prefill_started = time.perf_counter()
        return self.sequence

    def on_progress(self, done: int, total: int) -> None:
        """Note how many tokens of the prompt have run; the last call marks the prefill's end."""
        hold_at_exit()
        self.prefilled = self.n_cached + done
        self._prefill_ended = time.perf_counter()
        if self.report_progress:
            self.report_progress(done, total)

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
