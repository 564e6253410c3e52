"""A request: one generation, from the queue to its last response."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.tokenizer_utils import StreamingDetokenizer

from ..drafting.accept import VerifiedStep
from ..drafting.drafter import Drafter, NoDraft
from ..drafting.planner import Planner
from ..engine import step as steps
from ..engine.prompt_cache import CacheLease
from ..engine.sampling import Chooser
from ..engine.target import Capability, Target, target_for
from ..errors import OptionError
from .options import (
    GenerationOptions,
    cache_options_from,
    check_names,
    checked_max_tokens,
    grammar_of,
    sampling_from,
    stop_texts,
    stop_token_ids,
)
from .response import GenerationResponse, SpeculationStats
from .session import Session

if TYPE_CHECKING:
    from ..engine.grammar import Grammar
    from .decoder import Decoder


_log = logging.getLogger(__name__)


class State(StrEnum):
    """The stage of a request."""

    WAITING = "queued"
    PREFILL = "prefill"
    DECODE = "decoding"
    PAUSED = "paused"
    DONE = "ended"


class OutputText:
    """Collects tokens as text segments, and finds the end of the output.

    A stop string may begin and end inside tokens. Text that could be the beginning of a stop string
    is held back until that is decided, so no part of a stop string is ever shown.

    Args:
        detokenizer: a new detokenizer, ready for the output's first token.
        stop_tokens: token ids that end the output; their own text is not part of it.
        stop_strings: strings that end the output and are not part of it.
        max_tokens: the output ends with this many tokens.

    Attributes:
        finish_reason: "stop" or "length" once the output has ended.
        stop_string: the stop string that ended the output, if one did.
    """

    def __init__(
        self,
        detokenizer: StreamingDetokenizer,
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
        """Append a token; return whether the output ends with it."""
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
        """The text that can be shown once ``segment`` is added."""
        text = self._held + segment
        matches = [(at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if matches:
            cut, self.stop_string = min(matches)
            self.finish_reason = "stop"
            self._held = ""
            return text[:cut]
        held = 0 if self.finish_reason else undecided(text, self._stop_strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def undecided(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class Request:
    """One generation, from the queue to its last response.

    :meth:`mlxspec.Decoder.new_request` makes requests. A request runs alone in
    :func:`.scheduler.responses`, or with others in an :class:`.scheduler.Scheduler`.

    Args:
        decoder: the model and its tokenizer.
        prompt: token ids.
        max_tokens: the most tokens to generate.
        options: as for :meth:`mlxspec.Decoder.stream`; the request checks them.
        make_drafter: makes the drafter or planner when the request starts, given the output's
            grammar, if any; None for plain decoding.
        receive: called with each response.

    Raises:
        OptionError, FileError, TypeError: an option is wrong, as for
            :meth:`mlxspec.Decoder.stream`.

    Attributes:
        sampling, constraint, stop, stop_tokens, cache_options: the checked options, with
            their defaults. ``stop_tokens`` includes the tokenizer's own.
        lease: the session or caches that the request has borrowed, until :meth:`close`; None for
            new caches.
        takes_drafts: whether the drafter is used at all.
        report_progress: the value of the option ``on_progress``.
        at_end: called at the end, after the last response, if any.
        state: the request's stage.
        error: the exception that ended the request, if any.
        finish_reason: the last response's finish reason, once it has been made.
        context: the prompt and the tokens of the responses so far.
        stats: figures of the steps so far.
        n_cached: how many of the prompt's tokens were in a cache.
        prefilled: how many of the prompt's tokens have run or were in a cache.
        due: the scheduler's number of prompt tokens at which the prompt should have run.
        unread: how many responses the consumer has not read yet, if a scheduler counts them.
        recorded: as for :class:`.Sequence`, to set before :meth:`start`.
        output: the output's text, set by :meth:`start`.
        sequence: the decoding state, set from :meth:`start` to :meth:`close`.
        prefill: the remaining chunks of the prompt, once the first has run.
    """

    output: OutputText

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        max_tokens: int,
        options: GenerationOptions,
        make_drafter: Callable[[Grammar | None], Drafter | Planner | None],
        receive: Callable[[GenerationResponse], object] = lambda response: None,
    ) -> None:
        check_names(options)
        self.decoder = decoder
        self.prompt = prompt
        self.max_tokens = checked_max_tokens(max_tokens)
        self.make_drafter = make_drafter
        self.receive = receive
        self.stop = stop_texts(options.get("stop", ()))
        self.cache_options = cache_options_from(options, decoder.model)
        self.lease: Session | CacheLease | None = options.get("session")
        caches = options.get("prompt_cache")
        if self.lease is not None and caches is not None:
            raise OptionError("session and prompt_cache are given together: choose one")
        if caches is not None:
            self.lease = CacheLease(caches, decoder.model)
        model = decoder.tokenizer, decoder.loaded.vocab_size
        self.sampling = sampling_from(options, decoder.loaded.vocab_size)
        verifies = decoder.loaded.chain_capability is not Capability.PLAIN
        self.takes_drafts = self.sampling.allows_drafts and verifies
        self.constraint = grammar_of(options.get("constraint"), *model)
        self.stop_tokens = stop_token_ids(options.get("stop_tokens", ()), *model)
        self.report_progress = options.get("on_progress")
        self.at_end: Callable[[], object] = lambda: None
        self.state = State.WAITING
        self.error: Exception | None = None
        self.finish_reason: str | None = None
        self.context = list(prompt)
        self.stats = SpeculationStats()
        self.n_cached = self.prefilled = self.due = 0
        self.unread = 0
        self.recorded: list[VerifiedStep] | None = None
        self.sequence: steps.Sequence | None = None
        self.prefill: Generator[tuple[int, int], None, None] | None = None
        self._prefill_started = self._prefill_ended = 0.0

    @property
    def done(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self.state is State.DONE

    @property
    def generated(self) -> int:
        """How many tokens have been passed on in responses."""
        return len(self.context) - len(self.prompt)

    def start(self) -> None:
        """Take the caches, and make the sequence, whose prompt has not run yet.

        Raises:
            MlxspecError: the user's function for drafters did not return one.
            OptionError, FileError: the caches cannot be used.
        """
        decoder = self.decoder
        self.state = State.PREFILL
        grammar = self.constraint.begin(self.max_tokens) if self.constraint else None
        made = self.make_drafter(grammar) if self.takes_drafts else None
        drafter = NoDraft() if made is None else made
        if isinstance(drafter, Planner):
            drafter.stop_tokens = self.stop_tokens
        self.output = OutputText(
            decoder.new_detokenizer(), self.stop_tokens, self.stop, self.max_tokens
        )
        target = self._take_target(drafter.branching)
        length = target.length + len(self.prompt) - self.n_cached - 1
        self.sequence = steps.Sequence(
            target,
            self.prompt,
            drafter,
            Chooser(self.sampling, grammar),
            max_tokens=self.max_tokens,
            ends=self.output.add,
            n_cached=self.n_cached,
            in_mlx_lms_chunks=decoder.loaded.chunks_matter(length, target.cache),
        )
        self.sequence.recorded = self.recorded
        self.prefilled = self.n_cached
        self._prefill_started = time.perf_counter()

    def _take_target(self, branching: bool) -> Target:
        """Take the target, with caches that can verify drafts, including trees if ``branching``.

        Raises:
            OptionError, FileError: the caches cannot be used.
        """
        loaded = self.decoder.loaded
        capability = loaded.capability if branching else loaded.chain_capability
        of_target = loaded, capability, self.cache_options
        if isinstance(self.lease, Session):
            target = self.lease.take(self.prompt, *of_target)
            self.n_cached = target.length
            return target
        return self.lease.take(*of_target) if self.lease else target_for(*of_target)

    def on_progress(self, done: int, total: int) -> None:
        """Record how many of the prompt's tokens have run; the last call marks the prefill's
        end.
        """
        self.prefilled = self.n_cached + done
        self._prefill_ended = time.perf_counter()
        if self.report_progress:
            self.report_progress(done, total)

    def on_step(self, step: VerifiedStep, seconds: float, cost: float) -> None:
        """Record a step; a scheduler calls this after each step, before the step's responses.

        Args:
            step: this request's part of the step.
            seconds: the wall time of the whole step.
            cost: the step's time in plain steps; NaN if unknown.
        """
        stats = self.stats
        self.stats = SpeculationStats(
            steps=stats.steps + 1,
            rows=stats.rows + len(step.tree),
            drafted=stats.drafted + step.drafted,
            accepted=stats.accepted + len(step.accepted),
            emitted=stats.emitted + len(step.tokens),
            cost=stats.cost + cost,
        )

    def responses_of(self, step: VerifiedStep) -> Iterator[GenerationResponse]:
        """One response per token of a step, up to the output's last token."""
        for index, text in enumerate(self.output.take()):
            response = self._response(step, index, text)
            self.finish_reason = response.finish_reason
            # Last, so that after an interrupt no token is counted without its response.
            self.context.append(response.token)
            yield response
            if response.finish_reason:
                return

    def _response(self, step: VerifiedStep, index: int, text: str) -> GenerationResponse:
        generated, n_prompt = self.generated + 1, len(self.prompt)
        # The prompt's last token belongs to the first step.
        prefill_seconds = self._prefill_ended - self._prefill_started
        is_last = generated == self.stats.emitted
        return GenerationResponse(
            text=text,
            token=step.tokens[index],
            logprobs=step.logprobs[index],
            from_draft=index < len(step.accepted),
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
        """End the sequence and return the caches; may be called more than once."""
        try:
            with ExitStack() as ending:  # runs every callback, even if one fails
                if self.lease:
                    # After an error of MLX, a session may hold arrays that were never computed.
                    lost = isinstance(self.lease, Session) and isinstance(self.error, RuntimeError)
                    kept = () if lost else self.context
                    ending.callback(self.lease.give_back, self.prompt, kept)
                if self.sequence:
                    ending.callback(self.sequence.close)
        finally:
            if self.sequence and self.stats.steps:
                _log.debug(
                    "generation ended (%s): %d prompt tokens, %d of them cached; %d tokens in %d "
                    "steps, %.1f a second; %d of %d drafted tokens accepted",
                    self.output.finish_reason or "left",
                    len(self.prompt),
                    self.n_cached,
                    self.generated,
                    self.stats.steps,
                    self._generation_tps(self.generated),
                    self.stats.accepted,
                    self.stats.drafted,
                )
            # A finished request, which only a full collection frees, must not keep what is large.
            self.lease = self.sequence = self.prefill = self.constraint = None
