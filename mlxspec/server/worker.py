"""The thread that owns the models: requests come in, the events of their generations go out.

Every MLX call happens in this thread. Others reach it in two ways only: commands go in through a
queue, and the events of a turn come out together, to the event loops that wait for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from ..errors import MlxspecError
from ..generation.request import State
from .errors import ApiError
from .model_queue import ModelQueue
from .served_model import ServedModel
from .served_request import EventStream, Records, ServedRequest

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
        on_end: called in the worker's thread with all requests of a client's body, once they have
            ended.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits = Limits(),  # noqa: B008  # a constant
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
            ApiError: 400, there is never room for so many; 429, the queue is full; 503, the server
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
            self.records.metrics.add_end(full)
            raise full
        stream = EventStream(self, self.records, requests)
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
        """The client has read so many tokens; a paused request may resume."""
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
            except Exception:  # nobody waits for what it returns, and others go on
                _log.exception("a command has failed")
