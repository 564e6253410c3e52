"""Generations in asyncio tasks, which one thread of a decoder runs."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from ..errors import OptionError
from .engine import Engine
from .loaded import LoadedModel
from .options import GenerationOptions
from .request import Request
from .response import GenerationResponse

_AHEAD = 64  # responses that may wait for their consumer; each may hold a row of logits
_READ = 16  # the consumer reports this many read responses at once


class EngineThread:
    """Runs a decoder's generations for asyncio tasks, all in one thread.

    They share steps as in an :class:`Engine`, even if their tasks run in different event loops.
    The thread lives as long as this object, since MLX compiles again in each thread. Between
    generations it holds no decoder, so that one can be freed.
    """

    def __init__(self) -> None:
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        threading.Thread(
            target=_serve, args=[self._commands], name="mlxspec astream", daemon=True
        ).start()
        weakref.finalize(self, self._commands.put, None).atexit = False

    async def stream(
        self,
        decoder: LoadedModel,
        new_request: Callable[..., Request],
        options: GenerationOptions,
    ) -> AsyncGenerator[GenerationResponse, None]:
        """What :meth:`mlxspec.Decoder.astream` returns.

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
        stream = _Stream()
        if on_progress := options.get("on_progress"):
            options = {**options, "on_progress": partial(stream.call, on_progress)}
        receive = partial(stream.call, stream.queue.put_nowait)
        new_request = partial(new_request, options=options, receive=receive)

        def send(method: Callable[[Engine], None]) -> None:
            self._commands.put((decoder, method))

        ended = False
        send(partial(stream.begin, new_request))
        try:
            for count in itertools.count(1):
                response = await stream.queue.get()
                if not isinstance(response, GenerationResponse):
                    ended = True
                    if response:
                        raise response
                    return
                yield response
                if count % _READ == 0:
                    send(stream.has_read)
        finally:
            if not ended:
                send(stream.cancel)
                while isinstance(await stream.queue.get(), GenerationResponse):
                    pass


_Command = tuple["LoadedModel", Callable[[Engine], None]]
"""A decoder, and what to do with its engine."""


class _Stream:
    """Passes the responses of one generation from the thread to an asyncio task.

    Attributes:
        queue: responses, and finally None or the error that ended the generation, once its caches
            have been returned. The task reads it in its event loop.
    """

    def __init__(self) -> None:
        self.queue: asyncio.Queue[GenerationResponse | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._request: Request | None = None

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in the task's event loop."""
        with suppress(RuntimeError):  # the loop is closed: no task waits
            self._loop.call_soon_threadsafe(function, *args)

    def begin(self, new_request: Callable[[], Request], engine: Engine) -> None:
        """Make the request and add it to the engine."""
        try:
            request = self._request = new_request()
        except Exception as error:
            self.call(self.queue.put_nowait, error)
            return
        request.at_end = lambda: self.call(self.queue.put_nowait, request.error)
        engine.add(request)

    def has_read(self, engine: Engine) -> None:
        """Report to the engine that the task has read ``_READ`` more responses."""
        if self._request:
            engine.has_read(self._request, _READ)

    def cancel(self, engine: Engine) -> None:
        """Cancel the request."""
        if self._request:
            engine.cancel(self._request)


def _serve(commands: SimpleQueue[_Command | None]) -> None:
    """Run the thread, until the command is None."""
    while command := commands.get():
        if not _run(command, commands):
            return
        del command  # and its decoder


def _run(command: _Command | None, commands: SimpleQueue[_Command | None]) -> bool:
    """Carry out commands until no generation is left; returns whether the thread continues."""
    assert command
    engine = Engine(command[0], max_unread=_AHEAD)
    with engine.running():
        try:
            command[1](engine)
            busy = True
            while engine.has_requests:
                while not (busy and commands.empty()):
                    if (command := commands.get()) is None:
                        return False
                    command[1](engine)
                    busy = True
                busy = engine.turn()
        except Exception as error:  # from the model: it ends all generations
            engine.close(error)
    return True
