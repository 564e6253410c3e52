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
from dataclasses import dataclass, replace
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

_log = logging.getLogger("mlxspec.server")

# --- events ---


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

# --- requests ---

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
        given = cast(GenerationOptions, {**served.options, **options})
        super().__init__(
            *(decoder, prompt, max_tokens, given),
            partial(served.make_drafter, prediction, partition),
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
        self.stream.worker.metrics.add_step(step.verified, seconds, plain_seconds)

    def on_response(self, response: GenerationResponse) -> None:
        """Turn a response into events."""
        worker = self.stream.worker
        if self.first_token is None:
            self.first_token = time.perf_counter()
            n_prompt = len(self.prompt)
            worker.metrics.add_first_token(self.first_token - self.asked, n_prompt, self.n_cached)
            worker.queue(self, Begun(self.index, n_prompt, self.n_cached))
        piece = Piece(self.index, response.text, response.token, response.from_draft)
        if self.top_logprobs is not None:
            found = response.token_logprobs(self.top_logprobs)
            piece = replace(piece, logprob=found.logprob, top=tuple(found.top))
        worker.queue(self, piece)

    def on_end(self) -> None:
        """Queue the last event, and give the caches back to the prefix cache."""
        if self.error is not None and self.finish_reason is None:
            self.stream.worker.end_of(self, _failure(self.error))
        else:
            stop = self.output.stop_string if self.finish_reason else None
            ended = Ended(  # with "stop" if it was cancelled without an error
                *(self.index, self.finish_reason or "stop", len(self.prompt), self.n_cached),
                *(self.generated, self.stats.drafted, self.stats.accepted, stop),
            )
            self.stream.worker.end_of(self, ended)
        try:
            if self.session:
                self.served.cache.give_back(self.session)
        except Exception:
            _log.exception("a prompt could not be kept")
        # The stream leads here: the caches would wait for the garbage collector.
        self.session = None


def _failure(error: Exception) -> ApiError:
    """The error that a client gets for what ended its generation."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MlxspecError):
        return ApiError(str(error))
    _log.error("a generation has failed", exc_info=error)
    return ApiError(f"the generation has failed: {error}", status=500)


EventBatch = tuple[ServedRequest, list[Event | ApiError]]
"""A request and its events of one turn, in order; never empty."""


class EventStream:
    """The events of one client's requests, for the event loop that made it.

    Args:
        worker: that runs them.
        requests: one for each choice.
    """

    def __init__(self, worker: Worker, requests: Sequence[ServedRequest]) -> None:
        self.worker = worker
        self.requests = requests
        self.loop = asyncio.get_running_loop()
        self.batches: asyncio.Queue[EventBatch] = asyncio.Queue()
        for request in requests:
            request.stream = self

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
                        request, batch = await self.batches.get()
                except TimeoutError:
                    yield []
                    continue
                yield [event for event in batch if not isinstance(event, ApiError)]
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                left -= isinstance(batch[-1], Ended)
                self.worker.has_read(request, sum(isinstance(one, Piece) for one in batch))
        finally:
            self.close()

    def stop(self, finished: Callable[[int], bool]) -> None:
        """End generations by the indices of their choices, as if the model had ended them."""
        for request in self.requests:
            if request.state in (State.DECODE, State.PAUSED) and finished(request.index):
                self.worker.end(request)

    def close(self) -> None:
        """Cancel all generations that have not ended."""
        for request in self.requests:
            if not request.done:
                self.worker.end(request, ApiError("cancelled", status=499))


# --- the queue of a model ---

_MOST_UNREAD = 64  # tokens that a slow reader may leave unread before its generation waits


class ModelQueue(Engine):
    """Runs the requests to one model; used in the worker's thread alone.

    Args:
        served: the model.
        worker: whose limits and metrics it has.
    """

    def __init__(self, served: ServedModel, worker: Worker) -> None:
        limits = worker.limits
        stall = limits.stall / len(worker.models)
        super().__init__(
            served.decoder, max_active=limits.active, stall=stall, max_unread=_MOST_UNREAD
        )
        self._served = served
        self._metrics = worker.metrics

    def warm_up(self) -> None:
        """Find out what the model verifies and what steps cost, before the first request."""
        decoder = self._served.decoder
        make_drafter = partial(self._served.make_drafter, (), self._served.owner)
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
            self._metrics.add_forward(self.step_seconds, *self.step_shape)
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


# --- the worker ---

_RETRY_AFTER = 5  # seconds, in the answer to a client that finds the queue full
_RECENT = 12  # ended requests whose figures are kept
_OUTCOMES = {499: "cancelled", 429: "refused", 503: "ending"}


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

    Attributes:
        models: by their names.
        metrics: of all that has happened.
        requests: that have not ended, in the order in which they came.
        recent: figures of those that have ended last, with when that was.
        ready: set while requests are answered.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: WorkerLimits = WorkerLimits(),  # noqa: B008  # a constant
        on_end: Callable[[Sequence[ServedRequest]], object] = lambda requests: None,
    ) -> None:
        self.models = {served.name: served for served in models}
        self.limits = limits
        self.on_end = on_end
        self.metrics = Metrics()
        self.requests: list[ServedRequest] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.ready = threading.Event()
        self._outbox: dict[ServedRequest, list[Event | ApiError]] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._queues = {served.name: ModelQueue(served, self) for served in models}
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
        self._commands.put(partial(self._stop, ApiError("the server is ending", status=503)))
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
        active, queued, _ = self.limits
        if len(requests) > active + queued:
            raise ApiError(
                f"{len(requests)} choices are more than the server takes at once, which are "
                f"{active + queued}: ask for fewer",
                param="n",
            )
        states = [one.state for one in self.requests.copy() if one.served is served]
        waiting = states.count(State.WAITING)
        free = max(0, active - (len(states) - waiting))
        if waiting + len(requests) > queued + free:
            self.metrics.add_end("refused")
            raise ApiError(
                f"{waiting} generations are waiting already: try again later",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )
        stream = EventStream(self, requests)
        with self._taking:
            if self._stopping:
                raise self._stopping
            self.requests += requests
            self._commands.put(partial(self._queues[served.name].add, *requests))
        return stream

    def end(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """End a request before its next step, with an error or as if the model had ended it."""
        self._commands.put(partial(self._queues[request.served.name].cancel, request, error))

    def has_read(self, request: ServedRequest, count: int) -> None:
        """Record that the client has read ``count`` tokens; a paused request may resume."""
        self._commands.put(partial(self._queues[request.served.name].has_read, request, count))

    # --- in the thread ---

    def queue(self, request: ServedRequest, event: Event | ApiError) -> None:
        """Queue an event for its client, until the end of the turn."""
        self._outbox.setdefault(request, []).append(event)

    def end_of(self, request: ServedRequest, ended: Ended | ApiError) -> None:
        """Record the end of a request, and queue it for the client."""
        now = time.perf_counter()
        if isinstance(ended, ApiError):
            request.failure = ended
            request.outcome = _OUTCOMES.get(ended.status, "error")
        else:
            request.outcome = ended.finish_reason
        self.queue(request, ended)
        self.recent.append(request.figures() | {"ended": now})
        self.requests.remove(request)
        self.metrics.add_end(request.outcome, now - request.asked)
        try:
            if all(one.outcome for one in request.stream.requests):
                self.on_end(request.stream.requests)
        except Exception:  # such as a log without a reader
            _log.exception("the end of a generation could not be recorded")

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
                    self._stop(ApiError("the worker has failed: restart the server", status=503))
                self._obey(wait=False)  # what came before
                for queue in queues:
                    queue.close(self._stopping)
                self._deliver()

    def _turn(self, queues: Sequence[ModelQueue]) -> bool:
        """A turn of each model; returns whether there is more to do at once."""
        waiting = [queue for queue in queues if queue.decoding]
        busy = [queue.turn(hurried=any(one is not queue for one in waiting)) for queue in queues]
        self._deliver()
        return any(busy)

    def _stop(self, reason: ApiError) -> None:
        self._stopping = self._stopping or reason

    def _obey(self, wait: bool) -> None:
        """Run the commands that have come; if there is nothing else to do, wait for one."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            try:
                command()
            except Exception:  # no caller waits for its result, and others must go on
                _log.exception("a command has failed")

    def _deliver(self) -> None:
        """Hand the queued events to the event loops of their clients.

        There is one call per loop, since each interrupts the loop, and the worker waits.
        """
        outbox, self._outbox = self._outbox, {}
        of_loops: defaultdict[asyncio.AbstractEventLoop, list[EventBatch]] = defaultdict(list)
        for batch in outbox.items():
            of_loops[batch[0].stream.loop].append(batch)
        for loop, batches in of_loops.items():
            with suppress(RuntimeError):  # the loop has ended; no task waits
                loop.call_soon_threadsafe(_take, batches)


def _take(batches: Sequence[EventBatch]) -> None:
    for batch in batches:
        batch[0].stream.batches.put_nowait(batch)
