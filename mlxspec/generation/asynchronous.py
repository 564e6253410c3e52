"""Generations that tasks of asyncio take: one thread runs those of a decoder, in shared steps."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from ..engine.target import Progress
from ..errors import OptionError
from .engine import Engine
from .options import GenerationOptions, MakeDrafter, Prompt
from .process_end import PATIENCE
from .request import Decoder, Request
from .response import GenerationResponse

_AHEAD = 64  # responses that wait for their consumer; each may hold a row of logits
_READ = 16  # responses after which the thread hears that they have been read

Command = Callable[[Engine], object]


class AsyncGenerations:
    """Runs the generations of a decoder that tasks take, all in one thread of its own.

    They share steps as in an :class:`Engine`, whichever event loops their tasks are in. The
    thread lives as long as this object, since MLX compiles anew in each thread.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._streams: set[_Stream] = set()
        """Those that have not ended; while there are any the thread serves them."""
        self._changing = threading.Lock()
        """Held while streams come and go, so that the thread does not stop as one comes."""
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._work.put, None).atexit = False

    async def stream(
        self,
        decoder: Decoder,
        prompt: Prompt,
        max_tokens: int,
        make_drafter: MakeDrafter | None,
        options: GenerationOptions,
    ) -> AsyncGenerator[GenerationResponse, None]:
        """What :meth:`mlxspec.Decoder.astream` returns."""
        if options.get("prompt_cache") is not None:
            raise OptionError(
                "prompt_cache holds what a program has taken, and astream runs ahead of it: "
                "pass a session, or use stream"
            )
        stream = _Stream()
        if on_progress := options.get("on_progress"):
            options = {**options, "on_progress": stream.in_loop(on_progress)}
        new_request = partial(
            decoder.new_request, prompt, max_tokens, options, make_drafter, stream.respond
        )
        self._start(decoder, stream, partial(stream.begin, new_request))
        try:
            while (response := await stream.next()) is not None:
                yield response
                stream.read += 1
                if stream.read % _READ == 0:
                    self._commands.put(stream.has_read)
        finally:
            if not stream.ended.is_set():
                self._commands.put(stream.cancel)
                await stream.ended.wait()

    def _start(self, decoder: Decoder, stream: _Stream, begin: Command) -> None:
        with self._changing:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_obey, args=(self._work,), name="mlxspec astream", daemon=True
                )
                self._thread.start()
                _serving.add(self)
            if not self._streams:
                self._work.put(partial(self._run, decoder))
            self._streams.add(stream)
            self._commands.put(begin)

    def _run(self, decoder: Decoder) -> None:
        """Serve the streams until all have ended."""
        try:
            engine = Engine(decoder, max_unread=_AHEAD)
            with engine.running():
                busy = False
                while self._streams:
                    while not busy or not self._commands.empty():
                        self._commands.get()(engine)
                        busy = True
                    busy = engine.turn()
                    self._end_finished()
        except SystemExit:  # the process ends, and with it the threads of tasks that still wait
            return
        except BaseException as error:  # of the model itself: whoever waits is to hear of it
            with self._changing:
                streams, self._streams = self._streams, set()
            for stream in streams:
                stream.end(error)

    def stop(self) -> None:
        """End all generations, and the thread."""
        self._commands.put(_stop)
        self._work.put(None)
        if self._thread:
            self._thread.join(PATIENCE)

    def _end_finished(self) -> None:
        with self._changing:
            finished = {stream for stream in self._streams if stream.has_finished}
            self._streams -= finished
        for stream in finished:
            stream.end()


_serving: weakref.WeakSet[AsyncGenerations] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """MLX must not run in a thread that the interpreter stops as it ends."""
    for generations in list(_serving):
        generations.stop()


def _stop(engine: Engine) -> None:
    raise SystemExit


def _obey(work: SimpleQueue[Callable[[], None] | None]) -> None:
    """The thread. Between two works it holds nothing, so that a decoder may go."""
    while (run := work.get()) is not None:
        run()
        del run


class _Stream:
    """One generation's responses on their way from the thread to a task.

    Attributes:
        loop: the task's.
        ended: set in the loop once the thread is done with the generation, and its caches are
            given back.
        read: how many responses the task has taken.
        request: once the thread has made it.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self._queue: asyncio.Queue[GenerationResponse | BaseException | None] = asyncio.Queue()
        self.read = 0
        self.request: Request | None = None
        self._error: BaseException | None = None

    # --- in the loop ---

    async def next(self) -> GenerationResponse | None:
        """The next response; None after the last one.

        Raises:
            BaseException: what has ended the generation.
        """
        found = await self._queue.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def in_loop(self, on_progress: Progress) -> Progress:
        """The function, to be called in the thread and run in the loop."""

        def report(done: int, total: int) -> None:
            self.loop.call_soon_threadsafe(on_progress, done, total)

        return report

    # --- in the thread ---

    def begin(self, new_request: Callable[[], Request], engine: Engine) -> None:
        """Make the request, unless its task has left already."""
        if self.has_finished:
            return
        try:
            self.request = new_request()
            engine.add(self.request)
        except Exception as error:
            self._error = error

    def respond(self, response: GenerationResponse) -> None:
        """Hand a response over."""
        self.loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def has_read(self, engine: Engine) -> None:
        """The task has taken some more responses."""
        if self.request:
            engine.has_read(self.request, _READ)

    def cancel(self, engine: Engine) -> None:
        """Nobody takes the responses any more."""
        if self.request:
            engine.cancel(self.request)

    @property
    def has_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or (self.request is not None and self.request.done)

    def end(self, error: BaseException | None = None) -> None:
        """Let the task know that this is all."""
        self._error = error or self._error or (self.request.error if self.request else None)
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._queue.put_nowait, self._error)
            self.loop.call_soon_threadsafe(self.ended.set)
