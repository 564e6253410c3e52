"""The thread that owns the models: requests come in, the events of their generations go out.

Every MLX call happens in this thread. Others talk to it by two ways only: commands go in by a
queue, and the events of a step come out together, handed over to the loop that waits for them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, cast

from ..errors import MlxspecError
from ..generation.options import GenerationOptions, check_options
from .errors import ApiError
from .lane import Lane
from .records import Records
from .served_model import ServedModel
from .tickets import EventStream, GenerationRequest, Ticket

_log = logging.getLogger("mlxspec.server")

_RETRY_AFTER = 5  # seconds, what a client is told that finds the queue full


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


class Worker:
    """Runs generations of one or several models in a thread of its own.

    Args:
        models: those that are served.
        limits: what is taken at once.
        on_end: called in the worker's thread with the tickets of each request, once all its
            generations have ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits = Limits(),  # noqa: B008  # a constant
        on_end: Callable[[Sequence[Ticket]], object] = lambda tickets: None,
    ) -> None:
        self.models = {served.name: served for served in models}
        self.limits = limits
        self.records = Records(on_end)
        self.ready = threading.Event()
        """Set while requests are answered."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        stall = limits.stall / len(models)
        self._lanes = {
            served.name: Lane(served, limits.active, stall, self.records) for served in models
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

    def check(self, served: ServedModel, request: GenerationRequest) -> None:
        """Refuse what cannot be generated, before it is queued.

        Raises:
            ApiError: 400, an option is out of range, or the context would be too long; 413, its
                caches would not fit into memory whatever else runs.
        """
        n_prompt, longest = len(request.prompt), served.context_length
        if longest is not None and n_prompt + request.max_tokens > longest:
            raise ApiError(
                f"the model's context has {longest} tokens; the prompt has {n_prompt} and the "
                f"answer may have {request.max_tokens}: shorten the prompt or ask for fewer",
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
            ApiError: as :meth:`check`; 400, there is never room for so many; 429, the queue is
                full; 503, the server is ending.
        """
        for request in requests:
            self.check(served, request)
        most = self.limits.active + self.limits.queued
        if len(requests) > most:
            raise ApiError(
                f"{len(requests)} choices are more than the server takes at once, which are "
                f"{most}: ask for fewer",
                param="n",
            )
        states = [ticket.state for ticket in self.records.tickets.copy() if ticket.served is served]
        waiting = states.count("queued")
        free = max(0, self.limits.active - (len(states) - waiting))
        if waiting + len(requests) > self.limits.queued + free:
            full = ApiError(
                f"{waiting} generations are waiting already: try again later",
                status=429,
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )
            self.records.metrics.add_end(full)
            raise full
        stream = EventStream(self, served, requests)
        with self._taking:
            if self._stopping:
                raise self._stopping
            self.records.tickets += stream.tickets
            self._commands.put(partial(self._lanes[served.name].queue.extend, stream.tickets))
        return stream

    def end(self, ticket: Ticket, error: ApiError | None = None) -> None:
        """End a generation before its next step, as :meth:`Lane.end` does."""
        self._commands.put(partial(self._lanes[ticket.served.name].end, ticket, error))

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
                    busy = self._turn(lanes)
            except Exception:
                _log.exception("the worker has failed")
            finally:
                self.ready.clear()
                with self._taking:
                    failed = ApiError("the worker has failed: restart the server", status=503)
                    self._stopping = self._stopping or failed
                self._obey(wait=False)  # what came before
                for lane in lanes:
                    lane.close(self._stopping)
                self.records.deliver()

    def _turn(self, lanes: Sequence[Lane]) -> bool:
        """A turn of each lane; returns whether there is more to do at once."""
        waiting = [lane for lane in lanes if lane.decoding]
        busy = [lane.turn(hurried=any(one is not lane for one in waiting)) for lane in lanes]
        self.records.deliver()
        return any(busy)

    def _obey(self, wait: bool) -> None:
        """Run the commands that have come; if there is nothing else to do, wait for one."""
        while wait or not self._commands.empty():
            command = self._commands.get()
            wait = False
            try:
                command()
            except Exception:  # nobody waits for what it returns, and others go on
                _log.exception("a command has failed")
