"""One model's generations in the worker's thread: admitted, run, and told about."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import cast

from ..draft.drafter import origins_of
from ..engine.step import DecodedStep
from ..errors import MlxspecError
from ..generation.options import GenerationOptions
from ..generation.response import GenerationResponse
from ..generation.scheduler import Job, Scheduler
from .errors import ApiError
from .events import Begun, Ended, Piece
from .records import Records
from .served_model import ServedModel
from .tickets import Ticket

_log = logging.getLogger("mlxspec.server")

_MOST_UNREAD = 64  # tokens that a slow reader may leave unread before its generation waits
_LEAST_UNREAD = 16


class Lane:
    """One model's queue, and its generations that run; used in the worker's thread alone.

    Args:
        served: the model.
        active: how many generations run at once at most.
        stall: seconds for which running ones may wait for others' prompts.
        records: of all generations.
    """

    def __init__(self, served: ServedModel, active: int, stall: float, records: Records) -> None:
        self._served = served
        self._active = active
        self._records = records
        self.queue: deque[Ticket] = deque()
        self.scheduler = Scheduler(served.decoder, max_active=active, stall=stall)
        self.scheduler.on_step = self._watch
        self._running: dict[Job, Ticket] = {}
        self._shape = 1, 1
        """Rows and sequences of the last step."""

    def warm_up(self) -> None:
        """Find out what the model verifies and what steps cost, before the first request."""
        decoder = self._served.decoder
        make_drafter = self._served.make_drafter((), self._served.owner)
        decoder.remembers = False  # nobody has asked for these
        for prompt in ([1, 1], [1, 1, 1]):
            self.scheduler.submit(prompt, lambda response: None, 8, make_drafter)
        while self.scheduler.turn():
            pass
        decoder.remembers = True

    @property
    def decoding(self) -> bool:
        """Whether there are generations that wait for each step."""
        return any(ticket.state == "decoding" for ticket in self._running.values())

    def turn(self, hurried: bool) -> bool:
        """Admit what fits, run prompts and a step.

        Args:
            hurried: generations of another lane wait for the end of the turn.

        Returns:
            whether there is more to do at once.
        """
        steps = self.scheduler.steps
        try:
            self._admit()
            busy = self.scheduler.turn(hurried)
            if self.scheduler.steps > steps:
                self._records.metrics.add_forward(self.scheduler.step_seconds, *self._shape)
        except Exception as error:
            _log.exception("a turn has failed")
            for ticket in [*self.queue, *self._running.values()]:
                self.end(ticket, error)
            busy = False
        for ticket in [*self._running.values()]:
            job = ticket.job
            if job and job.error:
                self.end(ticket, job.error)
            self._records.tell(ticket)
            if job and ticket.unread > _MOST_UNREAD:
                self.scheduler.pause(job)
        return busy or self._next() is not None

    def _admit(self) -> None:
        """Start generations that have room beside those that run."""
        while ticket := self._next():
            self.queue.remove(ticket)
            cache, memory = self._served.cache, self._served.memory
            cache.make_room(cache.nbytes + self._held + ticket.nbytes - memory.limit)
            try:
                self._start(ticket)
            except Exception as error:
                self.end(ticket, error)

    def _next(self) -> Ticket | None:
        """Who starts next: the first in the queue if its caches fit beside those that run.

        One whose prompt begins with what another one is about to run lets others pass, and finds
        it in the cache later.
        """
        for ticket in self.queue:
            full = self._taking_part >= self._active
            if full or self._held + ticket.nbytes > self._served.memory.limit:
                return None
            request = ticket.request
            if not self._served.cache.worth_waiting(request.prompt, request.partition):
                return ticket
        return None

    @property
    def _taking_part(self) -> int:
        """Generations that run; those whose readers are slow leave their places to others."""
        return sum(not (ticket.job and ticket.job.paused) for ticket in self._running.values())

    @property
    def _held(self) -> int:
        """Bytes that running generations may come to take."""
        return sum(ticket.nbytes for ticket in self._running.values())

    def _start(self, ticket: Ticket) -> None:
        request = ticket.request
        ticket.session = self._served.cache.lend(request.prompt, request.partition)

        def progress(done: int, total: int) -> None:
            ticket.prefilled = len(request.prompt) - 1 - total + done

        with_cache = {"session": ticket.session, "on_progress": progress}
        options = cast(GenerationOptions, {**self._served.options, **request.options, **with_cache})
        ticket.job = self.scheduler.submit(
            list(request.prompt),
            lambda response: self._respond(ticket, response),
            request.max_tokens,
            self._served.make_drafter(request.prediction, request.partition),
            **options,
        )
        ticket.state = "prefill"
        self._running[ticket.job] = ticket

    def _watch(self, job: Job, step: DecodedStep) -> None:
        """Count what a step has done."""
        ticket = self._running.get(job)
        if ticket is None or job.sequence is None:
            return
        verified = step.verified
        self._shape = verified.rows, verified.sequences
        seconds = self.scheduler.step_seconds
        plain_seconds = self.scheduler.plain_seconds(job, step)
        origins = origins_of(job.sequence.drafter, verified.tree)
        self._records.metrics.add_step(verified, origins, seconds, plain_seconds)
        ticket.steps += 1
        ticket.emitted += len(verified.tokens)
        if plain_seconds is not None:
            ticket.decode_seconds += seconds
            ticket.plain_seconds += plain_seconds

    def _respond(self, ticket: Ticket, response: GenerationResponse) -> None:
        """Turn a response into an event."""
        ticket.state = "decoding"
        now = time.perf_counter()
        metrics = self._records.metrics
        if ticket.first_token is None:
            ticket.first_token = now
            seconds = now - ticket.asked
            n_prompt, n_cached = response.prompt_tokens, response.reused_tokens
            metrics.add_first_token(seconds, n_prompt, n_cached)
            ticket.batch.append(Begun(ticket.request.index, n_prompt, n_cached))
        wanted = ticket.request.top_logprobs
        logprobs = None if wanted is None else response.token_logprobs(wanted)
        ticket.batch.append(
            Piece(
                ticket.request.index,
                response.text,
                response.token,
                response.from_draft,
                logprobs.logprob if logprobs else None,
                tuple(logprobs.top) if logprobs else (),
            )
        )
        ticket.last = response
        ticket.cached_tokens, ticket.tokens = response.reused_tokens, response.generation_tokens
        if response.finish_reason:
            self._ended(ticket, _end_of(ticket, response.finish_reason))

    def has_read(self, ticket: Ticket, count: int) -> None:
        """Let a generation go on whose reader has caught up."""
        ticket.unread -= count
        if ticket.job and ticket.job.paused and ticket.unread <= _LEAST_UNREAD:
            self.scheduler.pause(ticket.job, paused=False)

    def end(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a generation wherever it is; nothing happens if it has ended.

        Args:
            ticket: of the generation.
            error: why; None as if the model had ended it, which may be once it decodes.
        """
        if ticket.state == "ended":
            return
        if ticket in self.queue:
            self.queue.remove(ticket)
        if ticket.job:
            self.scheduler.cancel(ticket.job)
        self._ended(ticket, _failure(error) if error else _end_of(ticket, "stop"))

    def _ended(self, ticket: Ticket, ended: Ended | ApiError) -> None:
        """A generation has ended; its caches stay for prompts that begin with what they hold."""
        ticket.batch.append(ended)
        self._records.end(ticket, ended)
        if ticket.job:
            del self._running[ticket.job]
        try:
            if ticket.session:
                self._served.cache.give_back(ticket.session)
        except Exception:
            _log.exception("a prompt could not be kept")
        # These lead back to the ticket: the caches in them would wait for the garbage collector.
        ticket.job = ticket.session = ticket.last = None
        self._records.tell(ticket)

    def close(self, reason: ApiError) -> None:
        """End all generations."""
        for ticket in [*self.queue, *self._running.values()]:
            self.end(ticket, reason)


def _end_of(ticket: Ticket, finish_reason: str) -> Ended:
    assert ticket.last
    last, stats = ticket.last, ticket.last.stats
    return Ended(
        ticket.request.index,
        finish_reason,
        last.prompt_tokens,
        last.reused_tokens,
        last.generation_tokens,
        stats.drafted,
        stats.accepted,
        last.stop_string,
    )


def _failure(error: Exception) -> ApiError:
    """What a client is told of what has ended its generation."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MlxspecError):
        return ApiError(str(error))
    _log.error("a generation has failed", exc_info=error)
    return ApiError(f"the generation has failed: {error}", status=500)
