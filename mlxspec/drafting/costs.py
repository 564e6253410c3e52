"""What steps cost, in plain steps: fixed, or corrected by every step."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from .cost_curve import CostCurve
from .cost_file import Calibration, CostFile
from .time_filter import USUAL_SYNC_OVERHEAD, TimeFilter, joint_times


@dataclass
class FixedCosts:
    """Costs that are never corrected by measured steps.

    Attributes:
        curve: T(rows) / T(1).
        sync_overhead: the time that a plain step takes longer than a pipelined one if its forward
            is dispatched only after the last token was read, as a share of the pipelined step.
        wants_plain_steps: whether plain steps should run between drafted ones, to measure them.
        plain_seconds: the wall time of a pipelined plain step, T(1); a second if nothing is timed.
        steps: the number of steps recorded; always 0.
    """

    curve: CostCurve
    sync_overhead: float = USUAL_SYNC_OVERHEAD
    wants_plain_steps: bool = False
    plain_seconds: float = 1.0
    steps: int = 0

    @property
    def hopeful(self) -> CostCurve:
        """The curve to plan drafts with: ``curve``, since there is nothing to find out."""
        return self.curve

    def move_to(self, context: int) -> None:
        """Do nothing: the costs hold for all contexts."""

    def for_sequences(self, count: int) -> FixedCosts:
        """The costs of joint steps of ``count`` sequences, as :meth:`LiveCosts.for_sequences`
        assumes before such steps have run. The cost of attending to several contexts is left out.
        """
        curve = self.curve
        points = ((1 + n, curve(count + n) / curve(count)) for n in range(curve.widest))
        return replace(self, curve=CostCurve(points))

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Do nothing: the costs stay as they are."""

    def end(self) -> None:
        """Do nothing."""


_PLAIN_STEPS_PER_LESSON = 8  # consecutive steps; learning from every one would slow them down
_LEAST_CONTEXT_STEP = 64  # positions
_MOST_STDDEV = 0.04  # of the drafted steps' shared term; beyond it, plain steps are wanted
_SECONDS_BETWEEN_SAVES = 30.0

LONG_CONTEXT = 500
"""The least length of a long context, in tokens; attention to fewer takes a small part of a step.
"""


class LiveCosts:
    """T(rows)/T(1) at the current context length, corrected by every step.

    Concurrent generations learn together, but each uses its own :meth:`for_generation`. With a
    file, the next process begins with the corrected times.

    Args:
        calibrations: the times to begin with, for at least one context length.
        file: the file that keeps the corrected times; with None, nothing is saved.
        clock: returns the time in seconds.

    Attributes:
        steps: the number of steps that this generation, or these sequences, have recorded.
        wants_long_context: whether a generation has had a long context, and only the times after
            short ones are known; see :func:`mlxspec.engine.calibration.with_long_context`.
        tried_long_context: whether this process has tried to measure after a long context.
    """

    def __init__(
        self,
        calibrations: Mapping[int, Calibration],
        file: CostFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calibrations, self.file, self._clock = calibrations, file, clock
        self.wants_long_context = self.tried_long_context = False
        self._next_save = clock()
        self._original = self  # also of the copies for generations
        self._lock = threading.RLock()
        self._times = TimeFilter({context: known.times for context, known in calibrations.items()})
        self._of_sequences: dict[int, LiveCosts] = {}
        self._context = 0
        self._begin_run()

    def for_generation(self) -> Self:
        """These costs for one generation, which has its own context length and runs of steps."""
        costs = copy.copy(self)
        costs._begin_run()
        return costs

    def for_sequences(self, count: int) -> LiveCosts:
        """The costs of joint steps of ``count`` sequences, which only such steps correct.

        One row stands for a plain step of all sequences, and each further row is a draft row. Until
        joint steps have run, in this process or an earlier one, a joint step is assumed to cost as
        much as a step of one sequence with the same number of rows, except that each sequence
        attends to its own context. The sync overhead is assumed to be the same.
        """
        with self._lock:
            if count not in self._of_sequences:
                file = self.file.of_sequences(count) if self.file else None
                calibrations = file.read() if file else {}
                if not calibrations:
                    assumed = joint_times(self._times.known(), count)
                    calibrations = {
                        context: Calibration(times) for context, times in assumed.items()
                    }
                joint = self._of_sequences[count] = type(self)(calibrations, file, self._clock)
                joint._times.overhead = self._times.overhead
            return self._of_sequences[count].for_generation()

    def end(self) -> None:
        """Save what a generation has learned, unless the last save of any is recent."""
        costs = self._original
        costs._context = self._context  # whose curve the status page shows
        is_new = self._context >= LONG_CONTEXT > max(self.calibrations)
        costs.wants_long_context |= is_new and not costs.tried_long_context
        if self.file and self._clock() >= costs._next_save:
            costs._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
            self.file.update(self.known())

    def _begin_run(self) -> None:
        """Forget the latest steps, since each generation has its own runs of steps."""
        self.steps = 0
        self._plain_steps = 0  # consecutive ones
        # In the last run of plain steps: the seconds of the step that waited, and of the last
        # pipelined one.
        self._last_waiting: float | None = None
        self._last_pipelined: float | None = None

    def move_to(self, context: int) -> None:
        """Set the context's length in positions; takes so little time that every step can do it."""
        # The length is rounded by 3 to 6 %, so that new curves are rarely needed.
        step = max(_LEAST_CONTEXT_STEP, 1 << max(context.bit_length() - 5, 0))
        self._context = context // step * step

    @property
    def curve(self) -> CostCurve:
        """The current T(rows)/T(1); the same object until a cost has changed noticeably."""
        with self._lock:
            return self._times.curve(self._context)

    @property
    def hopeful(self) -> CostCurve:
        """The curve to plan drafts with; see :meth:`TimeFilter.hopeful`."""
        with self._lock:
            return self._times.hopeful(self._context)

    @property
    def plain_seconds(self) -> float:
        """The predicted wall time of a pipelined plain step, T(1)."""
        with self._lock:
            return self._times.plain_seconds(self._context)

    @property
    def sync_overhead(self) -> float:
        """The time that a plain step takes longer if it waits for the last token, as a share of
        its time.
        """
        return max(self._times.overhead, 0.0)

    @property
    def wants_plain_steps(self) -> bool:
        """Whether plain steps should run between drafted ones, to measure T(1).

        Only they show whether the costs or the machine's speed have changed. If plain steps hardly
        ever ran, a T(1) that was measured on a busy machine would stay, and make all drafts look
        cheap.
        """
        return self._times.stddev > _MOST_STDDEV

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Learn from a step.

        Plain steps take the time T(1) only in the middle of a run of pipelined steps. The first
        step waits for its token and for a part of the second step's forward, and the last step
        finds its forward nearly done. The time that the first and the last step together take
        beyond 2 T(1) is the sync overhead.

        Args:
            rows: the step's rows.
            seconds: its wall time; for a pipelined step of a single sequence, without the drafter's
                time.
            pipelined: whether its forward was dispatched during the previous step.
        """
        self.steps += 1
        with self._lock:
            self._record(rows, seconds, pipelined)
            self._times.ran(rows)

    def _record(self, rows: int, seconds: float, pipelined: bool) -> None:
        before, self._last_pipelined = self._last_pipelined, seconds if pipelined else None
        if not pipelined:
            if self._last_waiting is not None:
                # A run of plain steps has ended. The overhead shows in the step that waited and the
                # last pipelined step.
                run = [self._last_waiting] if before is None else [self._last_waiting, before]
                self._times.record_overhead(sum(run) / self.plain_seconds - len(run))
            self._last_waiting = seconds if rows == 1 else None
        if rows == 1:
            if not pipelined or before is None:
                return
            seconds = before  # of the previous step, which was not the last of its run
            self._plain_steps += 1
            steps = self._plain_steps
            if steps > _PLAIN_STEPS_PER_LESSON and steps % _PLAIN_STEPS_PER_LESSON:
                return
        else:
            self._plain_steps = 0
        self._times.record(rows, self._context, seconds)

    def known(self) -> dict[int, Calibration]:
        """The times that were measured or learned, by context length."""
        with self._lock:
            known = self._times.known(assumed=False)
        return {
            context: self.calibrations[context].corrected(times) for context, times in known.items()
        }


Costs = FixedCosts | LiveCosts
"""The costs of steps, which a planner reads, and in which it records every step."""
