"""Several generations at once: they join and leave between any two steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..engine.batch import Batch
from ..engine.joint import JointMode
from ..engine.step import DecodedStep, Sequence
from ..errors import OptionError
from ..plan.live_costs import LiveCosts
from .options import GenerationOptions, MakeDrafter, Prompt
from .process_end import hold_at_exit
from .response import GenerationResponse
from .responses import Generation

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Prompt tokens; fewer would hardly shorten a stall, and more are not faster.
_LEAST_CHUNK, _MOST_CHUNK = 16, 2048
_CHANGE = 0.3  # weight of the newest chunk in the running average of the prefill's speed


class Decoder(Protocol):
    """What a scheduler needs of a :class:`mlxspec.Decoder`."""

    plans: bool

    @property
    def model(self) -> nn.Module: ...
    @property
    def costs(self) -> LiveCosts: ...
    @property
    def joint_mode(self) -> JointMode: ...
    def drafting_with(self) -> MakeDrafter: ...
    def new_generation(
        self,
        prompt: Prompt,
        max_tokens: int,
        options: GenerationOptions,
        make_drafter: MakeDrafter,
    ) -> Generation: ...


class Job:
    """A generation in a :class:`Scheduler`.

    Attributes:
        error: what has ended it, if that was a fault.
        finished: whether it has ended, in whatever way.
        paused: whether it takes no part in steps for now; see :meth:`Scheduler.pause`.
    """

    def __init__(
        self, generation: Generation, on_response: Callable[[GenerationResponse], object]
    ) -> None:
        self.error: Exception | None = None
        self.finished = False
        self.paused = False
        self.generation = generation
        self.on_response = on_response
        self.sequence: Sequence | None = None
        self.prefill: Generator[tuple[int, int], None, None] | None = None
        self.prefilled = 0


class Scheduler:
    """Runs several generations of a decoder, whose rows share one forward where the model allows.

    Every turn runs chunks of prompts for as long as running generations may wait, and then a step
    of every generation whose prompt is done. New generations wait in the order in which they came;
    prompts that are being run take turns. So each one goes on, whatever the others do. What a
    generation's drafter, processor or consumer raises ends that one alone.

    Args:
        decoder: its model, tokenizer and drafter are used.
        max_active: how many generations run at once at most, without paused ones; others wait.
        stall: seconds for which running generations may wait for others' prompts between two
            steps. Chunks are made so long by the speed of those before, except of prompts that
            would give something else then (``chunks_matter`` of the decoder). With ``math.inf``
            nobody reads the answers as they come, and all that counts is the time that they take
            together: prompts run first, and no generation minds waiting for others' drafts.

    Raises:
        OptionError: ``max_active`` is below 1, or ``stall`` is no positive number.

    Attributes:
        prefill_seconds: the time that prompts have taken so far.
        steps: how many steps have run so far, those of several generations counted once.
        step_seconds: the wall time of the last one.
        on_step: called with each step of each generation before its responses, to watch them.
    """

    def __init__(self, decoder: Decoder, *, max_active: int = 32, stall: float = 0.15) -> None:
        if max_active < 1:
            raise OptionError(f"max_active is {max_active}: let 1 generation or more run at once")
        if not stall > 0:
            raise OptionError(f"stall is {stall}: give a number of seconds above 0")
        self._decoder = decoder
        self._max_active = max_active
        self._stall = stall
        self.prefill_seconds = 0.0
        self.steps = 0
        self.step_seconds = 0.0
        self.on_step: Callable[[Job, DecodedStep], object] = lambda job, step: None
        self._prefill_speed = 0.0  # tokens per second
        self._deadline = math.inf  # of the prompts of this turn
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._active: list[Job] = []

    def submit(
        self,
        prompt: Prompt,
        on_response: Callable[[GenerationResponse], object],
        max_tokens: int = 250,
        make_drafter: MakeDrafter | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Job:
        """Add a generation.

        Args:
            prompt, max_tokens, options: as for :meth:`mlxspec.Decoder.decode`.
            on_response: called with each response.
            make_drafter: from the decoder's ``drafting_with``, for this generation alone; by
                default the decoder drafts as ``stream`` does by default.

        Raises:
            PromptError, OptionError: as :meth:`mlxspec.Decoder.stream`.
        """
        generation = self._decoder.new_generation(
            prompt, max_tokens, options, make_drafter or self._decoder.drafting_with()
        )
        job = Job(generation, on_response)
        self._waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a generation before its next step; nothing happens if it has ended."""
        if not job.finished:
            self._end(job)

    def plain_seconds(self, job: Job, step: DecodedStep) -> float | None:
        """How long the tokens of a generation's last step would have taken without drafts.

        The step's own time tells it, since whatever else slows a step slows plain ones, too.

        Returns:
            None where costs are not known.
        """
        cost = job.sequence and self._batch.cost(job.sequence, step.verified)
        return self.step_seconds * len(step.verified.tokens) / cost if cost else None

    def pause(self, job: Job, paused: bool = True) -> None:
        """Leave a generation out of steps, since nobody takes its responses, or let it go on."""
        job.paused = paused

    def run(self) -> None:
        """Take turns until all generations have ended."""
        with self.running():
            while self.turn():
                pass

    @contextmanager
    def running(self) -> Iterator[None]:
        """To be entered around turns; at its end all generations are ended."""
        with ExitStack() as during:
            during.enter_context(wired_limit(self._decoder.model, [generation_stream]))
            during.callback(self.close)
            yield

    def turn(self, hurried: bool = False) -> bool:
        """Run prompts for a while, and one step of each active generation.

        Args:
            hurried: others wait for the end of the turn, as running generations do.

        Returns:
            whether there is anything left to do for generations that are not paused.
        """
        hold_at_exit()
        self._admit()
        self._prefill(hurried)
        going_on = self._going_on
        if going_on:
            self._step(going_on)
        return bool(self._waiting or self._prefilling or self._going_on)

    def close(self) -> None:
        """End all generations."""
        for job in [*self._waiting, *self._prefilling, *self._active]:
            self._end(job)

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._going_on) < self._max_active:
            job = self._waiting[0]
            self._prefilling.append(job)  # first, so that an interrupt finds it in one place
            self._waiting.popleft()
            try:
                job.sequence = job.generation.take()
            except Exception as error:
                self._end(job, error)

    def _prefill(self, hurried: bool) -> None:
        """Run a chunk of a prompt, and others while running generations may wait.

        Where there are none it comes to an end as soon, so that it can be cancelled.
        """
        self._deadline, started = math.inf, time.perf_counter()
        while self._prefilling:
            if (hurried or self._going_on) and self._deadline == math.inf:
                self._deadline = time.perf_counter() + self._stall
            short = self._short_prompts()
            if len(short) > 1:
                self._run_together(short)
            if self._prefilling:  # longer ones have their turn however many short ones come
                self._prefilling.rotate(-1)
                self._run_chunk(self._prefilling[-1])
            if time.perf_counter() >= min(self._deadline, started + self._stall):
                return

    def _short_prompts(self) -> dict[Job, Sequence]:
        """Generations whose prompts can run in one forward, as many as one chunk has tokens for."""
        found: dict[Job, Sequence] = {}
        left = self._chunk()
        for job in self._prefilling:
            sequence = job.sequence
            if job.prefill is None and sequence and self._batch.begins_together(sequence):
                left -= len(sequence.to_prefill)
                if left < 0:
                    break
                found[job] = sequence
        return found

    def _run_together(self, short: dict[Job, Sequence]) -> None:
        """Run several prompts in one forward; their generations become active."""
        started = time.perf_counter()
        for job, sequence in [*short.items()]:
            try:
                job.generation.on_progress(0, len(sequence.to_prefill))
            except Exception as error:
                self._end(job, error)
                del short[job]
        try:
            faults = self._batch.begin([*short.values()])
        except Exception as error:  # of the forward itself
            for job in short:
                self._end(job, error)
            return
        self._note_speed(sum(len(s.to_prefill) for s in short.values()), started)
        for job, sequence in short.items():
            try:
                if sequence in faults:
                    raise faults[sequence]
                job.generation.on_progress(len(sequence.to_prefill), len(sequence.to_prefill))
                self._activate(job, sequence)
            except Exception as error:
                self._end(job, error)

    def _activate(self, job: Job, sequence: Sequence) -> None:
        """The prompt has run: take part in steps."""
        self._active.append(job)
        self._prefilling.remove(job)
        self._batch.join(sequence)

    def _note_speed(self, tokens: int, started: float) -> None:
        """So many tokens of prompts have run since then."""
        seconds = time.perf_counter() - started
        self.prefill_seconds += seconds
        if tokens:
            speed = tokens / seconds
            known = self._prefill_speed or speed
            self._prefill_speed = known + _CHANGE * (speed - known)

    def _chunk(self) -> int:
        """How many tokens of a prompt to run next."""
        if self._deadline == math.inf:
            return _MOST_CHUNK
        seconds = self._deadline - time.perf_counter()
        return max(_LEAST_CHUNK, int(min(_MOST_CHUNK, self._prefill_speed * seconds)))

    def _run_chunk(self, job: Job) -> None:
        """Run the next chunk of a prompt; with the last one the generation becomes active."""
        assert job.sequence is not None
        if job.prefill is None:
            job.prefill = job.sequence.begin_in_chunks(self._chunk)
        started, before, done = time.perf_counter(), job.prefilled, 0
        try:
            for done, total in job.prefill:
                job.generation.on_progress(done, total)
                if before < done < total:
                    break
            else:
                self._activate(job, job.sequence)
        except Exception as error:
            self._end(job, error)
            return
        job.prefilled = done
        self._note_speed(max(0, done - before), started)

    @property
    def _going_on(self) -> list[Job]:
        return [job for job in self._active if not job.paused]

    def _step(self, jobs: list[Job]) -> None:
        """Run one step of generations whose prompts are done."""
        sequences = [job.sequence for job in jobs if job.sequence]
        self.steps += 1
        started = time.perf_counter()
        try:
            outcomes = self._batch.step(sequences)
            self.step_seconds = time.perf_counter() - started
        except Exception as error:  # of the forward itself: nobody's fault, and nobody can go on
            for job in jobs:
                self._end(job, error)
            return
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, DecodedStep):
                self._respond(job, outcome)
            else:
                self._end(job, outcome)

    def _respond(self, job: Job, step: DecodedStep) -> None:
        try:
            self.on_step(job, step)
            for response in job.generation.responses_of(step):
                if response.finish_reason:
                    self._end(job)
                job.on_response(response)
                if job.finished:
                    return
        except Exception as error:
            self._end(job, error)

    def _end(self, job: Job, error: Exception | None = None) -> None:
        """Close a generation wherever it is."""
        job.finished, job.error = True, job.error or error
        try:
            with ExitStack() as ending:  # all of it, whatever fails or is interrupted
                ending.callback(self._forget, job)
                ending.callback(job.generation.close)
                if job.prefill:
                    ending.callback(job.prefill.close)
                if job.sequence:
                    keeps = job.generation.owner.keeps
                    ending.callback(self._batch.leave, job.sequence, keep=keeps)
        except Exception as failure:
            job.error = job.error or failure

    def _forget(self, job: Job) -> None:
        for jobs in (self._waiting, self._prefilling, self._active):
            if job in jobs:
                jobs.remove(job)

    @cached_property
    def _batch(self) -> Batch:
        costs = self._decoder.costs if self._decoder.plans else None
        patient = self._stall == math.inf
        return Batch(self._decoder.model, self._decoder.joint_mode, costs, patient)
