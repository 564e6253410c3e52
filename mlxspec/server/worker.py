"""The worker thread, which owns the models: it takes requests and sends events of generations.

All models run in this thread. Other threads communicate with it in two ways only: they put commands
into a queue, and after each turn it hands the events to the event loops that wait for them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from ..drafting.drafter import NoDraft, VerifiedStep
from ..engine import step as steps
from ..errors import MlxspecError
from ..generation.engine import Engine
from ..generation.loaded import LoadedModel
from ..generation.options import GenerationOptions
from ..generation.request import Request, State
from ..generation.response import GenerationResponse
from .body import ApiError
from .memory import ServerMemory
from .metrics import Metrics
from .served_model import ServedModel

_log = logging.getLogger("mlxspec.server")

# --- events ---


@dataclass(frozen=True)
class Piece:
    """One generated token of a choice.

    Attributes:
        index: the choice's index.
        text: the next segment of text; may be empty, or include text of earlier tokens.
        token: the token id.
        accepted: whether it was an accepted draft token.
        logprob: the token's log-probability, if requested.
        top: the likeliest tokens in its place with their log-probabilities, best first.
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
        index: the choice's index.
        prompt_tokens: the number of tokens of its prompt.
        cached_tokens: how many of them were cached.
    """

    index: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Ended:
    """A choice has ended.

    Attributes:
        index: the choice's index.
        finish_reason: "stop" or "length".
        prompt_tokens: the number of tokens of its prompt.
        cached_tokens: how many of them were cached.
        completion_tokens: the number of generated tokens, including the one that ended the output.
        drafted: the number of proposed draft tokens.
        accepted: the number of accepted draft tokens.
        stop: the stop string that ended it; None if it ended otherwise.
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
    """One choice of an answer, with its figures for the status page.

    Args:
        served: the model.
        prompt: token ids.
        max_tokens: the most tokens to generate.
        options: as for :meth:`mlxspec.Decoder.stream`.
        index: the choice's index, which its events have.
        prediction: token ids that the client expects as output.
        top_logprobs: how many of the likeliest tokens its events have; None for no
            log-probabilities.
        partition: the partition whose prefixes and answers may be used.

    Raises:
        OptionError: an option is out of range.

    Attributes:
        number: the request's number in this process.
        stream: the stream of its events.
        asked: when it arrived, by ``time.perf_counter``.
        first_token: when its first token was generated.
        need: the memory that it may take.
        failure: the error that ended it; None if it ended otherwise.
        outcome: how it has ended, in a word; None while it runs.
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
        self.need = served.memory.needs(len(prompt) + max_tokens)
        self.failure: ApiError | None = None
        self.outcome: str | None = None

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens were cached; None before the first token."""
        return None if self.first_token is None else self.n_cached

    def figures(self) -> dict[str, Any]:
        """The request's state and figures, as JSON."""
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
            # The speed of its steps relative to plain ones.
            "gain": plain / seconds if plain and seconds else None,
            "seconds": time.perf_counter() - self.asked,
        }

    def start(self) -> steps.Sequence:
        make_room = partial(self.stream.worker.memory.reserve, self, self.need)
        self.session = self.served.cache.lend(self.prompt, self.partition, make_room)
        return super().start()

    def on_step(self, step: VerifiedStep, seconds: float, plain_seconds: float | None) -> None:
        super().on_step(step, seconds, plain_seconds)
        self.stream.worker.metrics.add_step(step, seconds, plain_seconds)

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
        """Queue the last event, and return the caches to the prefix cache."""
        if self.error is not None and self.finish_reason is None:
            self.stream.worker.end_of(self, _failure(self.error, self.decoder))
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
                self.stream.worker.memory.make_room()
        except Exception:
            _log.exception("the caches of a prompt could not be kept")
        # The stream refers to this request, so its caches would wait for the garbage collector.
        self.session = None


def _failure(error: Exception, decoder: LoadedModel) -> ApiError:
    """The client's error for the exception that ended a generation."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MlxspecError):
        return ApiError(str(error))
    if isinstance(error, RuntimeError) and (leader := getattr(decoder.model, "leader", None)):
        leader.fail(error)
    _log.error("a generation has failed", exc_info=error)
    return ApiError(f"the generation has failed: {error}", status=500)


class EventStream:
    """The events of one client's requests, for the event loop that creates it.

    Args:
        worker: the worker that runs the requests.
        requests: one request for each choice.
    """

    def __init__(self, worker: Worker, requests: Sequence[ServedRequest]) -> None:
        self.worker = worker
        self.requests = requests
        self.loop = asyncio.get_running_loop()
        self.batches: asyncio.Queue[tuple[ServedRequest, list[Event | ApiError]]] = asyncio.Queue()
        """Requests with their events of one turn, in order."""
        for request in requests:
            request.stream = self

    async def events(self, keep_alive: float) -> AsyncGenerator[list[Event], None]:
        """Yield the events in batches, until all generations have ended.

        Leaving the loop early ends the generations.

        Args:
            keep_alive: seconds without an event before an empty list is yielded.

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
                count = sum(isinstance(one, Piece) for one in batch)
                self.worker.tell(request, ModelQueue.has_read, request, count)
        finally:
            self.close()

    def stop(self, finished: Callable[[int], bool]) -> None:
        """End each generation whose choice, by its index, is finished, as if the model had."""
        for request in self.requests:
            if request.state in (State.DECODE, State.PAUSED) and finished(request.index):
                self.worker.tell(request, ModelQueue.cancel, request)

    def close(self) -> None:
        """Cancel all generations that have not ended."""
        for request in self.requests:
            if not request.done:
                error = ApiError("cancelled", status=499)
                self.worker.tell(request, ModelQueue.cancel, request, error)


# --- the queue of a model ---

_MOST_UNREAD = 64  # tokens that a client may leave unread before its generation pauses


class ModelQueue(Engine):
    """Runs the requests to one model; used only in the worker's thread.

    Args:
        served: the model.
        worker: the worker with the limits and metrics.
    """

    def __init__(self, served: ServedModel, worker: Worker) -> None:
        super().__init__(
            served.decoder,
            max_active=worker.active,
            stall=worker.stall,
            max_unread=_MOST_UNREAD,
            spare=worker.memory.spare_positions(served),
        )
        self._cache = served.cache
        self._worker = worker

    @property
    def decoding(self) -> bool:
        """Whether any generation is decoding."""
        return bool(self._in(State.DECODE))

    def turn(self, hurried: bool = False) -> bool:
        """As :meth:`Engine.turn`; an exception ends all requests."""
        steps = self.steps
        try:
            busy = super().turn(hurried)
        except Exception as error:
            _log.exception("a turn has failed")
            self.close(error)
            return False
        if self.steps > steps:
            self._worker.metrics.add_forward(self.step_seconds, *self.step_shape)
        return busy

    def next_waiting(self) -> Request | None:
        """The next waiting request, if it fits into memory beside those that run.

        A request is skipped while another one computes a prefix of its prompt, which it will then
        find in the cache. One that no longer fits even alone, since other programs have taken
        memory, is refused.
        """
        memory = self._worker.memory
        for request in cast(list[ServedRequest], [*self._waiting]):
            if not self._worker.admits(request):
                if memory.reserved or memory.ever_fits(request.need):
                    return None
                sizes = len(request.prompt), request.max_tokens, request.need
                self.cancel(request, memory.refusal(*sizes))
            elif not self._cache.should_wait(request.prompt, request.partition):
                return request
        return None

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._worker.memory.release(request)


# --- the worker ---

_RETRY_AFTER = 5  # seconds, in responses that say that the queue is full
_LOOK = 1.0  # seconds after which an idle worker looks at the system's memory again
_RECENT = 12  # ended requests whose figures are kept
_OUTCOMES = {499: "cancelled", 429: "refused", 503: "ending"}

_Result = TypeVar("_Result")


class Worker:
    """Runs generations of one or several models in a thread of its own.

    Args:
        models: the served models.
        active: the most running generations of a model.
        queued: the most waiting generations of a model.
        stall: seconds for which running generations may wait while prompts run.
        on_end: called in the worker's thread with all requests of one body, once they have ended.
        memory: the memory that the models share; by default, all that the machine has.

    Attributes:
        models: the served models by name.
        memory: the memory that they share.
        metrics: the server's metrics.
        requests: the requests that have not ended, in order of arrival.
        recent: the figures of the requests that ended last, with the times of their ends.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        active: int = 8,
        queued: int = 128,
        stall: float = 0.15,
        on_end: Callable[[Sequence[ServedRequest]], object] = lambda requests: None,
        memory: ServerMemory | None = None,
    ) -> None:
        self.models = {served.name: served for served in models}
        self.memory = memory or ServerMemory()
        for served in models:
            self.memory.add(served)
        self.active, self.queued, self.stall = active, queued, stall
        self.on_end = on_end
        self.metrics = Metrics()
        self.requests: list[ServedRequest] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._outbox: dict[ServedRequest, list[Event | ApiError]] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._queues: dict[str, ModelQueue] = {}
        """The models' queues by name; used only in the thread."""
        self._first: ServedRequest | None = None
        """The request that came first of those that wait for memory."""
        self._stopping: ApiError | None = None
        """The error for further requests, once the worker stops."""
        self._taking = threading.Lock()
        """Held while requests are queued, so that none is queued after the worker has stopped."""
        self._thread = threading.Thread(target=self._run, name="mlxspec worker", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it answers requests.

        Raises:
            ApiError: the thread has failed; the log has the reason.
        """
        self._thread.start()
        self.call(lambda: None)

    def stop(self) -> None:
        """End all generations and the thread, and wait for its end."""
        self._commands.put(partial(self._stop, ApiError("the server is ending", status=503)))
        self._thread.join()

    def fail(self, error: ApiError) -> None:
        """End all requests with an error, from any thread: the worker's own may never return."""
        self._stop(error)
        for request in self.requests.copy():
            self.queue(request, error)
        self._deliver()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""
        return self.alive and not self._stopping

    # --- in other threads ---

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function in the worker's thread, between two turns, and wait for its result.

        Raises:
            ApiError: 503, the server is ending.
        """
        result: Future[_Result] = Future()

        def run() -> None:
            try:
                if self._stopping:
                    raise self._stopping
                result.set_result(function(*args))
            except Exception as error:
                result.set_exception(error)

        self._put(run)
        return result.result()

    def _put(self, command: Callable[[], None], requests: Sequence[ServedRequest] = ()) -> None:
        """Queue a command, and the requests that it adds; raises ApiError if none is run now."""
        with self._taking:
            if self._stopping:
                raise self._stopping
            self.requests += requests
            self._commands.put(command)

    def check_queue(self, served: ServedModel, count: int) -> None:
        """Check that so many more generations may wait for a model.

        Raises:
            ApiError: 429, the queue is full.
        """
        states = [one.state for one in self.requests.copy() if one.served is served]
        waiting = states.count(State.WAITING)
        free = max(0, self.active - (len(states) - waiting))
        if waiting + count > self.queued + free:
            self.metrics.add_end("refused")
            raise ApiError(
                f"{waiting} generations are waiting already, and {self.queued} may: try again "
                "later, or ask for fewer choices",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )

    def submit(self, served: ServedModel, requests: Sequence[ServedRequest]) -> EventStream:
        """Queue generations, all or none; called in an event loop.

        Raises:
            ApiError: 429, the queue is full; 503, the server is ending.
        """
        self.check_queue(served, len(requests))
        stream = EventStream(self, requests)
        self._put(partial(self._tell, requests[0], ModelQueue.add, *requests), requests)
        return stream

    def tell(self, request: ServedRequest, method: Callable[..., object], *args: Any) -> None:
        """Call a method of the queue of a request's model in the thread, between two turns."""
        self._commands.put(partial(self._tell, request, method, *args))

    # --- in the thread ---

    def open(self, served: ServedModel) -> None:
        """Begin to answer requests to a model, after its first steps: MLX compiles them."""
        self.memory.add(served)
        warm_up, decoder = Engine(served.decoder), served.decoder
        for prompt in ([1, 1], [1, 1, 1]):
            warm_up.add(Request(decoder, prompt, 8, {}, NoDraft))
        warm_up.run()
        self._queues[served.name] = ModelQueue(served, self)

    def leave(self, served: ServedModel) -> None:
        """Answer no more requests to a model."""
        self._queues.pop(served.name).close()
        self.memory.remove(served)
        self._first = None  # it would hold the model's memory

    def admits(self, request: ServedRequest) -> bool:
        """Whether a request may start: it fits, and none that came earlier waits for memory."""
        first = self._first
        if first and first.state is State.WAITING and first.number < request.number:
            return False
        fits = self.memory.fits(request.need)
        if not fits:
            self._first = request
        return fits

    def _tell(self, request: ServedRequest, method: Callable[..., object], *args: Any) -> None:
        """Call a method of the queue of a request's model, if the model is still there."""
        if queue := self._queues.get(request.served.name):
            method(queue, *args)

    def queue(self, request: ServedRequest, event: Event | ApiError) -> None:
        """Queue an event for the client, who receives it at the end of the turn."""
        self._outbox.setdefault(request, []).append(event)

    def end_of(self, request: ServedRequest, ended: Ended | ApiError) -> None:
        """Record the end of a request, and queue the event for the client."""
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
        except Exception:  # such as a log that nobody reads
            _log.exception("the end of a generation could not be recorded")

    def _run(self) -> None:
        """Run the thread: in a loop, run the commands and then a turn of every model."""
        with self.memory.in_force():
            try:
                for name in [*self.models]:  # no variable holds a model that may leave
                    self.open(self.models[name])
                busy = False
                while not self._stopping:
                    self._obey(wait=not busy)
                    busy = self._turn()
            except Exception:
                _log.exception("the worker has failed")
            finally:
                self._stop(ApiError("the worker has failed: restart the server", status=503))
                self._obey(wait=False)  # earlier commands
                for queue in self._queues.values():
                    queue.close(self._stopping)
                self._deliver()

    def _turn(self) -> bool:
        """Run a turn of each model; returns whether there is more to do."""
        queues = [*self._queues.values()]
        waiting = [queue for queue in queues if queue.decoding]
        for queue in queues:
            queue.stall = self.stall / len(queues)
        busy = [queue.turn(hurried=any(one is not queue for one in waiting)) for queue in queues]
        self._deliver()
        return any(busy)

    def _stop(self, reason: ApiError) -> None:
        with self._taking:
            self._stopping = self._stopping or reason

    def _obey(self, wait: bool) -> None:
        """Run all queued commands; if ``wait``, wait for the first one.

        While it waits, idle caches make room for other programs.
        """
        while wait or not self._commands.empty():
            try:
                command = self._commands.get(timeout=_LOOK)
            except Empty:
                self.memory.make_room()
                return
            wait = False
            try:
                command()
            except Exception:  # no caller waits for the result, and other requests must continue
                _log.exception("a command has failed")

    def _deliver(self) -> None:
        """Hand the queued events to the event loops of their clients.

        There is only one call per loop, since each call interrupts the loop and delays the worker.
        """
        outbox, self._outbox = self._outbox, {}
        for loop in {request.stream.loop for request in outbox}:
            with suppress(RuntimeError):  # the loop has ended; no task waits
                loop.call_soon_threadsafe(_take, loop, outbox)


def _take(
    loop: asyncio.AbstractEventLoop, outbox: Mapping[ServedRequest, list[Event | ApiError]]
) -> None:
    for request, events in outbox.items():
        if request.stream.loop is loop:
            request.stream.batches.put_nowait((request, events))
