"""The thread that owns the models: requests come in, the events of their generations go out.

Every MLX call happens in this thread. Others talk to it by two ways only: commands go in by a
queue, and the events of a step come out together, handed over to the loop that waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

from ..draft.drafter import origins_of
from ..engine.positions import context_length
from ..engine.step import DecodedStep
from ..errors import MlxspecError
from ..generation.decoder import Decoder, MakeDrafter
from ..generation.decoders import AutoDecoder
from ..generation.options import GenerationOptions, check_options
from ..generation.response import GenerationResponse
from ..generation.scheduler import Job, Scheduler
from ..generation.session import Session
from .admission import Memory
from .errors import ApiError
from .events import Ended, Event, Piece
from .metrics import Metrics, outcome_of
from .prefix_cache import PrefixCache

_log = logging.getLogger("mlxspec.server")

_MOST_UNREAD = 64  # tokens that a slow reader may leave unread before its generation waits
_LEAST_UNREAD = 16
_PATIENCE = 300.0  # seconds, after which one that reads nothing at all has its generation ended
_LOOK_AROUND = 10.0  # seconds between two looks for such readers, where nothing else happens
_RETRY_AFTER = 5  # seconds, what a client is told that finds the queue full
_RECENT = 12  # ended generations whose figures are kept


@dataclass(frozen=True)
class GenerationRequest:
    """One generation that somebody asks for.

    Attributes:
        prompt: token ids.
        max_tokens: how many tokens to generate at most.
        options: as for :meth:`mlxspec.Decoder.stream`.
        index: of the choice, which its events carry.
        prediction: token ids that the output is expected to follow.
        top_logprobs: how many of the likeliest tokens to tell; None tells no log-probability.
        partition: whose prefixes may be used.
        param: where the body has the prompt.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    options: GenerationOptions
    index: int = 0
    prediction: tuple[int, ...] = ()
    top_logprobs: int | None = None
    partition: str = ""
    param: str = "prompt"


class Limits(NamedTuple):
    """What the server takes at once.

    Attributes:
        active: generations of a model at once.
        queued: generations that wait for their turn.
        stall: seconds for which running ones may wait for others' prompts.
    """

    active: int = 8
    queued: int = 128
    stall: float = 0.15


_numbers = itertools.count(1)


class Ticket:
    """A generation that has been asked for, from the queue to its end.

    Attributes:
        number: counts all generations of the process.
        state: "queued", "prefill", "decoding" or "ended".
        prefilled: prompt tokens that have run or were cached.
    """

    def __init__(
        self, request: GenerationRequest, served: ServedModel, stream: EventStream
    ) -> None:
        self.number = next(_numbers)
        self.request = request
        self.served = served
        self.stream = stream
        self.state = "queued"
        self.prefilled = 0
        self.asked = time.perf_counter()
        self.first_token: float | None = None
        self.emitted = 0
        self.steps = 0
        self.decode_seconds = 0.0
        self.plain_seconds = 0.0
        """How long its tokens would have taken without drafts, beside the same others."""
        self.last: GenerationResponse | None = None
        self.job: Job | None = None
        self.session: Session | None = None
        self.nbytes = served.memory.bytes_for(len(request.prompt) + request.max_tokens)
        self.batch: list[Event | ApiError] = []
        """What has happened since it was last handed over."""
        self.unread = 0
        self.last_read = 0.0
        """When its reader took something, or began to have something to take."""

    @property
    def gain(self) -> float | None:
        """How many times as fast its steps were as plain ones; None where that is unknown."""
        known = self.plain_seconds and self.decode_seconds
        return self.plain_seconds / self.decode_seconds if known else None

    def figures(self) -> dict[str, Any]:
        """How it is doing, as JSON."""
        last, job = self.last, self.job  # the worker may take them away meanwhile
        return {
            "number": self.number,
            "model": self.served.name,
            "state": "paused" if job and job.paused else self.state,
            "prompt_tokens": len(self.request.prompt),
            "prefilled": self.prefilled,
            "cached_tokens": last.reused_tokens if last else None,
            "tokens": self.emitted,
            "max_tokens": self.request.max_tokens,
            "tokens_per_step": self.emitted / self.steps if self.steps else None,
            "gain": self.gain,
            "seconds": time.perf_counter() - self.asked,
        }

    def hand_over(self) -> None:
        """Pass on what has happened; called in the worker's thread."""
        if self.batch:
            batch, self.batch = self.batch, []
            if not self.unread:
                self.last_read = time.perf_counter()
            self.unread += len(batch)
            self.stream.put(self, batch)


class EventStream:
    """The generations of one request, for the event loop that made it.

    Attributes:
        tickets: one for each choice.
    """

    def __init__(self, worker: Worker, served: ServedModel, requests: Sequence[GenerationRequest]):
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[tuple[Ticket, list[Event | ApiError]]] = asyncio.Queue()
        self.tickets = [Ticket(request, served, self) for request in requests]

    def put(self, ticket: Ticket, batch: list[Event | ApiError]) -> None:
        """Hand over what has happened to one generation; called in the worker's thread."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._batches.put_nowait, (ticket, batch))

    def finish(self, finished: Callable[[int], bool]) -> None:
        """End generations, by the indices of their choices, as if the model had ended them."""
        for ticket in self.tickets:
            if ticket.state == "decoding" and finished(ticket.request.index):
                self._worker.finish(ticket)

    async def events(self, life_sign: float) -> AsyncGenerator[list[Event], None]:
        """What happens, until all generations have ended.

        Leaving the loop early ends the generations.

        Args:
            life_sign: an empty list comes whenever nothing has happened for so many seconds.

        Raises:
            ApiError: a generation has failed; the others are ended.
        """
        left = len(self.tickets)
        coming: asyncio.Task[tuple[Ticket, list[Event | ApiError]]] | None = None
        try:
            while left:
                # Not wait_for, which before Python 3.12 may miss that it is cancelled.
                coming = coming or asyncio.create_task(self._batches.get())
                if not (await asyncio.wait({coming}, timeout=life_sign))[0]:
                    yield []
                    continue
                (ticket, batch), coming = coming.result(), None
                yield [event for event in batch if not isinstance(event, ApiError)]
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                left -= isinstance(batch[-1], Ended)
                self._worker.has_read(ticket, len(batch))
        finally:
            if coming:
                coming.cancel()
            self.close()

    def close(self) -> None:
        """End all generations that have not ended."""
        for ticket in self.tickets:
            self._worker.cancel(ticket)


@dataclass
class ServedModel:
    """A model that is served.

    Attributes:
        name: what requests call it.
        decoder: loaded, with its costs known.
        cache: of prefixes.
        memory: what caches take.
        arguments: of the decoder's ``drafting_with``.
        options: defaults of all its generations, which a request's go before.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    decoder: Decoder
    cache: PrefixCache
    memory: Memory
    arguments: dict[str, Any] = field(default_factory=dict)
    options: GenerationOptions = field(default_factory=GenerationOptions)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context_length(self) -> int | None:
        """In tokens, where the model states it."""
        return context_length(self.decoder.model)

    @cached_property
    def most_characters(self) -> int | None:
        """A longer text has more tokens than the context; None where its length is unknown."""
        if self.context_length is None:
            return None
        return self.context_length * max(map(len, self.decoder.tokenizer.get_vocab()))

    @cached_property
    def special_tokens(self) -> list[int]:
        """Those that XTC never drops: line breaks and ends."""
        tokenizer = self.decoder.tokenizer
        return [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]

    def make_drafter(self, prediction: Sequence[int]) -> MakeDrafter:
        """What makes the drafter of one generation."""
        arguments = dict(self.arguments)
        if prediction and isinstance(self.decoder, AutoDecoder):
            arguments["prediction"] = prediction
        return self.decoder.drafting_with(**arguments)


class Worker:
    """Runs generations of one or several models in a thread of its own.

    Args:
        models: those that are served.
        limits: what is taken at once.
        on_end: called in the worker's thread with each ticket whose generation has ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits = Limits(),  # noqa: B008  # a constant
        on_end: Callable[[Ticket, Ended | ApiError], object] = lambda ticket, ended: None,
    ) -> None:
        self.models = {served.name: served for served in models}
        self.limits = limits
        self.metrics = Metrics()
        self.ready = threading.Event()
        """Set while requests are answered."""
        self.tickets: list[Ticket] = []
        """All that have not ended, in the order in which they came; for looking at them."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        """Figures of those that have ended last, with their outcome as state and when it was."""
        self.on_end = on_end
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lanes = {served.name: _Lane(self, served) for served in models}
        self._stopping = False
        self._taking = threading.Lock()
        """Held while generations are taken on, so that none comes after the last command."""
        self._thread = threading.Thread(target=self._run, name="mlxspec worker", daemon=True)

    def start(self) -> None:
        """Start the thread; :attr:`ready` is set once models are warmed up."""
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Return once requests are answered.

        Raises:
            MlxspecError: the thread has failed before; its log says how.
        """
        while not self.ready.wait(0.1):
            if not self.alive:
                raise MlxspecError("the model has failed in its first steps; see above")

    def stop(self) -> None:
        """End all generations and the thread, and wait for it."""

        def stop() -> None:
            self._stopping = True

        self._commands.put(stop)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check(self, served: ServedModel, request: GenerationRequest) -> None:
        """Refuse what cannot be generated, before it is queued.

        Raises:
            ApiError: 400, an option is out of range, or the context would be too long; 413, its
                caches would not fit into memory whatever else runs.
        """
        n_prompt, longest = len(request.prompt), served.context_length
        if longest is not None and n_prompt + request.max_tokens > longest:
            raise ApiError(
                f"the model's context has {longest} tokens; the prompt has {n_prompt} and "
                f"max_tokens is {request.max_tokens}: shorten the prompt or ask for fewer",
                param=request.param,
                code="context_length_exceeded",
            )
        decoder = served.decoder
        try:
            check_options(
                decoder.model,
                decoder.tokenizer,
                decoder.vocab_size,
                request.max_tokens,
                cast(GenerationOptions, {**served.options, **request.options}),
            )
        except MlxspecError as error:
            raise ApiError(str(error)) from error
        needed = served.memory.bytes_for(n_prompt + request.max_tokens)
        if needed > served.memory.limit:
            raise ApiError(
                f"the caches of {n_prompt} prompt tokens and {request.max_tokens} more need "
                f"{needed >> 20} MiB, and {served.memory.limit >> 20} MiB are there for them: "
                "shorten the prompt or ask for fewer tokens",
                status=413,
                code="out_of_memory",
            )

    def submit(self, served: ServedModel, requests: Sequence[GenerationRequest]) -> EventStream:
        """Queue generations, all or none; called in an event loop.

        Raises:
            ApiError: as :meth:`check`; 429, the queue is full; 503, the server is ending.
        """
        for request in requests:
            self.check(served, request)
        states = [ticket.state for ticket in self.tickets.copy() if ticket.served is served]
        waiting = states.count("queued")
        free = max(0, self.limits.active - (len(states) - waiting))
        if waiting + len(requests) > self.limits.queued + free:
            full = ApiError(
                f"{waiting} generations are waiting already: try again later",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )
            self.metrics.add_end(full, 0.0)
            raise full
        stream = EventStream(self, served, requests)
        with self._taking:
            if self._stopping or not self.alive:
                raise ApiError("the server is ending", status=503)
            self.tickets += stream.tickets
            self._commands.put(partial(self._lanes[served.name].queue.extend, stream.tickets))
        return stream

    def finish(self, ticket: Ticket) -> None:
        """End a generation before its next step, of which all is known that is needed."""
        self._commands.put(partial(self._lanes[ticket.served.name].finish, ticket))

    def cancel(self, ticket: Ticket) -> None:
        """End a generation before its next step, if it has not ended."""
        if ticket.state != "ended":
            lane = self._lanes[ticket.served.name]
            self._commands.put(partial(lane.end, ticket, ApiError("cancelled", status=499)))

    def has_read(self, ticket: Ticket, count: int) -> None:
        """So many events have been taken: a generation that waited for it may go on."""
        self._commands.put(partial(self._lanes[ticket.served.name].has_read, ticket, count))

    def _run(self) -> None:
        """The thread: obey commands, then a turn of every model that has something to do."""
        lanes = [*self._lanes.values()]
        with ExitStack() as running:
            try:
                for lane in lanes:
                    running.enter_context(lane.scheduler.running())
                    lane.warm_up()
                self.ready.set()
                busy = False
                while not self._stopping:
                    self._obey(wait=not busy)
                    busy = max(lane.turn() for lane in lanes)
            except Exception:
                _log.exception("the worker has failed")
            finally:
                self.ready.clear()
                with self._taking:
                    self._stopping = True
                self._obey(wait=False)  # what came before
                for lane in lanes:
                    lane.close()

    def _obey(self, wait: bool) -> None:
        """Run the commands that have come; if there is nothing else to do, wait a while for one."""
        with suppress(queue.Empty):
            while wait or not self._commands.empty():
                command = self._commands.get(timeout=_LOOK_AROUND)
                wait = False
                try:
                    command()
                except Exception:  # nobody waits for what it returns, and others go on
                    _log.exception("a command has failed")


class _Lane:
    """One model's queue, and its generations that run; used in the worker's thread alone."""

    def __init__(self, worker: Worker, served: ServedModel) -> None:
        self._worker = worker
        self._served = served
        self.queue: deque[Ticket] = deque()
        limits = worker.limits
        self.scheduler = Scheduler(served.decoder, max_active=limits.active, stall=limits.stall)
        self.scheduler.on_step = self._watch
        self._running: dict[Job, Ticket] = {}
        self._shape = 1, 1
        """Rows and sequences of the last step."""

    def warm_up(self) -> None:
        """Find out what the model verifies and what steps cost, before the first request."""
        make_drafter = self._served.make_drafter(())
        for prompt in ([1, 1], [1, 1, 1]):
            self.scheduler.submit(prompt, lambda response: None, 8, make_drafter)
        while self.scheduler.turn():
            pass

    def turn(self) -> bool:
        """Admit what fits, run prompts and a step; whether there is more to do at once."""
        steps = self.scheduler.steps
        try:
            self._admit()
            busy = self.scheduler.turn()
            if self.scheduler.steps > steps:
                self._worker.metrics.add_forward(self.scheduler.step_seconds, *self._shape)
        except Exception as error:
            _log.exception("a turn has failed")
            for ticket in [*self.queue, *self._running.values()]:
                self.end(ticket, error)
            busy = False
        for ticket in [*self._running.values()]:
            job = ticket.job
            if job and job.error:
                self.end(ticket, job.error)
            ticket.hand_over()
            if job and ticket.unread > _MOST_UNREAD:
                self.scheduler.pause(job)
                if time.perf_counter() > ticket.last_read + _PATIENCE:  # others need its place
                    self.end(ticket, ApiError("nobody reads the answer", status=408))
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
            full = self._taking_part >= self._worker.limits.active
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
            self._served.make_drafter(request.prediction),
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
        seconds, plain_seconds = self.scheduler.step_seconds, self.scheduler.plain_seconds
        if plain_seconds is not None:
            plain_seconds *= len(verified.tokens)
        origins = origins_of(job.sequence.drafter, verified.tree)
        self._worker.metrics.add_step(verified, origins, seconds, plain_seconds)
        ticket.steps += 1
        ticket.emitted += len(verified.tokens)
        ticket.decode_seconds += seconds
        ticket.plain_seconds += plain_seconds or 0.0

    def _respond(self, ticket: Ticket, response: GenerationResponse) -> None:
        """Turn a response into an event."""
        ticket.state = "decoding"
        now = time.perf_counter()
        metrics = self._worker.metrics
        if ticket.first_token is None:
            ticket.first_token = now
            seconds = now - ticket.asked
            metrics.add_first_token(seconds, response.prompt_tokens, response.reused_tokens)
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
        if response.finish_reason:
            self._finished(ticket, response.finish_reason)

    def finish(self, ticket: Ticket) -> None:
        """End a generation as if the model had ended it."""
        if ticket.state == "decoding" and ticket.job:
            self.scheduler.cancel(ticket.job)
            self._finished(ticket, "stop")

    def _finished(self, ticket: Ticket, reason: str) -> None:
        assert ticket.last
        last, stats = ticket.last, ticket.last.stats
        ended = Ended(
            ticket.request.index,
            reason,
            last.prompt_tokens,
            last.reused_tokens,
            last.generation_tokens,
            stats.drafted,
            stats.accepted,
        )
        ticket.batch.append(ended)
        self._close(ticket, ended)

    def has_read(self, ticket: Ticket, count: int) -> None:
        """Let a generation go on whose reader has caught up."""
        ticket.unread -= count
        ticket.last_read = time.perf_counter()
        if ticket.job and ticket.job.paused and ticket.unread <= _LEAST_UNREAD:
            self.scheduler.pause(ticket.job, paused=False)

    def end(self, ticket: Ticket, error: Exception) -> None:
        """End a generation wherever it is, which has not come to its end by itself."""
        if ticket.state == "ended":
            return
        if ticket in self.queue:
            self.queue.remove(ticket)
        if ticket.job:
            self.scheduler.cancel(ticket.job)
        if isinstance(error, ApiError):
            failure = error
        elif isinstance(error, MlxspecError):
            failure = ApiError(str(error))
        else:
            _log.error("a generation has failed", exc_info=error)
            failure = ApiError(f"the generation has failed: {error}", status=500)
        ticket.batch.append(failure)
        self._close(ticket, failure)

    def _close(self, ticket: Ticket, ended: Ended | ApiError) -> None:
        """A generation has ended; its caches stay for prompts that begin with what they hold."""
        ticket.state = "ended"
        told = {"state": outcome_of(ended), "ended": time.perf_counter()}
        self._worker.recent.append(ticket.figures() | told)
        self._worker.tickets.remove(ticket)
        if ticket.job:
            del self._running[ticket.job]
        self._worker.metrics.add_end(ended, time.perf_counter() - ticket.asked)
        try:
            if ticket.session:
                self._served.cache.give_back(ticket.session)
            self._worker.on_end(ticket, ended)
        except Exception:  # such as a log that nobody reads any more
            _log.exception("the end of a generation could not be recorded")
        # These lead back to the ticket: the caches in them would wait for the garbage collector.
        ticket.job = ticket.session = ticket.last = None
        ticket.hand_over()

    def close(self) -> None:
        """End all generations."""
        for ticket in [*self.queue, *self._running.values()]:
            self.end(ticket, ApiError("the server is ending", status=503))
