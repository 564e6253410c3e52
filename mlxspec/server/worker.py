"""The worker thread, which runs the models: it takes requests, and sends their events."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from ..drafting.accept import VerifiedStep
from ..errors import MlxspecError
from ..generation.asynchronous import RequestStream, SchedulerThread
from ..generation.decoder import Decoder
from ..generation.options import GenerationOptions
from ..generation.request import Request, State
from ..generation.response import GenerationResponse
from ..generation.scheduler import LEAST_UNREAD, Scheduler
from ..generation.session import Session
from .body import ApiError, shown
from .memory_budget import ServerMemory, in_words
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
        top: the likeliest tokens at its position with their log-probabilities, best first.
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

_OUTCOMES = {499: "cancelled", 429: "refused", 503: "ending"}  # by status
_numbers = itertools.count(1)


class ServedRequest(Request):
    """One choice of an answer, with its figures for the status page.

    Args:
        options: as for :meth:`mlxspec.Decoder.stream`.
        prediction: token ids that the client expects as output.
        top_logprobs: how many of the likeliest tokens its events have; None for no
            log-probabilities.
        key: the client's key if there are several. Other keys' prefixes and answers are not
            used.

    Raises:
        OptionError: an option is out of range.

    Attributes:
        number: the request's number in this process.
        stream: the stream of its events.
        index: the choice's index, which its events have.
        session: the session that the prefix cache has lent to it.
        received: when it arrived, by ``time.perf_counter``.
        first_token: when its first token was generated.
        need: the memory that it may take.
    """

    stream: EventStream
    index: int
    session: Session | None = None

    def __init__(
        self,
        served: ServedModel,
        prompt: Sequence[int],
        max_tokens: int,
        options: GenerationOptions,
        *,
        prediction: Sequence[int] = (),
        top_logprobs: int | None = None,
        key: str = "",
    ) -> None:
        given = cast(GenerationOptions, {**vars(served.cache_options), **options})
        make_drafter = partial(served.make_drafter, prediction, key)
        super().__init__(served.decoder, prompt, max_tokens, given, make_drafter, self._send)
        self.at_end = self._end
        self.number = next(_numbers)
        self.served = served
        self.top_logprobs = top_logprobs
        self.key = key
        self.received = time.perf_counter()
        self.first_token: float | None = None
        self.need = served.memory.needs(len(prompt) + max_tokens)

    @property
    def outcome(self) -> str:
        """A word that says how the request has ended."""
        if self.error is not None and self.finish_reason is None:
            status = self.error.status if isinstance(self.error, ApiError) else 500
            return _OUTCOMES.get(status, "error")
        return self.finish_reason or "stop"  # if it was cancelled without an error

    def figures(self) -> dict[str, Any]:
        """The request's state and figures, as JSON."""
        figures = {
            "number": self.number,
            "model": self.served.name,
            "state": self.outcome if self.done else self.state,
            "prompt_tokens": len(self.prompt),
            "prefilled": self.prefilled,
            "cached_tokens": self.n_cached,
            "tokens": self.generated,
            "max_tokens": self.max_tokens,
            "first_token": self.first_token - self.received if self.first_token else None,
            "tokens_per_step": self.stats.tokens_per_step or None,
            "gain": self.stats.gain,
            "seconds": time.perf_counter() - self.received,
        }
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}

    def start(self) -> None:
        make_room = partial(self.stream.worker.memory.reserve, self, self.need)
        self.session = self.lease = self.served.cache.lend(self.prompt, self.key, make_room)
        super().start()

    def on_step(self, step: VerifiedStep, seconds: float, cost: float) -> None:
        super().on_step(step, seconds, cost)
        self.stream.worker.metrics.add_step(step, seconds, cost)

    def _send(self, response: GenerationResponse) -> None:
        """Turn a response into events."""
        worker = self.stream.worker
        if self.first_token is None:
            self.first_token = time.perf_counter()
            n_prompt = len(self.prompt)
            worker.metrics.add_first_token(
                self.first_token - self.received, n_prompt, self.n_cached
            )
            worker.send(self.stream, self, Begun(self.index, n_prompt, self.n_cached))
        piece = Piece(self.index, response.text, response.token, response.from_draft)
        if self.top_logprobs is not None:
            logprobs = response.token_logprobs(self.top_logprobs)
            piece = replace(piece, logprob=logprobs.logprob, top=tuple(logprobs.top))
        worker.send(self.stream, self, piece)

    def _end(self) -> None:
        """Queue the last event, and return the caches to the prefix cache."""
        if self.error is not None and self.finish_reason is None:
            self.error = _failure(self.error, self.decoder)
            self.stream.worker.end_of(self, self.error)
        else:
            ended = Ended(
                self.index,
                self.outcome,
                len(self.prompt),
                self.n_cached,
                self.generated,
                self.stats.drafted,
                self.stats.accepted,
                self.output.stop_string if self.finish_reason else None,
            )
            self.stream.worker.end_of(self, ended)
        try:
            if self.session:
                self.served.cache.give_back(self.session)
                self.stream.worker.memory.make_room()
        except Exception:
            _log.exception("a prompt's caches could not be kept")
        # The stream refers to this request, which would keep the caches until it is collected.
        self.session = None


def _failure(error: Exception, decoder: Decoder) -> ApiError:
    """The error that a client gets for the exception that ended a generation."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MlxspecError):
        return ApiError(str(error))
    if isinstance(error, RuntimeError) and (leader := decoder.loaded.leader):
        leader.fail(error)
    _log.error("a generation has failed", exc_info=error)
    return ApiError(f"the generation has failed: {error}", status=500)


class EventStream(RequestStream):
    """The events of one client's requests.

    Args:
        requests: one request for each choice, in order.
    """

    def __init__(self, worker: Worker, requests: Sequence[ServedRequest]) -> None:
        super().__init__()
        self.worker = worker
        self.requests = requests
        for index, request in enumerate(requests):
            request.stream, request.index = self, index

    async def events(self, patience: float) -> AsyncGenerator[list[Event], None]:
        """Yield the events in batches, until all generations have ended.

        Leaving the loop early ends the generations.

        Args:
            patience: seconds without an event before an empty list is yielded.

        Raises:
            ApiError: a generation failed; the others are ended, too.
        """
        left = len(self.requests)
        read = Counter[ServedRequest]()
        try:
            while left:
                try:
                    async with asyncio.timeout(patience):
                        request, batch = await self.batches.get()
                except TimeoutError:
                    yield []
                    continue
                yield [event for event in batch if not isinstance(event, ApiError)]
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                if isinstance(batch[-1], Ended):
                    left -= 1
                read[request] += sum(isinstance(event, Piece) for event in batch)
                if read[request] >= LEAST_UNREAD:  # each message takes the worker's time
                    self._call(request, Scheduler.has_read, read.pop(request))
        finally:
            self.close()

    def stop(self, finished: Callable[[int], bool]) -> None:
        """End each generation whose choice needs no more tokens, as if the model had ended it."""
        for request in self.requests:
            if request.state in (State.DECODE, State.PAUSED) and finished(request.index):
                self._call(request, Scheduler.cancel)

    def close(self) -> None:
        """Cancel all generations that have not ended."""
        for request in self.requests:
            if not request.done:
                self._call(request, Scheduler.cancel, ApiError("cancelled", status=499))

    def _call(self, request: ServedRequest, method: Callable[..., object], *args: Any) -> None:
        self.worker.call_scheduler(request.served.name, method, request, *args)


# --- the queue of a model ---

_MOST_UNREAD = 64  # tokens that a client may leave unread before its generation pauses


class ModelQueue(Scheduler):
    """Runs the requests to one model; used only in the worker's thread."""

    def __init__(self, served: ServedModel, worker: Worker) -> None:
        super().__init__(
            served.decoder,
            max_active=worker.active,
            max_unread=_MOST_UNREAD,
            spare=worker.memory.spare_positions(served),
        )
        self.served = served
        self._worker = worker

    def admit_next(self) -> Request | None:
        """Choose the waiting request that starts now, if it fits into memory beside those that run.

        A request is skipped while another computes a prefix of its prompt, which it will then find
        in the cache. A request that no longer fits even alone, since other programs have taken
        memory, is refused.
        """
        memory = self._worker.memory
        for request in cast(list[ServedRequest], [*self._waiting]):
            if not self._worker.admit(request):
                if memory.reserved or memory.fits(request.need):
                    return None
                refusal = memory.refusal(len(request.prompt), request.max_tokens, request.need)
                self.cancel(request, refusal)
            elif not self.served.cache.should_wait(request.prompt, request.key):
                return request
        return None

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._worker.memory.release(request)


# --- the worker ---

_RETRY_AFTER = 5  # seconds; sent when the queue is full
_RECENT = 12  # ended requests whose figures are kept


class Worker(SchedulerThread):
    """Runs the generations of one or several models in its own thread.

    Args:
        active: the most running generations of a model.
        queued: the most waiting generations of a model.
        on_end: called in the worker's thread with each request that has ended.
        memory: the memory that the models share; by default, all that the machine has.

    Attributes:
        memory: the memory that the models share.
        metrics: the server's metrics.
        requests: the requests that have not ended, in order of arrival.
        recent: the figures of the requests that ended last, with the times when they ended.
    """

    def __init__(
        self,
        *,
        active: int = 8,
        queued: int = 128,
        on_end: Callable[[ServedRequest], object] = lambda request: None,
        memory: ServerMemory | None = None,
    ) -> None:
        super().__init__("mlxspec worker")
        self.memory = memory or ServerMemory()
        self.active, self.queued = active, queued
        self.on_end = on_end
        self.metrics = Metrics()
        self.requests: list[ServedRequest] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._first: ServedRequest | None = None
        """The earliest request that waits for memory."""

    @property
    def models(self) -> dict[str, ServedModel]:
        """The models that are ready, by name."""
        queues = cast(dict[str, ModelQueue], self.schedulers.copy())
        return {name: queue.served for name, queue in queues.items()}

    def stop(self) -> None:
        """End all generations and the thread, and wait until it has ended."""
        self.end(ApiError("the server is shutting down", status=503))
        self.join()

    def fail(self, error: ApiError) -> None:
        """End all requests with an error; called in any thread, since the worker's may be stuck."""
        self.end(error)
        for request in self.requests.copy():
            self.send(request.stream, request, error)
        self.deliver()

    def check_queue(self, served: ServedModel, count: int) -> None:
        """Check that ``count`` more generations may wait for a model.

        Raises:
            ApiError: 400, they are more than may ever wait; 429, the queue is full.
        """
        if count > (most := self.queued + self.active):
            self.metrics.add_end("refused")
            raise ApiError(
                f"{count} answers were requested, but the server takes at most {most} at once: "
                "request fewer"
            )
        states = [request.state for request in self.requests.copy() if request.served is served]
        waiting = states.count(State.WAITING)
        free = max(0, self.active - (len(states) - waiting))
        if waiting + count > self.queued + free:
            self.metrics.add_end("refused")
            raise ApiError(
                f"{waiting} generations are waiting, and the limit is {self.queued}: try again "
                "later, or ask for fewer choices",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )

    def submit(self, served: ServedModel, requests: Sequence[ServedRequest]) -> EventStream:
        """Queue generations, all or none; called in an event loop.

        Raises:
            ApiError: 429, the queue is full; 503, the server is shutting down.
        """
        if self.ending:
            raise self.ending
        self.check_queue(served, len(requests))
        stream = EventStream(self, requests)
        self.requests += requests
        self.call(self.schedulers[served.name].add, *requests)
        return stream

    # --- in the thread ---

    def _run(self) -> None:
        with self.memory.in_force():
            super()._run()

    def open(self, served: ServedModel) -> None:
        """Take requests to a model.

        Raises:
            ApiError: 413, not even a request of one token fits into memory beside the model.
        """
        least = served.memory.needs(1)
        self.memory.add(served)
        if not self.memory.ever_fits(least):
            bound = in_words(self.memory.bound_for(least) + (1 << 20))
            self.memory.remove(served)
            raise ApiError(
                f"{in_words(self.memory.limit)} of memory is too little for "
                f"{shown(served.name)}: allow at least {bound} with --memory-limit, if the machine "
                "has that much, or use a smaller or more quantised model",
                status=413,
                param="model",
                code="out_of_memory",
            )
        self.schedulers[served.name] = ModelQueue(served, self)

    def leave(self, served: ServedModel) -> None:
        """Stop answering requests to a model."""
        self.schedulers.pop(served.name).close()
        self.memory.remove(served)
        self._first = None  # a reference would keep the model in memory

    def admit(self, request: ServedRequest) -> bool:
        """Let a request start if it fits and no earlier request waits for memory.

        If it does not fit, later requests wait for it.
        """
        first = self._first
        if first and first.state is State.WAITING and first.number < request.number:
            return False
        fits = self.memory.fits(request.need)
        if not fits:
            self._first = request
        return fits

    def end_of(self, request: ServedRequest, ended: Ended | ApiError) -> None:
        """Record the end of a request, and send its last event to the client."""
        now = time.perf_counter()
        self.send(request.stream, request, ended)
        self.recent.append(request.figures() | {"ended": now})
        self.requests.remove(request)
        self.metrics.add_end(request.outcome, now - request.received)
        self.on_end(request)
