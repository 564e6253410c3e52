"""Requests to served models, the streams of their events, and the records of all of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from ..engine import step as steps
from ..errors import MlxspecError
from ..generation.options import GenerationOptions
from ..generation.request import Request, State
from ..generation.response import GenerationResponse
from ..generation.session import Session
from .errors import ApiError
from .events import Begun, Ended, Event, Piece
from .metrics import Metrics, outcome_of
from .served_model import ServedModel

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
        checked = decoder.checked(
            max_tokens, cast(GenerationOptions, {**served.options, **options})
        )
        super().__init__(
            *(decoder, prompt, max_tokens, checked),
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
    def session(self) -> Session | None:
        """Lent by the prefix cache while it runs."""
        return self.options.session

    @property
    def cached_tokens(self) -> int | None:
        """How many of the prompt's tokens were cached, once the first token has come."""
        return None if self.first_token is None else self.n_cached

    @property
    def gain(self) -> float | None:
        """How many times as fast its steps were as plain ones; None where that is unknown."""
        known = self.plain_seconds and self.decode_seconds
        return self.plain_seconds / self.decode_seconds if known else None

    def figures(self) -> dict[str, Any]:
        """Its state and figures, as JSON."""
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
            "gain": self.gain,
            "seconds": time.perf_counter() - self.asked,
        }

    def start(self) -> steps.Sequence:
        session = self.served.cache.lend(self.prompt, self.partition)
        self.options = self.options._replace(session=session)
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
            records.tell(self, Begun(self.index, n_prompt, self.n_cached))
        wanted = self.top_logprobs
        logprobs = None if wanted is None else response.token_logprobs(wanted)
        piece = Piece(
            *(self.index, response.text, response.token, response.from_draft),
            logprobs.logprob if logprobs else None,
            tuple(logprobs.top) if logprobs else (),
        )
        records.tell(self, piece)

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
        self.options = self.options._replace(session=None)

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


class Commands(Protocol):
    """What clients ask of the worker for their requests; called in any thread."""

    def end(self, request: ServedRequest, error: ApiError | None = None) -> None:
        """End a request before its next step: with an error, or as if the model had."""

    def has_read(self, request: ServedRequest, count: int) -> None:
        """The client has read so many tokens; a paused request may resume."""


class EventStream:
    """The events of one client's requests, for the event loop that made it.

    Args:
        commands: to the worker.
        records: of the worker.
        requests: one for each choice.
    """

    def __init__(
        self, commands: Commands, records: Records, requests: Sequence[ServedRequest]
    ) -> None:
        self.requests = requests
        self.records = records
        self._commands = commands
        self._loop = asyncio.get_running_loop()
        self._batches: deque[Batch] = deque()
        self._waiting: asyncio.Future[None] | None = None
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
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(EventStream._take, some)

    @staticmethod
    def _take(batches: Sequence[Batch]) -> None:
        for request, batch in batches:
            request.stream._batches.append((request, batch))
            request.stream._wake()

    def _wake(self) -> None:
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    async def _something(self, timeout: float) -> None:
        """Return once there is a batch, or after so many seconds."""
        self._waiting = self._loop.create_future()
        timer = self._loop.call_later(timeout, self._wake)
        try:
            await self._waiting
        finally:
            timer.cancel()
            self._waiting = None

    async def events(self, life_sign: float) -> AsyncGenerator[list[Event], None]:
        """The events, in batches, until all generations have ended.

        Leaving the loop early ends the generations.

        Args:
            life_sign: an empty list comes whenever nothing has happened for so many seconds.

        Raises:
            ApiError: a generation has failed; the others are ended.
        """
        left = len(self.requests)
        try:
            while left:
                if not self._batches:
                    await self._something(life_sign)
                if not self._batches:
                    yield []
                    continue
                request, batch = self._batches.popleft()
                yield [event for event in batch if not isinstance(event, ApiError)]
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                left -= isinstance(batch[-1], Ended)
                self._commands.has_read(request, sum(isinstance(one, Piece) for one in batch))
        finally:
            self.close()

    def stop(self, finished: Callable[[int], bool]) -> None:
        """End generations, by the indices of their choices, as if the model had ended them."""
        for request in self.requests:
            if request.state in (State.DECODE, State.PAUSED) and finished(request.index):
                self._commands.end(request)

    def close(self) -> None:
        """Cancel all generations that have not ended."""
        for request in self.requests:
            if not request.done:
                self._commands.end(request, ApiError("cancelled", status=499))


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

    def tell(self, request: ServedRequest, event: Event | ApiError) -> None:
        """Queue an event for its client, until the end of the turn."""
        self._outbox.setdefault(request, []).append(event)

    def end(self, request: ServedRequest, ended: Ended | ApiError) -> None:
        """Record the end of a request, and queue it for the client."""
        now = time.perf_counter()
        request.outcome = outcome_of(ended)
        request.failure = ended if isinstance(ended, ApiError) else None
        self.tell(request, ended)
        self.recent.append(request.figures() | {"ended": now})
        self.requests.remove(request)
        self.metrics.add_end(ended, now - request.asked)
        try:
            if all(one.outcome for one in request.stream.requests):
                self.on_end(request.stream.requests)
        except Exception:  # such as a log that nobody reads any more
            _log.exception("the end of a generation could not be recorded")

    def deliver(self) -> None:
        """Hand over the queued events, at the end of a turn."""
        outbox, self._outbox = self._outbox, {}
        EventStream.deliver([*outbox.items()])
