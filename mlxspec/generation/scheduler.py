"""Runs one request, or several at once."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from mlx_lm.generate import generation_stream, wired_limit

from ..drafting.accept import VerifiedStep
from ..engine.joint import JointMode
from ..engine.step import Batch, Sequence
from ..errors import OptionError
from .request import Request, State
from .response import GenerationResponse
from .thread_end import hold_at_exit

if TYPE_CHECKING:
    from .decoder import Decoder

# Tokens of a prompt. Smaller chunks barely shorten a stall, and larger ones are no faster.
_LEAST_CHUNK, _MOST_CHUNK = 16, 2048
# Even if nothing waits, a chunk should end soon, since nothing can interrupt it. Chunks of this
# many tokens are about as fast as larger ones where they take long.
_SECONDS, _LEAST_ALONE = 1.0, 256
STALL = 1.0  # seconds that decoding requests wait for prompts at most, in all schedulers together
_PAUSE = 0.15  # seconds between looks for cancelled requests while only prompts run
_MOST_STEPS = 3  # plain steps that decoding requests may wait for prompts
_CHANGE = 0.3  # weight of the newest chunk in the running average of the prefill's speed
LEAST_UNREAD = 16  # a paused request resumes once this few responses are unread


class Scheduler:
    """Runs requests with a decoder's model, in shared forwards if the model allows.

    Each turn runs chunks of prompts for as long as decoding requests may wait, and then one step of
    every request whose prompt is done. Short prompts share a chunk. Requests start in order of
    arrival. The tokens of prompts that have run are a clock: a prompt of 100 tokens is
    due 100 tokens after its start, and the one that is due first runs. So short prompts overtake
    long ones, and none is overtaken for long. If a request's drafter, processor or consumer raises,
    only that request ends.

    Args:
        decoder: the model and its tokenizer.
        max_active: the most active requests, that is, running and not paused. Others wait to start,
            but a paused request that resumes becomes active at once, even beyond this number. With
            1, each request has its own forwards.
        stall: how many seconds decoding requests may wait for others' prompts between two steps, if
            three plain steps do not take less. The speed of earlier chunks decides the size of the
            next one, except for prompts whose result depends on their chunks (see
            :meth:`.LoadedModel.chunks_matter`). Use ``math.inf`` for batches, where only the total
            time counts: prompts run first, and others' drafts may delay a request.
        max_unread: a request with this many unread responses is paused until :meth:`has_read`
            has counted most of them; None never pauses.
        spare: as for :class:`.engine.joint.Joint`.

    Raises:
        OptionError: ``max_active`` is below 1.

    Attributes:
        prefill_seconds: the time spent on prompts so far.
        steps: how many steps have run so far; a shared step counts once.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_active: int = 32,
        stall: float = STALL,
        max_unread: int | None = None,
        spare: int | None = None,
    ) -> None:
        if max_active < 1:
            raise OptionError(f"max_active is {max_active}: set it to 1 or more")
        self._decoder = decoder
        self._max_active = max_active
        self.stall = stall
        self._max_unread = max_unread
        self._spare = spare
        self.prefill_seconds = 0.0
        self.steps = 0
        self._step_seconds = 0.0
        self._plain_seconds = math.inf  # of a step without drafts
        self._forward_seconds = 0.0  # the least of these so far, which any forward takes
        self._prefill_speed = 0.0  # tokens per second beyond that
        self._prompt_tokens = 0  # that have run
        self._deadline = math.inf  # when this turn's prompts must stop
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Requests that have started."""
        self._joins = False
        """Whether the batch is made for several sequences."""
        self._batch = self._new_batch(JointMode.ALONE)

    def add(self, *requests: Request) -> None:
        """Queue requests; they start when others leave room."""
        self._waiting += requests

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    @property
    def is_active(self) -> bool:
        """Whether some request has started and is not paused."""
        return bool(self._active())

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """End a request before its next step, unless it has already ended."""
        if not request.done:
            self._end(request, error)

    def has_read(self, request: Request, count: int) -> None:
        """Count ``count`` responses as read; resume a paused request once few are unread.

        Up to ``LEAST_UNREAD`` read responses may be counted later, with further ones.
        """
        request.unread -= count
        if request.unread <= LEAST_UNREAD and request.state is State.PAUSED:
            request.state = State.DECODE

    @property
    def room(self) -> int:
        """How many more requests could start now."""
        return self._max_active - len(self._active()) - len(self._waiting)

    def run(self) -> None:
        """Take turns until all requests have ended."""
        with self.running():
            while self.turn():
                pass

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which turns run; leaving it ends all requests."""
        with wired_limit(self._decoder.model, [generation_stream]), closing(self):
            yield

    def turn(self, hurried: bool = False) -> bool:
        """Run prompts for a while, then one step of each request whose prompt is done.

        Args:
            hurried: whether something else waits for the end of the turn, as decoding requests do.

        Returns:
            whether any request took part. If none did, the next turn has nothing to do either,
            unless a request is added or resumed, or room is made.
        """
        self.start_waiting()
        took_part = self.is_active
        for _ in self.responses_of_turn(hurried):
            pass
        return took_part

    def start_waiting(self) -> None:
        """Start waiting requests while fewer than ``max_active`` are active."""
        hold_at_exit()
        while len(self._active()) < self._max_active and (request := self.admit_next()):
            self._running.append(request)  # first, so that an interrupt does not lose it
            self._waiting.remove(request)
            try:
                request.start()
                assert request.sequence is not None
                request.due = self._prompt_tokens + len(request.sequence.tokens_to_prefill)
            except Exception as error:
                self._end(request, error)

    def responses_of_turn(self, hurried: bool = False) -> Iterator[GenerationResponse]:
        """A turn of the running requests; yields each response except a request's last."""
        hold_at_exit()
        self._prefill(hurried)
        if decoding := self._in(State.DECODE):
            yield from self._step(decoding, hurried)

    def close(self, error: Exception | None = None) -> None:
        """End all requests."""
        for request in dict.fromkeys([*self._waiting, *self._running]):
            self._end(request, error)

    def admit_next(self) -> Request | None:
        """Choose the waiting request that starts now; None if none may."""
        return self._waiting[0] if self._waiting else None

    def _active(self) -> list[Request]:
        """The running requests that are not paused."""
        return [request for request in self._running if request.state is not State.PAUSED]

    def _in(self, state: State) -> list[Request]:
        return [request for request in self._running if request.state is state]

    def _prefill(self, hurried: bool) -> None:
        """Run chunks of prompts, at least one, for as long as decoding requests may wait."""
        started = time.perf_counter()
        self._deadline = math.inf
        while prefilling := self._in(State.PREFILL):
            decoding = bool(self._in(State.DECODE))
            if (hurried or decoding) and self._deadline == math.inf:
                bounded = decoding and self.stall < math.inf
                steps = _MOST_STEPS * self._plain_seconds if bounded else math.inf
                self._deadline = time.perf_counter() + min(self.stall, steps)
            prefilling.sort(key=lambda request: request.due)
            if together := self._short_ones(prefilling):
                self._run_together(together)
            elif not prefilling[0].done:
                self._run_chunk(prefilling[0])
            # Stop even without decoding requests, so that requests can be cancelled.
            alone = self._deadline == math.inf and self.stall < math.inf
            end = started + min(self.stall, _PAUSE) if alone else self._deadline
            if time.perf_counter() + (0.0 if alone else self._forward_seconds) >= end:
                return

    def _note_speed(self, tokens: int, started: float) -> None:
        """Update the prefill's speed, given that ``tokens`` have run since ``started``."""
        self._prompt_tokens += tokens
        seconds = time.perf_counter() - started
        self.prefill_seconds += seconds
        if tokens:
            speed = tokens / max(seconds - self._forward_seconds, seconds / 4)
            known = self._prefill_speed or speed
            self._prefill_speed = known + _CHANGE * (speed - known)

    def _chunk(self) -> int:
        """How many tokens of a prompt to run next."""
        if self.stall == math.inf:
            return sys.maxsize  # as many as the request's options allow
        alone = self._deadline == math.inf
        seconds = _SECONDS if alone else self._deadline - time.perf_counter()
        seconds -= self._forward_seconds
        least = _LEAST_ALONE if alone else _LEAST_CHUNK
        return max(least, int(min(_MOST_CHUNK, self._prefill_speed * seconds)))

    def _short_ones(self, prefilling: list[Request]) -> list[Request]:
        """The prompts, due in this order, that run whole in one forward; none if less than two."""
        if len(prefilling) == 1 or self._max_active == 1:
            return []
        try:
            self._share_steps()
        except Exception as error:
            self._end(prefilling[0], error)  # the others continue
            return []
        short: list[Request] = []
        room = min(self._chunk(), _LEAST_ALONE)
        for request in prefilling:
            sequence = request.sequence
            assert sequence is not None
            room -= len(sequence.tokens_to_prefill)
            if room < 0 or request.prefill or not self._batch.takes_prompt(sequence):
                break
            short.append(request)
        return short if len(short) > 1 else []

    def _run_together(self, requests: list[Request]) -> None:
        """Run whole prompts in one forward; their requests then decode."""
        hold_at_exit()
        started = time.perf_counter()
        sequences = [request.sequence for request in requests if request.sequence]
        try:
            self._batch.prefill(sequences)
        except Exception as error:  # of the forward that all share
            for request in requests:
                self._end(request, error)
            return
        self._note_speed(sum(len(sequence.tokens_to_prefill) for sequence in sequences), started)
        for request, sequence in zip(requests, sequences, strict=True):
            try:
                if sequence.error:
                    raise sequence.error
                request.on_progress(*[len(sequence.tokens_to_prefill)] * 2)
                self._batch.join(sequence)
                request.state = State.DECODE
            except Exception as error:
                self._end(request, error)

    def _run_chunk(self, request: Request) -> None:
        """Run the next chunk of a prompt; after the last chunk, the request decodes."""
        sequence = request.sequence
        assert sequence is not None
        if request.prefill is None:
            request.prefill = sequence.begin_in_chunks(self._chunk)
        before, done = request.prefilled - request.n_cached, 0
        started = time.perf_counter()
        try:
            for done, total in request.prefill:
                hold_at_exit()
                request.on_progress(done, total)
                if before < done < total:
                    break
            else:
                self._join(sequence)
                request.state = State.DECODE
        except Exception as error:
            self._end(request, error)
            return
        self._note_speed(max(0, done - before), started)

    def _step(self, requests: list[Request], hurried: bool) -> Iterator[GenerationResponse]:
        """Run one step of requests whose prompts are done, and pass on its responses."""
        sequences = [request.sequence for request in requests if request.sequence]
        self.steps += 1
        started = time.perf_counter()
        outcomes = self._batch.step(sequences, waits=hurried or bool(self._in(State.PREFILL)))
        self._step_seconds = time.perf_counter() - started
        for request, sequence, outcome in zip(requests, sequences, outcomes, strict=True):
            if isinstance(outcome, VerifiedStep):
                yield from self._respond(request, sequence, outcome)
            else:
                self._end(request, outcome)

    def _respond(
        self, request: Request, sequence: Sequence, step: VerifiedStep
    ) -> Iterator[GenerationResponse]:
        """Pass on the responses of a request's step."""
        try:
            cost = self._batch.cost(sequence, step)
            # Only if its time is that of one forward, and this did not run while prompts did.
            beside_prompts = step.ahead and self._deadline < math.inf
            if step.pipelined == step.ahead and not beside_prompts:
                plain = self._step_seconds / max(1.0, cost)  # 1 if unknown
                self._plain_seconds = plain
                self._forward_seconds = min(self._forward_seconds or plain, plain)
            request.on_step(step, self._step_seconds, cost)
            for response in request.responses_of(step):
                if response.finish_reason:
                    self._end(request, last=response)
                    return
                request.receive(response)
                yield response
                if request.done:
                    return
                request.unread += 1
        except Exception as error:
            self._end(request, error)
            return
        if self._max_unread and request.unread >= self._max_unread:
            request.state = State.PAUSED  # it takes part in no steps, and another may become active

    def _end(
        self,
        request: Request,
        error: Exception | None = None,
        last: GenerationResponse | None = None,
    ) -> None:
        """Close a request in any state, and only then pass on its last response."""
        request.state = State.DONE
        request.error = request.error or error
        try:
            with ExitStack() as ending:  # runs every callback, even if one fails
                ending.callback(self._forget, request)
                ending.callback(request.close)
                if request.prefill:
                    ending.callback(request.prefill.close)
                if request.sequence:
                    ending.callback(self._batch.leave, request.sequence)
        except Exception as failure:
            request.error = request.error or failure
        try:
            if last:
                request.receive(last)
        except Exception as failure:  # the response was not received
            request.error = request.error or failure
            request.finish_reason = None
        request.at_end()

    def _forget(self, request: Request) -> None:
        for requests in (self._waiting, self._running):
            if request in requests:
                requests.remove(request)

    def _join(self, sequence: Sequence) -> None:
        """Add a sequence whose prompt has run to the batch."""
        if any(request.state in (State.DECODE, State.PAUSED) for request in self._running):
            self._share_steps()
        self._batch.join(sequence)

    def _share_steps(self) -> None:
        """Make the batch for several sequences, unless it is or only one may be active."""
        if self._joins or self._max_active == 1:
            return
        # To find out the mode can take many forwards, and a request alone never needs it.
        batch = self._new_batch(self._decoder.loaded.joint_mode)
        for request in self._running:
            if request.state in (State.DECODE, State.PAUSED) and request.sequence:
                batch.join(request.sequence)
        self._batch, self._joins = batch, True

    def _new_batch(self, mode: JointMode) -> Batch:
        return Batch(self._decoder.loaded, mode, self.stall == math.inf, self._spare)


def responses(request: Request) -> Generator[GenerationResponse, None, None]:
    """Run a request alone.

    Each response is yielded before any work on the next one.

    Args:
        request: a request that has not started.
    """
    received = deque[GenerationResponse](maxlen=1)
    request.receive = received.append
    scheduler = Scheduler(request.decoder, max_active=1, stall=math.inf)
    scheduler.add(request)
    try:
        with scheduler.running():
            scheduler.start_waiting()
            while not request.done:
                yield from scheduler.responses_of_turn()
    finally:
        if request.error:
            raise request.error
    # Everything is closed now, so the consumer may begin the session's next turn.
    yield received.pop()
