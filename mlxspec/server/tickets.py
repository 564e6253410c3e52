"""Generations that have been asked for: what they ask, how they do, and the way to who asked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..generation.options import GenerationOptions
from ..generation.response import GenerationResponse
from ..generation.scheduler import Job
from ..generation.session import Session
from .errors import ApiError
from .events import Ended, Event
from .served_model import ServedModel


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
        partition: whose prefixes and answers may be used.
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


_numbers = itertools.count(1)


class Ticket:
    """A generation that has been asked for, from the queue to its end.

    Attributes:
        number: counts all generations of the process.
        state: "queued", "prefill", "decoding" or "ended".
        prefilled: prompt tokens that have run or were cached.
        cached_tokens: those that were cached, once the first token has come.
        tokens: that have been generated.
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
        self.cached_tokens: int | None = None
        self.tokens = 0
        self.asked = time.perf_counter()
        self.first_token: float | None = None
        self.emitted = 0
        self.steps = 0
        self.decode_seconds = 0.0
        """What its steps took whose time without drafts is known."""
        self.plain_seconds = 0.0
        """How long their tokens would have taken without drafts, beside the same others."""
        self.last: GenerationResponse | None = None
        self.error: ApiError | None = None
        """What has ended it, if that was no end of its own."""
        self.outcome: str | None = None
        """How it has ended, in a word."""
        self.job: Job | None = None
        self.session: Session | None = None
        self.nbytes = served.memory.bytes_for(len(request.prompt) + request.max_tokens)
        self.batch: list[Event | ApiError] = []
        """What has happened since it was last handed over."""
        self.unread = 0

    @property
    def gain(self) -> float | None:
        """How many times as fast its steps were as plain ones; None where that is unknown."""
        known = self.plain_seconds and self.decode_seconds
        return self.plain_seconds / self.decode_seconds if known else None

    def figures(self) -> dict[str, Any]:
        """How it is doing, as JSON."""
        job = self.job  # the worker may take it away meanwhile
        return {
            "number": self.number,
            "model": self.served.name,
            "state": self.outcome or ("paused" if job and job.paused else self.state),
            "prompt_tokens": len(self.request.prompt),
            "prefilled": self.prefilled,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "max_tokens": self.request.max_tokens,
            "tokens_per_step": self.emitted / self.steps if self.steps else None,
            "gain": self.gain,
            "seconds": time.perf_counter() - self.asked,
        }

    def hand_over(self) -> list[Event | ApiError]:
        """What has happened since the last time; called in the worker's thread."""
        batch, self.batch = self.batch, []
        self.unread += len(batch)
        return batch


Batch = tuple[Ticket, list[Event | ApiError]]
"""What has happened to a generation, in order; never empty."""


class Commands(Protocol):
    """What clients tell the worker of their generations; called in any thread."""

    def end(self, ticket: Ticket, error: ApiError | None = None) -> None:
        """End a generation before its next step: with an error, or as if the model had."""

    def has_read(self, ticket: Ticket, count: int) -> None:
        """So many events have been taken: a generation that waited for it may go on."""


class EventStream:
    """The generations of one request, for the event loop that made it.

    Args:
        commands: to the worker.
        served: the model.
        requests: one for each choice.

    Attributes:
        tickets: one for each choice.
    """

    def __init__(
        self, commands: Commands, served: ServedModel, requests: Sequence[GenerationRequest]
    ) -> None:
        self._commands = commands
        self._loop = asyncio.get_running_loop()
        self._batches: deque[Batch] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.tickets = [Ticket(request, served, self) for request in requests]

    @staticmethod
    def deliver(batches: Sequence[Batch]) -> None:
        """Hand over what has happened to generations of any streams; called in any thread.

        All of one event loop come together: each call would interrupt the loop, and the worker
        would wait for it.
        """
        of_loops: defaultdict[asyncio.AbstractEventLoop, list[Batch]] = defaultdict(list)
        for ticket, batch in batches:
            of_loops[ticket.stream._loop].append((ticket, batch))
        for loop, some in of_loops.items():
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(EventStream._take, some)

    @staticmethod
    def _take(batches: Sequence[Batch]) -> None:
        for ticket, batch in batches:
            ticket.stream._batches.append((ticket, batch))
            ticket.stream._wake()

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
        """What happens, until all generations have ended.

        Leaving the loop early ends the generations.

        Args:
            life_sign: an empty list comes whenever nothing has happened for so many seconds.

        Raises:
            ApiError: a generation has failed; the others are ended.
        """
        left = len(self.tickets)
        try:
            while left:
                if not self._batches:
                    await self._something(life_sign)
                if not self._batches:
                    yield []
                    continue
                ticket, batch = self._batches.popleft()
                yield [event for event in batch if not isinstance(event, ApiError)]
                if isinstance(batch[-1], ApiError):
                    raise batch[-1]
                left -= isinstance(batch[-1], Ended)
                self._commands.has_read(ticket, len(batch))
        finally:
            self.close()

    def stop(self, finished: Callable[[int], bool]) -> None:
        """End generations, by the indices of their choices, as if the model had ended them."""
        for ticket in self.tickets:
            if ticket.state == "decoding" and finished(ticket.request.index):
                self._commands.end(ticket)

    def close(self) -> None:
        """End all generations that have not ended: nobody wants the answers."""
        for ticket in self.tickets:
            if ticket.state != "ended":
                self._commands.end(ticket, ApiError("cancelled", status=499))
