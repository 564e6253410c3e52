"""The worker thread that owns the models: requests come in, events of their generations go out.

Every MLX call happens in this thread. Others reach it in two ways only: commands go in through a
queue, and the events of a turn come out together, to the event loops that wait for them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

from ..engine import step as steps
from ..errors import MlxspecError
from ..generation.engine import Engine
from ..generation.options import GenerationOptions
from ..generation.request import Request, State
from ..generation.response import GenerationResponse
from .body import ApiError
from .metrics import Metrics
from .served_model import ServedModel


@dataclass(frozen=True)
class Piece:
    """One generated token of a choice.

    Attributes:
        index: of the choice.
        text: the next segment of text; may be empty, and hold text of earlier tokens.
        token: the token id.
        accepted: it was an accepted draft token.
        logprob: the token's, where log-probabilities were asked for.
        top: the likeliest tokens in its place and theirs, best first.
    """

    index: int
    text: str
    token: int
    accepted: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Begun:
    """A choice's prompt has run, and its first token follows.

    Attributes:
        index: of the choice.
        prompt_tokens: tokens in its prompt.
        cached_tokens: those of them that were in a cache.
    """

    index: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Ended:
    """A choice has ended.

    Attributes:
        index: of the choice.
        finish_reason: "stop" or "length".
        prompt_tokens: tokens in its prompt.
        cached_tokens: those of them that were in a cache.
        completion_tokens: tokens generated, the one that ended the output included.
        drafted: draft tokens proposed.
        accepted: draft tokens accepted.
        stop: the stop string that ended it, if one did.
    """

    index: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    stop: str | None = None


Event = Begun | Piece | Ended


_log = logging.getLogger("mlxspec.server")

_RECENT = 12  # ended requests whose figures are kept

_numbers = itertools.count(1)


class ServedRequest(Request):
    """One choice of an answer, with the figures that the server shows of it.

    Args:
        served: the model.
        prompt: token ids.
        max_tokens: how many tokens to generate at most.
        options: as for :meth:`mlxspec.Decoder.stream`.
        index: of the choice, which its events carry.
        prediction: token ids that the output is expected to follow.
        top_logprobs: how many of the likeliest tokens its events have; None for no
            log-probabilities.
        partition: whose prefixes and answers may be used.

    Raises:
        OptionError: an option is out of range.

    Attributes:
        number: counts all requests of the process.
        stream: that its events go to.
        asked: when it came, by ``time.perf_counter``.
        first_token: when its first token came.
        nbytes: what its caches may come to take.
        failure: the error that ended it, if one did.
        outcome: how it has ended, in a word.
    """

    stream: EventStream

    def __init__(
        self,
        served: ServedModel,
        prompt: Sequence[int],
        max_tokens: int,
        options: GenerationOptions,
        *,
        index: int = 0,
        prediction: Sequence[int] = (),
        top_logprobs: int | None = None,
        partition: str = "",
    ) -> None:
        decoder = served.decoder
        super().__init__(
            *(decoder, prompt, max_tokens, cast(GenerationOptions, {**served.options, **options})),
            lambda session: served.make_drafter(prediction, partition)(session),
        )
        self.number = next(_numbers)
        self.served = served
        self.index = index
        self.top_logprobs = top_logprobs
        self.partition = partition
        self.asked = time.perf_counter()
        self.first_token: float | None = None
        self.nbytes = served.memory.bytes_for(len(prompt) + max_tokens)
        self.failure: ApiError | None = None
        self.outcome: str | None = None

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens were cached, once the first token has come."""
        return None if self.first_token is None else self.n_cached

    def figures(self) -> dict[str, Any]:
        """Its state and figures, as JSON."""
        plain, seconds = self.plain_seconds, self.decode_seconds
        return {
            "number": self.number,
            "model": self.served.name,
            "state": self.outcome or self.state,
            "prompt_tokens": len(self.prompt),
            "prefilled": self.prefilled,
            "cached_tokens": self.cached_tokens,
            "tokens": self.generated,
            "max_tokens": self.max_tokens,
            "tokens_per_step": self.stats.tokens_per_step or None,
            # How many times as fast its steps were as plain ones.
            "gain": plain / seconds if plain and seconds else None,
            "seconds": time.perf_counter() - self.asked,
        }

    def start(self) -> steps.Sequence:
        self.session = self.served.cache.lend(self.prompt, self.partition)
        return super().start()

    def on_step(self, step: steps.DecodedStep, seconds: float, plain_seconds: float | None) -> None:
        super().on_step(step, seconds, plain_seconds)
        origins = step.verified.tree.node_origins
        metrics = self.stream.records.metrics
        metrics.add_step(step.verified, origins, seconds, plain_seconds)

    def on_response(self, response: GenerationResponse) -> None:
        """Turn a response into an event."""
        records = self.stream.records
        if self.first_token is None:
            self.first_token = time.perf_counter()
            n_prompt = len(self.prompt)
            records.metrics.add_first_token(self.first_token - self.asked, n_prompt, self.n_cached)
            records.queue(self, Begun(self.index, n_prompt, self.n_cached))
        wanted = self.top_logprobs
        logprobs = None if wanted is None else response.token_logprobs(wanted)
        piece = Piece(
            *(self.index, response.text, response.token, response.from_draft),
            logprobs.logprob if logprobs else None,
            tuple(logprobs.top) if logprobs else (),
        )
        records.queue(self, piece)

    def on_end(self) -> None:
        """Send the last event, and give the caches back to the prefix cache."""
        failed = self.error is not None and self.finish_reason is None
        ended = _failure(self.error) if self.error and failed else self._end()
        self.stream.records.end(self, ended)
        try:
            if self.session:
                self.served.cache.give_back(self.session)
        except Exception:
            _log.exception("a prompt could not be kept")
        # The stream leads here: the caches would wait for the garbage collector.
        self.session = None

    def _end(self) -> Ended:
        """The last event; a request that was cancelled without an error ends with "stop"."""
        stop = self.output.stop_string if self.finish_reason else None
        return Ended(
            *(self.index, self.finish_reason or "stop", len(self.prompt), self.n_cached),
            *(self.generated, self.stats.drafted, self.stats.accepted, stop),
        )


def _failure(error: Exception) -> ApiError:
    """The error that a client gets for what ended its generation."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MlxspecError):
        return ApiError(str(error))
    _log.error("a generation has failed", exc_info=error)
    return ApiError(f"the generation has failed: {error}", status=500)


Batch = tuple[ServedRequest, list[Event | ApiError]]
"""A request and its events of one turn, in order; never empty."""


class EventStream:
    """The events of one client's requests, for the event loop that made it.

    Args:
        worker: that runs them.
        requests: one for each choice.
    """

    def __init__(self, worker: Worker, requests: Sequence[ServedRequest]) -> None:
        self.requests = requests
        self.records = worker.records
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._batches: asyncio.Queue[Batch] = asyncio.Queue()
        for request in requests:
            request.stream = self

    @staticmethod
    def deliver(batches: Sequence[Batch]) -> None:
        """Hand over events to the streams of their requests; called in any thread.

        There is one call per event loop, since each interrupts the loop, and the worker waits.
        """
        of_loops: defaultdict[asyncio.AbstractEventLoop, list[Batch]] = defaultdict(list)
        for request, batch in batches:
            of_loops[request.stream._loop].append((request, batch))
        for loop, some in of_loops.items():
            with suppress(RuntimeError):  # the loop has ended; no task waits
                loop.call_soon_threadsafe(EventStream._take, some)

    @staticmethod
    def _take(batches: Sequence[Batch]) -> None:
        for request, batch in batches:
            request.stream._batches.put_nowait((request, batch))

    async def events(self, keep_alive: float) -> AsyncGenerator[list[Event], None]:
        """The events, in batches, until all generations have ended.

        Leaving the loop early ends the generations.

        Args:
            keep_alive: an empty list comes whenever nothing has happened for this many seconds.

        Raises:
            ApiError: a generation has failed; the others are ended.
        """
        left = len(self.requests)
        try:
            while left:
                try:
                    async with asyncio.timeout(keep_alive):
                        request, batch = await self._batches.get()
                except TimeoutError:
                    yield []
                    continue
                yield [event for event in batch if not isinstance(event, ApiError)]
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                left -= isinstance(batch[-1], Ended)
                self._worker.has_read(request, sum(isinstance(one, Piece) for one in batch))
        finally:
            self.close()

    def stop(self, finished: Callable[[int], bool]) -> None:
        """End generations by the indices of their choices, as if the model had ended them."""
        for request in self.requests:
            if request.state in (State.DECODE, State.PAUSED) and finished(request.index):
                self._worker.end(request)

    def close(self) -> None:
        """Cancel all generations that have not ended."""
        for request in self.requests:
            if not request.done:
                self._worker.end(request, ApiError("cancelled", status=499))


_OUTCOMES = {499: "cancelled", 429: "refused", 503: "ending"}


def _outcome(ended: Ended | ApiError) -> str:
    """How a generation has ended, in a word."""
    return ended.finish_reason if isinstance(ended, Ended) else _OUTCOMES.get(ended.status, "error")


class Records:
    """The generations of all models; the worker's thread writes, others read.

    Args:
        on_end: called in the worker's thread with all requests of a client's body, once all its
            generations have ended.

    Attributes:
        metrics: of all that has happened.
        requests: that have not ended, in the order in which they came.
        recent: figures of those that have ended last, with when that was.
    """

    def __init__(self, on_end: Callable[[Sequence[ServedRequest]], object]) -> None:
        self.on_end = on_end
        self.metrics = Metrics()
        self.requests: list[ServedRequest] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._outbox: dict[ServedRequest, list[Event | ApiError]] = {}

    def queue(self, request: ServedRequest, event: Event | ApiError) -> None:
        """Queue an event for its client, until the end of the turn."""
        self._outbox.setdefault(request, []).append(event)

    def end(self, request: ServedRequest, ended: Ended | ApiError) -> None:
        """Record the end of a request, and queue it for the client."""
        now = time.perf_counter()
        request.outcome = _outcome(ended)
        request.failure = ended if isinstance(ended, ApiError) else None
        self.queue(request, ended)
        self.recent.append(request.figures() | {"ended": now})
        self.requests.remove(request)
        self.metrics.add_end(request.outcome, now - request.asked)
        try:
            if all(one.outcome for one in request.stream.requests):
                self.on_end(request.stream.requests)
        except Exception:  # such as a log without a reader
            _log.exception("the end of a generation could not be recorded")

    def deliver(self) -> None:
        """Hand over the queued events, at the end of a turn."""
        outbox, self._outbox = self._outbox, {}
        EventStream.deliver([*outbox.items()])


_log = logging.getLogger("mlxspec.server")

_MOST_UNREAD = 64  # tokens that a slow reader may leave unread before its generation waits


class ModelQueue(Engine):
    """Runs the requests to one model; used in the worker's thread alone.

    Args:
        served: the model.
        active: how many generations run at once at most.
        stall: seconds for which running ones may wait for others' prompts.
        records: of all requests.
    """

    def __init__(self, served: ServedModel, active: int, stall: float, records: Records) -> None:
        super().__init__(served.decoder, max_active=active, stall=stall, max_unread=_MOST_UNREAD)
        self._served = served
        self._records = records

    def warm_up(self) -> None:
        """Find out what the model verifies and what steps cost, before the first request."""
        decoder = self._served.decoder
        make_drafter = self._served.make_drafter((), self._served.owner)
        decoder.remembers = False  # no user has asked for these
        for prompt in ([1, 1], [1, 1, 1]):
            self.add(decoder.new_request(prompt, 8, GenerationOptions(), make_drafter))
        while super().turn():
            pass
        decoder.remembers = True

    @property
    def decoding(self) -> bool:
        """Whether there are generations that wait for each step."""
        return bool(self._in(State.DECODE))

    def turn(self, hurried: bool = False) -> bool:
        """As :meth:`Engine.turn`; a fault in it ends all requests."""
        steps = self.steps
        try:
            busy = super().turn(hurried)
        except Exception as error:
            _log.exception("a turn has failed")
            self.close(error)
            return False
        if self.steps > steps:
            self._records.metrics.add_forward(self.step_seconds, *self.step_shape)
        return busy

    def next_waiting(self) -> Request | None:
        """The first in the queue if its caches fit next to those in use.

        One whose prompt begins with what another one is about to run lets others pass, and finds
        it in the cache later.
        """
        for request in self._waiting:
            if not isinstance(request, ServedRequest):  # one to warm up with
                return request
            if self._held + request.nbytes > self._served.memory.limit:
                return None
            if not self._served.cache.should_wait(request.prompt, request.partition):
                return request
        return None

    def start(self, request: Request) -> None:
        """Start a request, for whose caches idle ones make room."""
        cache = self._served.cache
        cache.make_room(cache.nbytes + self._held - self._served.memory.limit)
        super().start(request)

    @property
    def _held(self) -> int:
        """Bytes that running generations may need by their end."""
        return sum(one.nbytes for one in self._running if isinstance(one, ServedRequest))


_log = logging.getLogger("mlxspec.server")

_RETRY_AFTER = 5  # seconds, in the answer to a client that finds the queue full


class WorkerLimits(NamedTuple):
    """What the server takes at once.

    Attributes:
        active: generations of a model at once.
        queued: generations that wait for their turn.
        stall: seconds for which running ones may wait for others' prompts.
    """

    active: int = 8
    queued: int = 128
    stall: float = 0.15


class Worker:
    """Runs generations of one or several models in a thread of its own.

    Args:
        models: those that are served.
        limits: what is taken at once.
        on_end: called in the worker's thread with all requests of a client's body, once they have
            ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: WorkerLimits = WorkerLimits(),  # noqa: B008  # a constant
        on_end: Callable[[Sequence[ServedRequest]], object] = lambda requests: None,
    ) -> None:
        self.models = {served.name: served for served in models}
        self.limits = limits
        self.records = Records(on_end)
        self.ready = threading.Event()
        """Set while requests are answered."""
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        stall = limits.stall / len(models)
        self._queues = {
            served.name: ModelQueue(served, limits.active, stall, self.records) for served in models
        }
        self._stopping: ApiError | None = None
        """Why no more is taken on."""
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
            self._stopping = ApiError("the server is ending", status=503)

        self._commands.put(stop)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, served: ServedModel, requests: Sequence[ServedRequest]) -> EventStream:
        """Queue generations, all or none; called in an event loop.

        Raises:
            ApiError: 400, this many can never fit; 429, the queue is full; 503, the server
                is ending.
        """
        most = self.limits.active + self.limits.queued
        if len(requests) > most:
            raise ApiError(
                f"{len(requests)} choices are more than the server takes at once, which are "
                f"{most}: ask for fewer",
                param="n",
            )
        states = [one.state for one in self.records.requests.copy() if one.served is served]
        waiting = states.count(State.WAITING)
        free = max(0, self.limits.active - (len(states) - waiting))
        if waiting + len(requests) > self.limits.queued + free:
            full = ApiError(
                f"{waiting} generations are waiting already: try again later",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )
            self.records.metrics.add_end("refused")
            raise full
        stream = EventStream(self, requests)
        with self._taking:
            if self._stopping:
                raise self._stopping
            self.records.requests += requests
            self._commands.put(partial(self._queues[served.name].add, *requests))
        return stream

    def end(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """End a request before its next step: with an error, or as if the model had."""
        self._commands.put(partial(self._queues[request.served.name].cancel, request, error))

    def has_read(self, request: ServedRequest, count: int) -> None:
        """Note that the client has read ``count`` tokens; a paused request may resume."""
        self._commands.put(partial(self._queues[request.served.name].has_read, request, count))

    def _run(self) -> None:
        """The thread: obey commands, then a turn of every model that has something to do."""
        queues = [*self._queues.values()]
        with ExitStack() as running:
            try:
                for queue in queues:
                    running.enter_context(queue.running())
                    queue.warm_up()
                self.ready.set()
                busy = False
                while not self._stopping:
                    self._obey(wait=not busy)
                    busy = self._turn(queues)
            except Exception:
                _log.exception("the worker has failed")
            finally:
                self.ready.clear()
                with self._taking:
                    failed = ApiError("the worker has failed: restart the server", status=503)
                    self._stopping = self._stopping or failed
                self._obey(wait=False)  # what came before
                for queue in queues:
                    queue.close(self._stopping)
                self.records.deliver()

    def _turn(self, queues: Sequence[ModelQueue]) -> bool:
        """A turn of each model; returns whether there is more to do at once."""
        waiting = [queue for queue in queues if queue.decoding]
        busy = [queue.turn(hurried=any(one is not queue for one in waiting)) for queue in queues]
        self.records.deliver()
        return any(busy)

    def _obey(self, wait: bool) -> None:
        """Run the commands that have come; if there is nothing else to do, wait for one."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            try:
                command()
            except Exception:  # no caller waits for its result, and others must go on
                _log.exception("a command has failed")
