"""The engine that runs requests, one or several at once, and a thread with one for asyncio."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property, partial
from queue import SimpleQueue
from typing import cast

from mlx_lm.generate import generation_stream, wired_limit

from ..drafting.drafter import VerifiedStep
from ..engine.joint import JointMode
from ..engine.step import Batch, Sequence
from ..errors import OptionError
from .loaded import LoadedModel
from .options import GenerationOptions
from .request import PATIENCE, RecordTime, Request, State, hold_at_exit
from .response import GenerationResponse
from .session import CacheLease

# Prompt tokens. Smaller chunks barely shorten a stall, and larger ones are no faster.
_LEAST_CHUNK, _MOST_CHUNK = 16, 2048
_CHANGE = 0.3  # weight of the newest chunk in the running average of the prefill's speed
_LEAST_UNREAD = 16  # a paused request resumes once this few responses are unread


class Engine:
    """Runs requests with a decoder's model, in shared forwards if the model allows.

    Each turn runs chunks of prompts for as long as decoding requests may wait, and then a step of
    every request whose prompt is done. Requests start in the order of their arrival, and prompts
    take turns, so every request makes progress. If a request's drafter, processor or consumer
    raises, only that request ends.

    Args:
        decoder: the model and its tokenizer.
        max_active: the most requests that run at once, paused ones not counted. Others wait.
        stall: how many seconds decoding requests may wait for others' prompts between two steps.
            The speed of earlier chunks decides the size of the next one, except for prompts whose
            result depends on their chunks (the decoder's ``chunks_matter``). ``math.inf`` is for
            batches, in which only the total time counts: prompts run first, and requests wait for
            others' drafts.
        max_unread: a request with this many unread responses is paused until :meth:`has_read`
            has counted most of them; None never pauses.
        alone: whether it runs only one request, with the prompt chunks of that request's options.
        spare: as for :class:`.engine.joint.Joint`.

    Raises:
        OptionError: ``max_active`` is below 1, or ``stall`` is not positive.

    Attributes:
        prefill_seconds: the time that prompts have taken so far.
        stall: as given.
        steps: how many steps have run so far; a shared step counts once.
        step_seconds: the wall time of the last step.
        step_shape: the rows and the sequences of its forward.
    """

    def __init__(
        self,
        decoder: LoadedModel,
        *,
        max_active: int = 32,
        stall: float = 0.15,
        max_unread: int | None = None,
        alone: bool = False,
        spare: int | None = None,
    ) -> None:
        if max_active < 1:
            raise OptionError(f"max_active is {max_active}: run at least 1 generation at once")
        if not stall > 0:
            raise OptionError(f"stall is {stall}: give a number of seconds above 0")
        self._decoder = decoder
        self._max_active = max_active
        self.stall = stall
        self._max_unread = max_unread
        self._alone = alone
        self._spare = spare
        self.prefill_seconds = 0.0
        self.steps = 0
        self.step_seconds = 0.0
        self.step_shape = 1, 1
        self._prefill_speed = 0.0  # tokens per second
        self._deadline = math.inf  # when this turn's prompts must stop
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """Requests that have started; running a chunk of a prompt moves its request to the end."""

    def add(self, *requests: Request) -> None:
        """Queue requests; they start when others leave room."""
        self._waiting += requests

    def cancel(self, request: Request, error: Exception | None = None) -> None:
        """End a request before its next step, unless it has ended already."""
        if not request.done:
            self._end(request, error)

    def pause(self, request: Request) -> None:
        """Leave a decoding request out of steps, and its place to others."""
        if request.state is State.DECODE:
            request.state = State.PAUSED

    def resume(self, request: Request) -> None:
        """Let a paused request take part in steps again."""
        if request.state is State.PAUSED:
            request.state = State.DECODE

    def has_read(self, request: Request, count: int) -> None:
        """Count ``count`` responses as read; with few left unread, resume a paused request."""
        request.unread -= count
        if request.unread <= _LEAST_UNREAD:
            self.resume(request)

    @property
    def room(self) -> int:
        """How many more requests could start now."""
        taking_part = sum(request.state is not State.PAUSED for request in self._running)
        return self._max_active - taking_part - len(self._waiting)

    def run(self) -> None:
        """Take turns until all requests have ended."""
        with self.running():
            while self.turn():
                pass

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for turns; leaving it ends all requests."""
        with wired_limit(self._decoder.model, [generation_stream]), closing(self):
            yield

    def turn(self, hurried: bool = False) -> bool:
        """Run prompts for a while, then one step of each request whose prompt is done.

        Args:
            hurried: whether somebody waits for the end of the turn, as decoding requests do.

        Returns:
            whether requests that are not paused have anything left to do.
        """
        for _ in self.parts_of_turn(hurried):
            pass
        going_on = self._in(State.PREFILL) or self._in(State.DECODE)
        return bool(going_on) or self._next() is not None

    def parts_of_turn(self, hurried: bool = False) -> Iterator[None]:
        """Do what :meth:`turn` does; yield after each response except a request's last."""
        hold_at_exit()
        while request := self._next():
            self._running.append(request)  # first, so that an interrupt does not lose it
            self._waiting.remove(request)
            try:
                self.start(request)
            except Exception as error:
                self._end(request, error)
        self._prefill(hurried)
        if decoding := self._in(State.DECODE):
            yield from self._step(decoding)

    def close(self, error: Exception | None = None) -> None:
        """End all requests."""
        for request in dict.fromkeys([*self._waiting, *self._running]):
            self._end(request, error)

    def next_waiting(self) -> Request | None:
        """The waiting request that starts next if there is room."""
        return self._waiting[0] if self._waiting else None

    def start(self, request: Request) -> None:
        """Start a waiting request."""
        request.start()

    def _next(self) -> Request | None:
        return self.next_waiting() if self.room + len(self._waiting) > 0 else None

    def _in(self, state: State) -> list[Request]:
        return [request for request in self._running if request.state is state]

    def _prefill(self, hurried: bool) -> None:
        """Run chunks of prompts, at least one, for as long as decoding requests may wait."""
        self._deadline, started = math.inf, time.perf_counter()
        while prefilling := self._in(State.PREFILL):
            if (hurried or self._in(State.DECODE)) and self._deadline == math.inf:
                self._deadline = time.perf_counter() + self.stall
            self._move_to_end(prefilling[0])
            self._run_chunk(prefilling[0])
            # Even without decoding requests it stops, so that requests can be cancelled.
            if time.perf_counter() >= min(self._deadline, started + self.stall):
                return

    def _move_to_end(self, request: Request) -> None:
        self._running.append(request)  # first, so that an interrupt does not lose it
        self._running.remove(request)

    def _decode(self, request: Request, sequence: Sequence) -> None:
        """Let a request whose prompt has run take part in steps."""
        self._batch.join(sequence)
        request.state = State.DECODE

    def _note_speed(self, tokens: int, started: float) -> None:
        """Update the prefill's speed by ``tokens`` that have run since ``started``."""
        seconds = time.perf_counter() - started
        self.prefill_seconds += seconds
        if tokens:
            speed = tokens / seconds
            known = self._prefill_speed or speed
            self._prefill_speed = known + _CHANGE * (speed - known)

    def _chunk(self) -> int:
        """How many tokens of a prompt to run next."""
        if self._deadline == math.inf:
            return sys.maxsize if self._alone else _MOST_CHUNK
        seconds = self._deadline - time.perf_counter()
        return max(_LEAST_CHUNK, int(min(_MOST_CHUNK, self._prefill_speed * seconds)))

    def _run_chunk(self, request: Request) -> None:
        """Run the next chunk of a prompt; after the last one the request decodes."""
        sequence = request.sequence
        assert sequence is not None
        if request.prefill is None:
            request.prefill = sequence.begin_in_chunks(self._chunk)
        started, before, done = time.perf_counter(), request.prefilled - request.n_cached, 0
        try:
            for done, total in request.prefill:
                request.on_progress(done, total)
                if before < done < total:
                    break
            else:
                self._decode(request, sequence)
        except Exception as error:
            self._end(request, error)
            return
        self._note_speed(max(0, done - before), started)

    def _step(self, requests: list[Request]) -> Iterator[None]:
        """Run one step of requests whose prompts are done, and hand out its responses."""
        sequences = [request.sequence for request in requests if request.sequence]
        self.steps += 1
        started = time.perf_counter()
        try:
            outcomes = self._batch.step(sequences)
            self.step_seconds = time.perf_counter() - started
        except Exception as error:  # from the forward, which all requests share
            for request in requests:
                self._end(request, error)
            return
        for request, sequence, outcome in zip(requests, sequences, outcomes, strict=True):
            if isinstance(outcome, VerifiedStep):
                yield from self._respond(request, sequence, outcome)
            else:
                self._end(request, outcome)

    def _respond(self, request: Request, sequence: Sequence, step: VerifiedStep) -> Iterator[None]:
        """Hand out the responses of a request's step."""
        self.step_shape = step.rows, step.sequences
        try:
            # Other load slows plain steps too, so their time is estimated from this step's.
            cost = self._batch.cost(sequence, step)
            plain_seconds = self.step_seconds * len(step.tokens) / cost if cost else None
            request.on_step(step, self.step_seconds, plain_seconds)
            for response in request.responses_of(step):
                if response.finish_reason:
                    self._end(request, last=response)
                    return
                request.on_response(response)
                yield
                if request.done:
                    return
                request.unread += 1
        except Exception as error:
            self._end(request, error)
            return
        if self._max_unread and request.unread >= self._max_unread:
            self.pause(request)

    def _end(
        self,
        request: Request,
        error: Exception | None = None,
        last: GenerationResponse | None = None,
    ) -> None:
        """Close a request in any state, and only then hand out its last response."""
        request.state, request.error = State.DONE, request.error or error
        try:
            with ExitStack() as ending:  # runs every callback, even if one fails
                ending.callback(self._forget, request)
                ending.callback(request.close)
                if request.prefill:
                    ending.callback(request.prefill.close)
                if request.sequence and request.lease:
                    keeps = request.lease.keeps
                    ending.callback(self._batch.leave, request.sequence, keep=keeps)
        except Exception as failure:
            request.error = request.error or failure
        try:
            if last:
                request.on_response(last)
        except Exception as failure:  # the response was not received
            request.error, request.finish_reason = request.error or failure, None
        request.on_end()

    def _forget(self, request: Request) -> None:
        for requests in (self._waiting, self._running):
            while request in requests:  # twice if a move was interrupted
                requests.remove(request)

    @cached_property
    def _batch(self) -> Batch:
        if self._alone:
            return Batch(self._decoder.model, JointMode.ALONE)
        costs = self._decoder.costs if self._decoder.plans else None
        patient = self.stall == math.inf
        mode = self._decoder.joint_mode
        return Batch(self._decoder.model, mode, costs, patient, self._spare)


def responses(
    request: Request, record_time: RecordTime | None = None
) -> Generator[GenerationResponse, None, None]:
    """Run a request alone.

    Each response is yielded before any work for the next one. Until the consumer asks for the next
    response, it may use the caches, which hold the prompt and the output so far.

    Args:
        request: a request that has not started.
        record_time: called with the rows and the time of each step.

    Raises:
        DrafterError: as :meth:`Request.prepare`, before the first response.
    """
    request.prepare()
    if record_time:
        request.record_times.append(record_time)
    return _responses(request)


def _responses(request: Request) -> Generator[GenerationResponse, None, None]:
    received: list[GenerationResponse] = []
    request.receive = received.append
    lease = cast(CacheLease, request.lease)
    engine = Engine(request.decoder, stall=math.inf, alone=True)
    engine.add(request)
    try:
        with engine.running():
            while not request.done:
                for _ in engine.parts_of_turn():
                    lease.pause(request.context)
                    yield received.pop()
                    lease.resume()
    finally:
        if request.error:
            raise request.error
    # Everything is closed by now, so the consumer may begin the session's next turn.
    yield received.pop()


_AHEAD = 64  # responses that may wait for their consumer; each may hold a row of logits
_READ = 16  # the consumer reports this many read responses at once


class EngineThread:
    """Runs a decoder's generations for asyncio tasks, all in one thread.

    They share steps as in an :class:`Engine`, even if their tasks run in different event loops.
    The thread lives as long as this object, since MLX compiles again in each thread.
    """

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._streams: set[_Stream] = set()
        """The streams that the thread serves."""
        work = self._commands, self._streams
        self._thread = threading.Thread(
            target=_serve, args=work, name="mlxspec astream", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._commands.put, None).atexit = False
        _threads.add(self)

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
        stream = _Stream(decoder)
        if on_progress := options.get("on_progress"):
            options = {**options, "on_progress": partial(stream.call, on_progress)}
        receive = partial(stream.call, stream.queue.put_nowait)
        stream.new_request = partial(new_request, options=options, receive=receive)
        self._commands.put((stream, _Stream.begin))
        try:
            for count in itertools.count(1):
                response = await stream.queue.get()
                if response is None:
                    return
                if isinstance(response, BaseException):
                    raise response
                yield response
                if count % _READ == 0:
                    self._commands.put((stream, _Stream.has_read))
        finally:
            if not stream.ended.is_set():
                self._commands.put((stream, _Stream.cancel))
                await stream.ended.wait()

    def stop(self) -> None:
        """End all generations and the thread."""
        self._commands.put(None)
        self._thread.join(PATIENCE)


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop the threads before the interpreter exits, so that MLX is not interrupted halfway."""
    for thread in list(_threads):
        thread.stop()


class _Stream:
    """Passes the responses of one generation from the thread to an asyncio task.

    Attributes:
        decoder: runs the generation.
        new_request: makes the request, in the thread.
        queue: responses, and finally None or the error that ended the generation. The task reads
            it in the event loop.
        ended: set in the event loop once the thread has ended the generation and returned its
            caches.
        request: the request, once the thread has made it.
    """

    new_request: Callable[[], Request]

    def __init__(self, decoder: LoadedModel) -> None:
        self.decoder = decoder
        self.queue: asyncio.Queue[GenerationResponse | BaseException | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.request: Request | None = None
        self._error: BaseException | None = None

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in the task's event loop."""
        self._loop.call_soon_threadsafe(function, *args)

    def begin(self, engine: Engine) -> None:
        """Make the request and add it to the engine."""
        try:
            self.request = self.new_request()
            engine.add(self.request)
        except Exception as error:
            self._error = error

    def has_read(self, engine: Engine) -> None:
        """Report to the engine that the task has read ``_READ`` more responses."""
        if self.request:
            engine.has_read(self.request, _READ)

    def cancel(self, engine: Engine) -> None:
        """Cancel the request."""
        if self.request:
            engine.cancel(self.request)

    @property
    def has_finished(self) -> bool:
        """Whether no more responses will come."""
        return self._error is not None or (self.request is not None and self.request.done)

    def end(self, error: BaseException | None = None) -> None:
        """Signal to the task that the stream has ended."""
        self._error = error or self._error or (self.request.error if self.request else None)
        with suppress(RuntimeError):  # the event loop is closed: no task waits
            self.call(self.queue.put_nowait, self._error)
            self.call(self.ended.set)


Command = tuple[_Stream, Callable[[_Stream, Engine], None]]
"""A stream and a method of it, for the thread to call."""


def _serve(commands: SimpleQueue[Command | None], streams: set[_Stream]) -> None:
    """Run the thread. Between generations it holds no decoder, so that one can be freed."""
    going_on = True
    while going_on and (command := commands.get()):
        if command[1] is _Stream.begin:  # other commands belong to streams that have ended
            going_on = _serve_streams(command, commands, streams)
        del command


def _serve_streams(
    command: Command, commands: SimpleQueue[Command | None], streams: set[_Stream]
) -> bool:
    """Serve a stream and those that begin meanwhile; returns whether the thread continues."""
    streams.add(command[0])
    try:
        engine = Engine(command[0].decoder, max_unread=_AHEAD)
        with engine.running():
            command[0].begin(engine)
            busy = True
            while streams:
                while not busy or not commands.empty():
                    if (following := commands.get()) is None:
                        return False
                    stream, method = following
                    if method is _Stream.begin:
                        streams.add(stream)
                    method(stream, engine)
                    busy = True
                busy = engine.turn()
                for finished in {one for one in streams if one.has_finished}:
                    streams.remove(finished)
                    finished.end()
    except BaseException as error:  # from the model: it ends all streams
        while streams:
            streams.pop().end(error)
    return True
