"""A thread that runs schedulers for asyncio tasks, and ``astream``, which uses such a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..errors import OptionError
from .options import GenerationOptions
from .request import Request
from .response import GenerationResponse
from .scheduler import STALL, Scheduler
from .thread_end import hold_at_exit

if TYPE_CHECKING:
    from .decoder import Decoder

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class RequestStream:
    """A queue from a :class:`SchedulerThread` to the asyncio task that creates the queue.

    Attributes:
        loop: the task's event loop.
        batches: pairs of a request and what the thread has sent for it in one turn, in order.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.batches: asyncio.Queue[tuple[Any, list[Any]]] = asyncio.Queue()


class SchedulerThread:
    """A thread that runs schedulers, which take turns.

    Other threads communicate with it in only two ways: :meth:`call` puts a command into a queue,
    and after each turn the thread delivers sent items to the event loops that wait for them. The
    thread starts with the first command.

    Args:
        name: the thread's name.

    Attributes:
        schedulers: the schedulers, by keys of any kind; changed only in the thread.
        ending: the error for further commands, once the thread is ending or has failed.
    """

    def __init__(self, name: str) -> None:
        self.schedulers: dict[Hashable, Scheduler] = {}
        self.ending: Exception | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outbox: dict[tuple[RequestStream, Any], list[Any]] = {}
        self._lock = threading.Lock()
        """Held while a command is queued, so that none is queued after the end."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def call(self, function: Callable[..., _Result], *args: Any) -> Future[_Result]:
        """Call a function in the thread, between two turns; return its future result.

        Raises :attr:`ending` if that is set.
        """
        result: Future[_Result] = Future()

        def command() -> None:
            try:
                result.set_result(function(*args))
            except Exception as error:
                result.set_exception(error)

        with self._lock:
            if self.ending:
                raise self.ending
            if not self._thread.ident:
                self._thread.start()
            self._commands.put(command)
        return result

    def call_scheduler(self, key: Hashable, method: Callable[..., object], *args: Any) -> None:
        """Call a method of a scheduler between two turns, if the scheduler still exists then."""

        def call() -> None:
            if scheduler := self.schedulers.get(key):
                try:
                    method(scheduler, *args)
                except Exception:  # no caller waits for the result
                    _log.exception("a call queued for a scheduler has failed")

        with suppress(Exception):  # the thread is ending
            self.call(call)

    def end(self, error: Exception) -> None:
        """Accept no more commands; requests end with ``error`` after the current turn."""
        with self._lock:
            self.ending = self.ending or error
            self._commands.put(lambda: None)  # wakes the thread if it waits for a command

    def join(self) -> None:
        """Wait for the end of the thread, if it has started."""
        if self._thread.ident:
            self._thread.join()

    # --- in the thread ---

    def send(self, stream: RequestStream, request: Request | None, item: object) -> None:
        """Send an item of a request to a task, which receives it at the end of the turn."""
        self._outbox.setdefault((stream, request), []).append(item)

    def _run(self) -> None:
        hold_at_exit()  # a command may use MLX, so a process that ends waits for this thread
        try:
            while not self.ending:
                self._obey()
                # An empty module stands for all models, which share one limit.
                with wired_limit(nn.Module(), [generation_stream]):
                    while self._turn() or not self._commands.empty():
                        if not self._commands.empty():
                            self._obey()
        finally:
            self.end(RuntimeError("the thread that runs the models has failed"))
            self._obey()  # the commands that were queued before
            for scheduler in [*self.schedulers.values()]:
                scheduler.close(self.ending)
            self.deliver()

    def _obey(self) -> None:
        """Wait for a command, then run all that are queued."""
        self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _turn(self) -> bool:
        """Run a turn of each scheduler that has requests; return whether any request took part."""
        if self.ending:
            return False
        schedulers = [scheduler for scheduler in self.schedulers.values() if scheduler.has_requests]
        hurried = sum(scheduler.is_active for scheduler in schedulers) > 1
        busy = False
        for scheduler in schedulers:
            scheduler.stall = STALL / len(schedulers)
            try:
                busy |= scheduler.turn(hurried)
            except Exception as error:  # from the model: all its generations end
                scheduler.close(error)
        self.deliver()
        return busy

    def deliver(self) -> None:
        """Deliver the sent items to the event loops.

        There is only one call per loop, since each call interrupts the loop and delays the thread.
        """
        outbox, self._outbox = self._outbox, {}
        for loop in {stream.loop for stream, _ in outbox}:
            with suppress(RuntimeError):  # the loop has ended, so no task waits
                loop.call_soon_threadsafe(_take, loop, outbox)


def _take(
    loop: asyncio.AbstractEventLoop, outbox: dict[tuple[RequestStream, Any], list[Any]]
) -> None:
    for (stream, request), items in outbox.items():
        if stream.loop is loop:
            stream.batches.put_nowait((request, items))


# --- astream ---

_AHEAD = 64  # responses that may wait to be consumed; each may hold a row of logits


_thread = SchedulerThread("mlxspec astream")
"""Runs the generations of all decoders. There is only one, since MLX compiles functions for each
thread separately.
"""

_streams: dict[Request, RequestStream] = {}
"""The streams of the requests that have not ended; used in the thread only."""


async def astream(
    decoder: Decoder, new_request: Callable[..., Request], options: GenerationOptions
) -> AsyncGenerator[GenerationResponse, None]:
    """The generator that :meth:`mlxspec.Decoder.astream` returns.

    Args:
        decoder: runs the generation.
        new_request: makes the request, given ``options`` and ``receive``.
        options: the generation's options.
    """
    if options.get("prompt_cache") is not None:
        raise OptionError(
            "prompt_cache does not work with astream, which runs ahead of its consumer: pass "
            "a session, or use stream"
        )
    stream = RequestStream()
    if report := options.get("on_progress"):

        def on_progress(done: int, total: int) -> None:
            stream.loop.call_soon_threadsafe(report, done, total)

        options = {**options, "on_progress": on_progress}
    send = partial(_thread.send, stream, None)
    request: Request | None = None

    def begin() -> None:
        nonlocal request
        for other, of_other in [*_streams.items()]:
            if of_other.loop.is_closed():  # nobody can read it, or close its generator
                _thread.schedulers[other.decoder].cancel(other)
        try:
            request = new_request(options=options, receive=send)
        except Exception as error:
            send(error)
            return
        request.at_end, _streams[request] = end, stream
        if decoder not in _thread.schedulers:
            _thread.schedulers[decoder] = Scheduler(decoder, max_unread=_AHEAD)
        _thread.schedulers[decoder].add(request)

    def end() -> None:
        assert request
        del _streams[request]
        send(request.error)
        if not _thread.schedulers[decoder].has_requests:
            del _thread.schedulers[decoder]  # so that it does not keep the decoder alive

    def cancel() -> None:
        if request and not request.done:
            _thread.schedulers[decoder].cancel(request)

    _thread.call(begin)
    batch: list[Any] = []
    try:
        while True:
            _, batch = await stream.batches.get()
            for response in batch:
                if not isinstance(response, GenerationResponse):
                    if response:
                        raise response
                    return
                yield response
            _thread.call_scheduler(decoder, Scheduler.has_read, request, len(batch))
    finally:
        # The end may be in the batch that the consumer has left.
        left = not batch or isinstance(batch[-1], GenerationResponse)
        if left and not stream.loop.is_closed():
            _thread.call(cancel)
            while isinstance((await stream.batches.get())[1][-1], GenerationResponse):
                pass
