"""The verify cost T(M)/T(1): what a step over M rows costs, in plain steps.

A :class:`CostCurve` is known and fixed. :class:`LiveTimes` are times by rows and context length
that every step corrects. :class:`LiveCosts` are the costs that follow for one generation.
"""

from __future__ import annotations

import copy
import math
import threading
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from ..errors import OptionError


class CostCurve:
    """T(rows) / T(1), linear between the points where it is known, and never falling.

    A step could be padded with unneeded rows, so a point that costs less than one of
    fewer rows is noise, and counts as that one.

    Args:
        points: pairs of rows and cost, rows ascending; the first is (1, 1).

    Attributes:
        rows: the numbers of rows of the points.
        widest: the most rows at which the cost is known; no draft is planned beyond.
        table: ``table[rows]`` is the cost for 1 <= rows <= widest; ``table[0]`` is 0.
        cheapest_rows: ``cheapest_rows[n]`` is the least that each row beyond 1 + n costs,
            however many are added; infinite at the end.

    Raises:
        OptionError: the points make no such curve.
    """

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        points = list(points)
        rows = [row for row, _ in points]
        costs = [cost for _, cost in points]
        positive = all(0 < cost < math.inf for cost in costs)
        if points[:1] != [(1, 1)] or rows != sorted(set(rows)) or not positive:
            raise OptionError(
                f"cost curve with the points {points[:3]}…: give (rows, cost) pairs "
                "with ascending rows and positive costs, the first (1, 1)"
            )
        self.rows = rows
        self.widest = rows[-1]
        at, known = np.array(rows), np.array([*accumulate(costs, max)])
        everywhere = np.arange(1, self.widest + 1)
        table = np.interp(everywhere, at, known)
        self.table: list[float] = [0.0, *table.tolist()]
        # Per number of rows the least slope of a line to a later point.
        further = at - everywhere[:, None]
        slopes = np.full(further.shape, np.inf)
        np.divide(known - table[:, None], further, out=slopes, where=further > 0)
        self.cheapest_rows: list[float] = slopes.min(axis=1).tolist()

    def __call__(self, rows: int) -> float:
        """The cost of a step over ``rows`` rows; beyond ``widest`` the last slope continues."""
        if rows <= self.widest:
            return self.table[rows]
        before = self.rows[-2] if len(self.rows) > 1 else 0
        slope = (self.table[-1] - self.table[before]) / (self.widest - before)
        return self.table[-1] + slope * (rows - self.widest)


USUAL_SYNC_OVERHEAD = 0.02
"""The sync overhead until some plain steps have waited for a token (notes/planner.md,
"The wait for a token")."""


@dataclass
class FixedCosts:
    """Costs that are never corrected by measured steps.

    Attributes:
        curve: T(rows) / T(1).
        sync_overhead: how much more a plain step costs if its forward is dispatched only after
            the last token was read, as a share of a pipelined step.
        wants_plain_steps: whether plain steps should run between drafted ones, to be measured.
    """

    curve: CostCurve
    sync_overhead: float = USUAL_SYNC_OVERHEAD
    wants_plain_steps: bool = False

    @property
    def hopeful(self) -> CostCurve:
        """What drafts are planned with: the curve, since there is nothing to find out."""
        return self.curve

    def move_to(self, context: int) -> None:
        """Nothing to do: they hold for all contexts."""

    def seconds(self, rows: int) -> float:
        """The time of a step, in plain steps, since no clock was read."""
        return self.curve(rows)

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Nothing to do: they stay as they are."""

    def end(self) -> None:
        """Nothing to do."""


WIDEST = 64
"""Rows up to which costs are predicted; wider steps pay on no chip whose costs are known."""

# Where these come from: notes/planner.md, "Constants".
# Variances, all of natural logarithms of seconds. At first:
_MACHINE_VARIANCE = 0.3**2  # a machine's speed may change between measurements
_DRAFTED_VARIANCE = 0.14**2  # real drafts have to be proposed, and have other tokens than measured
_OWN_SHARE = 0.5  # of the variance of a measured time; drafted steps have the rest in common
_UNSEEN_VARIANCE = 0.11**2  # of a number of rows between two that were measured
# Of a change from step to step:
_MACHINE_CHANGE = 0.008**2
_DRAFTED_CHANGE = 0.002**2
_ROWS_CHANGE = 0.002**2
# Of the noise of one step:
_LEAST_NOISE, _FIRST_NOISE, _MOST_NOISE = 0.02**2, 0.07**2, 0.4**2

# What unmeasured row counts cost: the square root of their number, half-way between
# rows that cost nothing and rows that cost a plain step each; published curves lie around it
# (notes/planner.md, "Costs that nobody knows"). The exponent's standard error reaches both.
_USUAL_EXPONENT, _EXPONENT_VARIANCE = 0.5, 0.35**2
_USUAL_ROWS = (2, 4, 8, 16, 32)
_WIDE = 8  # rows; where these were measured, wider steps follow from them

# What may be hoped of costs: a doubtful one is tried at this many standard errors less, counted
# from what a measurement usually leaves open. Costs of steps wider than all that have run lately
# are doubted more and more, all in the same direction.
_HOPE, _USUAL_ERROR = 2.0, 0.3
_STEPS_PER_DOUBT = 32
_DOUBT_VARIANCE = 0.25**2
_MOST_DOUBT = 1.0
_FIRST_REACH = 4  # rows up to which there is hope where no draft ran lately

_NOISE_RATE = 0.05
_NOISE_CLIP = 4.0  # variances
_OUTLIER = 4.0  # standard deviations
# Consecutive steps that make a deviation a lasting change; enough that a burst of another
# program's work does not count as one.
_LASTING = 8
_NOTICEABLE = 0.02  # relative change of a cost that is worth a new curve

STEP_SECONDS = 1e-6, 1e4
"""No step takes less or more; other times were measured wrongly."""
MOST_UNCERTAINTY = 10.0
"""Relative; a time known no better than that is unknown."""


@dataclass(frozen=True)
class KnownTime:
    """T(rows) and how well it is known.

    Attributes:
        rows: rows of a step; 1 is a pipelined plain step.
        seconds: its wall time.
        uncertainty: relative standard error of ``seconds``.
        steps: how many steps were measured, where these just were.
    """

    rows: Annotated[int, Field(strict=True, ge=1, le=WIDEST)]
    seconds: Annotated[float, Field(strict=True, ge=STEP_SECONDS[0], le=STEP_SECONDS[1])]
    uncertainty: Annotated[float, Field(strict=True, ge=0, le=MOST_UNCERTAINTY)]
    steps: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Rows:
    """What is known of one number of rows.

    Attributes:
        times: seconds as measured, by context.
        value: logarithm of what steps have shown these times to lack.
        variance: of ``value``.
        power: what the shared exponent is multiplied by.
        in_curve: logarithm of its whole correction in the latest curves.
        latest: error of its latest step; None before the first.
        off: how many of its latest steps in a row were far off.
    """

    times: list[float]
    variance: float
    value: float = 0.0
    power: float = 0.0
    in_curve: float = 0.0
    latest: float | None = None
    off: int = 0


class LiveTimes:
    """T(rows, context): the time of a step, corrected by every step.

    A step's time grows with the context in a straight line, since attention reads every position
    of it. The line goes through the times that were measured at the two nearest lengths. If only
    one length was measured, the context is taken to make no difference.

    The logarithm of a step's time is modelled as a sum: the measured time, the machine's speed now,
    what drafted steps have in common, and what this number of rows adds. A Kalman filter (Kalman
    1960) corrects all of them by each step's time, the uncertain ones most. It keeps the
    covariances of what steps share: where a drafted step takes longer than predicted, the next
    plain steps show whether the machine or the costs have changed. So a hot or busy machine changes
    the first and not the costs, which are ratios. What a number of rows adds has a variance of its
    own, and its first step settles most of it.

    Where wide steps were never measured, rows begin with what they usually cost: a power of
    their number whose exponent is shared, too, so one real step corrects them all.

    A step that is far off is ignored, until several in a row with as many rows are. Where all
    others were, too, it is the machine that has changed.

    What looks expensive is not drafted, and would never be corrected. So drafts are planned with
    the :meth:`hopeful` curve, and costs that no step has shown lately become uncertain.

    Args:
        known: per context length, measured times in any order, one of them of a plain step.
            However noisy they are, all that the curves say is finite.

    Attributes:
        overhead: the sync overhead, a running average.
    """

    def __init__(self, known: Mapping[int, Iterable[KnownTime]]) -> None:
        self._contexts = sorted(known)
        measured = [
            {time.rows: time for time in known[context] if time.rows <= WIDEST}
            for context in self._contexts
        ]
        errors = {rows: time.uncertainty for rows, time in measured[0].items()}
        plain = errors.pop(1)
        seconds = _completed([{r: t.seconds for r, t in times.items()} for times in measured])
        # What steps share, and its covariances: logarithms of the machine's speed now, and of
        # what drafted steps have in common; the usual exponent.
        self._shared = np.array([0.0, 0.0, _USUAL_EXPONENT])
        drafted = _DRAFTED_VARIANCE + plain**2
        self._covariance = np.diag([_MACHINE_VARIANCE, drafted, _EXPONENT_VARIANCE])
        self._plain = _Rows([times[1] for times in seconds], 0.0)
        self._rows = {
            rows: _Rows([times[rows] for times in seconds], _OWN_SHARE * error**2)
            for rows, error in sorted(errors.items())
        }
        self._measured = max(self._rows, default=1)
        if self._measured < _WIDE:
            for rows in _USUAL_ROWS:
                if rows > self._measured:
                    self._rows[rows] = self._unseen(rows)
        self._steps_since_doubt, self._widest_since_doubt, self._reach = 0, 1, _FIRST_REACH
        self._doubt, self._beyond = 0.0, WIDEST  # variance of the costs of more rows than these
        # Where plain steps scattered so much that T(1) is hardly known, others will scatter, too.
        self._noise = min(max(_FIRST_NOISE, plain**2), _MOST_NOISE)
        self._off = 0  # how many of the latest steps in a row were far off
        self.overhead = USUAL_SYNC_OVERHEAD
        self._curves: dict[int, tuple[CostCurve, CostCurve]] = {}
        self._forget_curves()

    def curve(self, context: int) -> CostCurve:
        """T(rows)/T(1) up to ``WIDEST`` rows; the same object until a cost has changed."""
        return self._both(context)[0]

    def hopeful(self, context: int) -> CostCurve:
        """The least that steps plausibly cost: below :meth:`curve` where it is uncertain.

        There is hope for few rows, and for up to twice as many as have run lately.
        """
        return self._both(context)[1]

    @property
    def slowdown(self) -> float:
        """Time of a plain step now against the measured one; above 1 on a hot or busy machine."""
        return math.exp(self._shared[0])

    @property
    def stddev(self) -> float:
        """Relative standard error that the costs of all drafted steps have in common.

        It becomes small only where both plain and drafted steps run.
        """
        return math.sqrt(max(self._covariance[1, 1], 0.0))

    def seconds(self, rows: int, context: int) -> float:
        """The wall time that a step would take now."""
        return self.slowdown * self._time(self._plain, context) * self.curve(context)(rows)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a step over ``rows`` rows, 1 being a pipelined plain step."""
        if not 1 <= rows <= WIDEST or not STEP_SECONDS[0] <= seconds <= STEP_SECONDS[1]:
            return
        own = self._plain if rows == 1 else self._rows.get(rows)
        if own is None:
            own = self._rows[rows] = self._unseen(rows)
            own.in_curve = self._correction(own)
        if rows == 1:
            parts, change = _MACHINE, _PLAIN_STEP_CHANGE
        else:
            parts, change = np.array([1.0, 1.0, own.power]), _DRAFTED_STEP_CHANGE
            own.variance += _ROWS_CHANGE
        expected = math.log(self._time(own, context)) + float(parts @ self._shared) + own.value
        error = math.log(seconds) - expected
        covariance = self._covariance + change
        doubt = self._doubt if rows > self._beyond else 0.0
        # Rounding may leave a little less than nothing of what is known well.
        alone = own.variance + doubt + self._noise
        variance = max(float(parts @ covariance @ parts), 0.0) + alone
        if own.latest is not None:
            self._learn_noise(error - own.latest)
        own.latest = error
        if abs(error) > _OUTLIER * math.sqrt(variance):
            own.off += 1
            self._off += 1
            if own.off < _LASTING:
                self._covariance = covariance
                return
            if self._off >= _LASTING:  # no other step was right: it is the machine
                covariance = covariance + _MACHINE_VARIANCE * np.outer(_MACHINE, _MACHINE)
            elif rows == 1:  # drafted steps were right: what they take remains, in other plain ones
                covariance = covariance + _MACHINE_VARIANCE * np.outer(_PLAIN_ALONE, _PLAIN_ALONE)
            else:
                own.variance += _MACHINE_VARIANCE
            variance += _MACHINE_VARIANCE
        own.off = self._off = 0
        # The error is spread over all that the step's time is the sum of, the uncertain first.
        gain, shared = error / variance, covariance @ parts
        self._shared = self._shared + gain * shared
        self._covariance = covariance - shared[:, None] * (shared / variance)
        own.value += own.variance * gain
        settled = (own.variance + doubt) / variance  # by this step, of both together
        own.variance -= own.variance * settled
        if doubt:
            for other_rows, other in self._rows.items():
                if other_rows > self._beyond:
                    other.value += doubt * gain
            self._doubt -= doubt * settled
        changes = (abs(self._correction(one) - one.in_curve) for one in self._rows.values())
        if doubt > 0 or any(change > _NOTICEABLE for change in changes):
            self._forget_curves()

    def ran(self, rows: int) -> None:
        """Count a step, recorded or not: costs of wider ones become doubtful."""
        self._widest_since_doubt = max(self._widest_since_doubt, rows)
        self._steps_since_doubt += 1
        if self._steps_since_doubt < _STEPS_PER_DOUBT:
            return
        self._doubt = min(self._doubt + _DOUBT_VARIANCE, _MOST_DOUBT)
        self._beyond = self._widest_since_doubt
        self._reach = max(_FIRST_REACH, 2 * self._widest_since_doubt)
        self._steps_since_doubt, self._widest_since_doubt = 0, 1
        self._forget_curves()

    def known(self, *, assumed: bool = True) -> dict[int, list[KnownTime]]:
        """What is now known, per measured context length, as times at the machine's usual speed.

        Args:
            assumed: whether costs that were neither measured nor run are included.
        """
        exponent = max(self._covariance[2, 2], 0.0)
        found = {}
        for context in self._contexts:
            plain = self._time(self._plain, context)
            times = [KnownTime(1, plain, self.stddev)]
            for rows, own in sorted(self._rows.items()):
                if assumed or rows <= self._measured or own.latest is not None:
                    seconds = self._time(own, context) * math.exp(self._correction(own))
                    # With its doubt, or short processes would believe wrong times for ever.
                    doubt = self._doubt / _OWN_SHARE if rows > self._beyond else 0.0
                    variance = own.variance + doubt + exponent * own.power**2
                    times.append(KnownTime(rows, seconds, math.sqrt(variance)))
            found[context] = times
        return found

    def _time(self, own: _Rows, context: int) -> float:
        """The measured time, at a context length."""
        if len(own.times) == 1 or context <= self._contexts[0]:
            return own.times[0]
        end = min(bisect(self._contexts, context), len(self._contexts) - 1)
        start, stop = self._contexts[end - 1], self._contexts[end]
        low, high = own.times[end - 1], own.times[end]
        return low + (high - low) * (context - start) / (stop - start)

    def _correction(self, own: _Rows) -> float:
        """The logarithm of the factor by which drafted steps of these rows exceed the measured."""
        return float(self._shared[1] + own.value + self._shared[2] * own.power)

    def _forget_curves(self) -> None:
        self._curves.clear()
        for own in (self._plain, *self._rows.values()):
            own.in_curve = self._correction(own)

    def _both(self, context: int) -> tuple[CostCurve, CostCurve]:
        """The curve of a context length, and the hopeful one."""
        if context not in self._curves:
            plain = self._time(self._plain, context)
            points, hopeful = [(1, 1.0)], [(1, 1.0)]
            for rows, own in sorted(self._rows.items()):
                cost = self._time(own, context) / plain * math.exp(own.in_curve)
                points.append((rows, cost))
                hope = self._hope(rows, own)
                hopeful.append((rows, cost * math.exp(-hope)))
            curve = _extended(points)
            self._curves[context] = curve, curve if hopeful == points else _extended(hopeful)
        return self._curves[context]

    def _hope(self, rows: int, own: _Rows) -> float:
        """By how much the logarithm of a cost may plausibly be too high."""
        if rows > self._reach:
            return 0.0
        parts = np.array([0.0, 1.0, own.power])
        variance = own.variance + (self._doubt if rows > self._beyond else 0.0)
        variance += float(parts @ self._covariance @ parts)
        return _HOPE * max(math.sqrt(max(variance, 0.0)) - _USUAL_ERROR, 0.0)

    def _unseen(self, rows: int) -> _Rows:
        """What is expected of a number of rows that has not run."""
        if rows > self._measured and self._measured < _WIDE:
            last = self._rows.get(self._measured, self._plain)
            variance, power = last.variance + _UNSEEN_VARIANCE, math.log(rows / self._measured)
            return _Rows(last.times, variance, last.value, power)
        # The curves' times, without the corrections that all rows share.
        common = math.exp(self._shared[1])
        times = [
            self._time(self._plain, context) * self.curve(context)(rows) / common
            for context in self._contexts
        ]
        variance = max((own.variance for own in self._rows.values()), default=0.0)
        return _Rows(times, variance + _UNSEEN_VARIANCE)

    def _learn_noise(self, difference: float) -> None:
        """Learn from the difference between two steps of as many rows; their cost cancels out."""
        squared = min(difference * difference / 2, _NOISE_CLIP * self._noise)
        noise = self._noise + _NOISE_RATE * (squared - self._noise)
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)


# What the logarithm of a plain step's time is made of, and what changes where it changes alone.
_MACHINE, _PLAIN_ALONE = np.array([1.0, 0.0, 0.0]), np.array([1.0, -1.0, 0.0])
_PLAIN_STEP_CHANGE = np.diag([_MACHINE_CHANGE, 0.0, 0.0])
_DRAFTED_STEP_CHANGE = np.diag([_MACHINE_CHANGE, _DRAFTED_CHANGE, 0.0])


def _completed(measured: list[dict[int, float]]) -> list[dict[int, float]]:
    """Complete the times by rows, one dict for each context length, the shortest first.

    Afterwards all lengths have the rows of the shortest one, and no time falls as the context
    grows. What a longer context adds to a time that was not measured there follows from what it
    adds to others.
    """
    times = measured[:1]
    for own in measured[1:]:
        shorter = times[-1]
        rows = sorted(own.keys() & shorter.keys())
        added = np.interp([*shorter], rows, [own[row] - shorter[row] for row in rows])
        grown = zip(shorter.items(), added.tolist(), strict=True)
        times.append({r: max(own.get(r, seconds + more), seconds) for (r, seconds), more in grown})
    return times


def _extended(points: list[tuple[int, float]]) -> CostCurve:
    """The curve through these points, and on to ``WIDEST`` rows."""
    rows = points[-1][0]
    if rows < WIDEST:
        # In proportion to the rows, as if each further block cost what the first one does: too
        # much where the curve is flat, and right on average where it has stairs.
        points = [*points, (WIDEST, max(cost for _, cost in points) * WIDEST / rows)]
    return CostCurve(points)


_MOST_OVERHEAD = 0.5  # share of a plain step
_OVERHEAD_RATE = 0.1  # weight of the newest run of plain steps
_PLAIN_STEPS_PER_LESSON = 8  # in a row; learning from each would slow them down
_LEAST_CONTEXT_STEP = 64  # positions
_MOST_STDDEV = 0.04  # that drafted steps' costs have in common, before plain steps are wanted
_OTHER_SEQUENCES = 0.15  # of a cost that was measured with another number of sequences


class LiveCosts:
    """T(rows)/T(1) at the current context length, corrected by every step.

    Generations that run at the same time have each their own :meth:`for_generation`, and learn
    together.

    Args:
        known: measured times, as :class:`LiveTimes` takes them.
    """

    def __init__(self, known: Mapping[int, Iterable[KnownTime]]) -> None:
        self._lock = threading.RLock()
        self._live = LiveTimes(known)
        self._joint: dict[int, LiveCosts] = {}
        self._context = 0
        self._begin_run()

    def for_generation(self) -> Self:
        """The same costs, for one generation: with its context length and its runs of steps."""
        own = copy.copy(self)
        own._begin_run()
        return own

    def for_sequences(self, count: int) -> LiveCosts:
        """What joint steps of ``count`` sequences cost, learned from them alone.

        One row there is a plain step of all sequences, each further row one of a draft. Until
        such steps have run, they are taken to cost as much as the same number of rows of one
        sequence, except for attention: each sequence attends to its own context. The wait for a
        token is taken to be the same.
        """
        with self._lock:
            if count not in self._joint:
                known = _beside(self._live.known(), count)
                self._joint[count] = self._begun_with(known, count)
                self._joint[count]._live.overhead = self._live.overhead
            return self._joint[count].for_generation()

    def _begun_with(self, known: Mapping[int, list[KnownTime]], count: int) -> LiveCosts:
        """Costs of ``count`` sequences, which begin with ``known``."""
        return LiveCosts(known)

    def end(self) -> None:
        """The generation has ended: nothing to do."""

    def _begin_run(self) -> None:
        """Forget the latest steps: each generation has runs of its own."""
        self._plain_steps = 0  # in a row
        # Seconds of the last run of plain steps: the one that waited, and the last pipelined one.
        self._last_waiting: float | None = None
        self._last_pipelined: float | None = None

    def move_to(self, context: int) -> None:
        """Set the context's length in positions; cheap enough for every step."""
        # In steps of 3 to 6 %, so that new curves are seldom needed.
        step = max(_LEAST_CONTEXT_STEP, 1 << max(context.bit_length() - 5, 0))
        self._context = context // step * step

    @property
    def curve(self) -> CostCurve:
        """T(rows)/T(1) as known so far; the same object until a cost has changed noticeably."""
        with self._lock:
            return self._live.curve(self._context)

    @property
    def hopeful(self) -> CostCurve:
        """What drafts are planned with; see :meth:`LiveTimes.hopeful`."""
        with self._lock:
            return self._live.hopeful(self._context)

    def seconds(self, rows: int) -> float:
        """The wall time that a step over ``rows`` rows would take now."""
        with self._lock:
            return self._live.seconds(rows, self._context)

    @property
    def sync_overhead(self) -> float:
        """The time that waiting for its token adds to a plain step, as a share of that step's."""
        return max(self._live.overhead, 0.0)

    @property
    def wants_plain_steps(self) -> bool:
        """Whether plain steps should run between drafted ones, to measure what drafts cost.

        Nothing else distinguishes costs from the machine's speed. Where hardly any plain step runs,
        a T(1) that was measured on a busy machine would stay, and make all drafts look cheap.
        """
        return self._live.stddev > _MOST_STDDEV

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Learn from a step.

        Plain steps show T(1) only in the middle of a pipeline. The first one waits for its token
        and for a part of the second's forward, and the last one finds its own forward nearly done:
        what the two take beyond 2 T(1) is the sync overhead.

        Args:
            rows: its rows.
            seconds: its wall time; of a pipelined one of a single sequence, what it would be
                without drafter.
            pipelined: whether its forward had been dispatched during the step before.
        """
        with self._lock:
            self._record(rows, seconds, pipelined)
            self._live.ran(rows)

    def _record(self, rows: int, seconds: float, pipelined: bool) -> None:
        before, self._last_pipelined = self._last_pipelined, seconds if pipelined else None
        if not pipelined:
            if self._last_waiting is not None:
                # A run of plain steps is over: the one that waited, and the last pipelined one.
                run = self._last_waiting, *([] if before is None else [before])
                surplus = sum(run) / self.seconds(1) - len(run)
                surplus = min(max(surplus, -_MOST_OVERHEAD), _MOST_OVERHEAD)
                self._live.overhead += _OVERHEAD_RATE * (surplus - self._live.overhead)
            self._last_waiting = seconds if rows == 1 else None
        if rows == 1:
            if not pipelined or before is None:
                return
            seconds = before  # the step before: only now it is known not to be the last
            self._plain_steps += 1
            surplus = self._plain_steps - _PLAIN_STEPS_PER_LESSON
            if surplus > 0 and surplus % _PLAIN_STEPS_PER_LESSON:
                return
        else:
            self._plain_steps = 0
        self._live.record(rows, self._context, seconds)

    def known(self) -> dict[int, list[KnownTime]]:
        """What was measured or learned, by context length."""
        with self._lock:
            return self._live.known(assumed=False)


def _beside(known: Mapping[int, Sequence[KnownTime]], count: int) -> dict[int, list[KnownTime]]:
    """Convert times of one sequence to those of ``count``, whose plain step has ``count`` rows.

    Each sequence attends to its own context. So a longer context adds ``count`` times what it adds
    to one sequence with 1/``count`` of the rows.
    """
    shortest = known[min(known)]
    plain, rows = shortest[0].seconds, [time.rows for time in shortest]
    curve = CostCurve([(time.rows, time.seconds / plain) for time in shortest])
    widths = sorted({count, *(own for own in rows if own > count), count + WIDEST - 1})
    converted = {}
    for context, times in known.items():
        growth = [time.seconds - first.seconds for time, first in zip(times, shortest, strict=True)]
        added = count * np.interp(np.array(widths) / count, rows, growth)
        errors = [max(time.uncertainty for time in times if time.rows <= own) for own in widths]
        converted[context] = [
            KnownTime(
                own - count + 1,
                plain * curve(own) + float(more),
                math.hypot(error, _OTHER_SEQUENCES),
            )
            for own, more, error in zip(widths, added, errors, strict=True)
        ]
    return converted


Costs = FixedCosts | LiveCosts
"""What steps cost; a planner reads it, and records every step there."""
