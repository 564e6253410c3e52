"""Predicts step times, and corrects the predictions by every step."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cost_curve import CostCurve
from .cost_file import StepTime

WIDEST = 64
"""The most rows whose cost is predicted. Wider steps do not pay on any known chip."""

USUAL_SYNC_OVERHEAD = 0.02
"""The sync overhead that is assumed until some plain step has waited for a token (notes/planner.md,
"The wait for a token").
"""

# Where these come from: notes/planner.md, "Constants".
# All variances are of natural logarithms of seconds. The initial variances:
_MACHINE_VARIANCE = 0.3**2  # the machine's speed may change between measurements
_DRAFTED_VARIANCE = 0.14**2  # unlike in a measurement, drafts must be found and have real tokens
_OWN_SHARE = 0.5  # of a measured time's variance; the rest is common to all drafted steps
_UNSEEN_VARIANCE = 0.11**2  # for a number of rows between two measured ones
# The variances of changes from step to step:
_MACHINE_CHANGE = 0.008**2
_DRAFTED_CHANGE = 0.002**2
_ROWS_CHANGE = 0.002**2
# The variance of one step's noise:
_LEAST_NOISE, _FIRST_NOISE, _MOST_NOISE = 0.02**2, 0.07**2, 0.4**2

# The cost of an unmeasured number of rows is taken to be its square root. The exponent is half-way
# between those of rows that cost nothing and of rows that cost a plain step each. Published curves
# lie around it (notes/planner.md, "Unknown costs"). The exponent's standard error nearly
# reaches both of these extremes.
_USUAL_EXPONENT, _EXPONENT_VARIANCE = 0.5, 0.35**2
_USUAL_ROWS = (2, 4, 8, 16, 32)

# The hopeful curve takes an uncertain cost to be lower than estimated: by _HOPE standard errors,
# less the usual error of a measurement. The costs of steps wider than all recent ones become more
# and more uncertain, all in the same direction.
_HOPE, _USUAL_ERROR = 2.0, 0.3
_STEPS_PER_DOUBT = 32
_DOUBT_VARIANCE = 0.25**2
_MOST_DOUBT = 1.0

_NOISE_RATE = 0.05
_NOISE_CLIP = 4.0  # in variances
_OUTLIER = 4.0  # in standard deviations
# A deviation that lasts for this many consecutive steps counts as a change. A burst of work in
# another program is shorter.
_LASTING = 8
_NOTICEABLE = 0.02  # the relative change of a cost that requires a new curve

_MOST_OVERHEAD = 0.5  # as a share of a plain step
_OVERHEAD_RATE = 0.1  # the weight of the newest run of plain steps
_OTHER_SEQUENCES = 0.15  # uncertainty of a cost measured with another number of sequences

STEP_SECONDS = 1e-6, 1e4
"""The least and the most seconds of a step; times outside were measured wrongly."""


@dataclass(slots=True)
class _Rows:
    """What is known about steps with one number of rows.

    Attributes:
        seconds: as measured, by context length.
        value: the logarithm of the correction that steps have shown.
        variance: the variance of ``value``.
        power: the factor of the shared exponent.
        in_curve: the logarithm of the whole correction, as used in the latest curves.
        latest: the error of the latest step; None before the first.
        off: the number of consecutive outliers among the latest steps.
    """

    seconds: list[float]
    variance: float
    value: float = 0.0
    power: float = 0.0
    in_curve: float = 0.0
    latest: float | None = None
    off: int = 0


class TimeFilter:
    """T(rows, context): the time of a step, corrected by every step.

    A step's time grows linearly with the context, since attention reads every position of it. The
    line goes through the times measured at the two nearest lengths. If only one length was
    measured, the context is assumed to make no difference.

    The logarithm of a step's time is modelled as a sum of four terms: the measured time, the
    machine's current speed, a term that all drafted steps share, and a term for this number of
    rows. A Kalman filter (Kalman 1960) corrects the last three by each step's time, and the most
    uncertain of them the most. It keeps the covariances of the shared terms: if a drafted step
    takes longer than predicted, the next plain steps show whether the machine or the costs have
    changed. So a hot or busy machine changes the speed, but not the costs, which are ratios. The
    term for a number of rows has its own variance, most of which the first such step removes.

    Steps wider than all measured ones begin with a typical cost: a power of the number of rows,
    whose exponent is also a shared term, so one real step corrects them all.

    An outlier is ignored unless several consecutive steps with the same number of rows are
    outliers. If all recent steps are outliers, the machine has changed.

    Drafts that look expensive are never made, so their costs would never be corrected. Therefore
    drafts are planned with the :meth:`hopeful` curve, and costs become uncertain if no step has
    shown them lately.

    Args:
        known: for each context length, measured times in any order, including that of a plain step.
            However noisy the times are, the curves are finite.

    Attributes:
        overhead: the running average of the sync overhead.
    """

    def __init__(self, known: Mapping[int, Iterable[StepTime]]) -> None:
        self._contexts = sorted(known)
        measured = [
            {time.rows: time for time in known[context] if time.rows <= WIDEST}
            for context in self._contexts
        ]
        for longer in measured[1:]:
            measured[0] = _with_rows_of(longer, measured[0])
        errors = {rows: time.uncertainty for rows, time in measured[0].items()}
        plain = errors.pop(1)
        seconds = _completed([{r: t.seconds for r, t in times.items()} for times in measured])
        # The shared terms, and their covariances: the logarithm of the machine's current speed, the
        # logarithm of the drafted steps' term, and the usual exponent.
        self._shared = [0.0, 0.0, _USUAL_EXPONENT]
        drafted = _DRAFTED_VARIANCE + plain**2
        self._covariance = [
            [_MACHINE_VARIANCE, 0.0, 0.0],
            [0.0, drafted, 0.0],
            [0.0, 0.0, _EXPONENT_VARIANCE],
        ]
        self._plain = _Rows([times[1] for times in seconds], 0.0)
        self._rows = {
            rows: _Rows([times[rows] for times in seconds], _OWN_SHARE * error**2)
            for rows, error in sorted(errors.items())
        }
        self._measured = max(self._rows, default=1)
        for rows in _USUAL_ROWS:
            if rows > self._measured:
                self._rows[rows] = self._unseen(rows)
        self._widest = self._rows[max(self._rows)] if self._rows else self._plain
        self._steps_since_doubt, self._widest_since_doubt = 0, 1
        self._doubt, self._beyond = 0.0, WIDEST  # an extra variance, for more rows than ``_beyond``
        # If plain steps scattered so much that T(1) is hardly known, other steps will, too.
        self._noise = min(max(_FIRST_NOISE, plain**2), _MOST_NOISE)
        self._off = 0  # the number of consecutive outliers among the latest steps
        self.overhead = USUAL_SYNC_OVERHEAD
        self._curves: dict[int, tuple[CostCurve, CostCurve]] = {}
        self._forget_curves()

    def curve(self, context: int) -> CostCurve:
        """T(rows)/T(1) up to ``WIDEST`` rows; the same object until a cost has changed."""
        return self._both(context)[0]

    def hopeful(self, context: int) -> CostCurve:
        """The lowest plausible costs: lower than :meth:`curve` where that is uncertain."""
        return self._both(context)[1]

    @property
    def slowdown(self) -> float:
        """The current time of a plain step divided by the measured one; more than 1 on a hot or
        busy machine.
        """
        return math.exp(self._shared[0])

    @property
    def stddev(self) -> float:
        """The relative standard error that the costs of all drafted steps share.

        It becomes small only if both plain steps and drafted steps run.
        """
        return math.sqrt(max(self._covariance[1][1], 0.0))

    def plain_seconds(self, context: int) -> float:
        """The predicted wall time of a pipelined plain step, T(1)."""
        return self.slowdown * self._seconds(self._plain, context)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a step over ``rows`` rows; 1 is a pipelined plain step."""
        if not 1 <= rows <= WIDEST or not STEP_SECONDS[0] <= seconds <= STEP_SECONDS[1]:
            return
        state = self._plain if rows == 1 else self._rows.get(rows)
        if state is None:
            state = self._rows[rows] = self._unseen(rows)
            state.in_curve = self._correction(state)
        covariance = _plus(self._covariance, _MACHINE_CHANGE, _MACHINE)
        if rows == 1:
            parts = _MACHINE
        else:
            parts = 1.0, 1.0, state.power
            state.variance += _ROWS_CHANGE
            covariance = _plus(covariance, _DRAFTED_CHANGE, _DRAFTED)
        expected = math.log(self._seconds(state, context)) + _dot(parts, self._shared) + state.value
        error = math.log(seconds) - expected
        doubt = self._doubt_of(rows)
        # Rounding can make a small variance slightly negative.
        alone = state.variance + doubt + self._noise
        variance = max(_dot(parts, _product(covariance, parts)), 0.0) + alone
        if state.latest is not None:
            self._learn_noise(error - state.latest)
        state.latest = error
        if abs(error) > _OUTLIER * math.sqrt(variance):
            state.off += 1
            self._off += 1
            if state.off < _LASTING:
                self._covariance = covariance
                return
            if self._off >= _LASTING:  # no step was as predicted: the machine has changed
                covariance = _plus(covariance, _MACHINE_VARIANCE, _MACHINE)
            elif rows == 1:  # drafted steps were as predicted: only plain steps have changed
                covariance = _plus(covariance, _MACHINE_VARIANCE, _PLAIN_ALONE)
            else:
                state.variance += _MACHINE_VARIANCE
            variance += _MACHINE_VARIANCE
        state.off = self._off = 0
        # The error is divided among all terms of the step's time; uncertain terms take most of it.
        gain, shared = error / variance, _product(covariance, parts)
        self._shared = [term + gain * part for term, part in zip(self._shared, shared, strict=True)]
        self._covariance = _plus(covariance, -1 / variance, shared)
        state.value += state.variance * gain
        settled = (state.variance + doubt) / variance  # the part of both that this step removes
        state.variance -= state.variance * settled
        if doubt:
            for other_rows, other in self._rows.items():
                if other_rows > self._beyond:
                    other.value += doubt * gain
            self._doubt -= doubt * settled
        # All other rows have changed by the shared terms alone.
        others = (
            self._correction(reference) - reference.in_curve
            for reference in (self._plain, self._widest)
        )
        change = max(map(abs, (*others, self._correction(state) - state.in_curve)))
        if doubt > 0 or change > _NOTICEABLE:
            self._forget_curves()

    def record_overhead(self, surplus: float) -> None:
        """Learn the sync overhead from the surplus time of a run of plain steps, in plain steps."""
        surplus = min(max(surplus, -_MOST_OVERHEAD), _MOST_OVERHEAD)
        self.overhead += _OVERHEAD_RATE * (surplus - self.overhead)

    def ran(self, rows: int) -> None:
        """Count a step, whether or not it is recorded.

        After every ``_STEPS_PER_DOUBT`` steps, the costs of steps wider than all of these become
        less certain.
        """
        self._widest_since_doubt = max(self._widest_since_doubt, rows)
        self._steps_since_doubt += 1
        if self._steps_since_doubt < _STEPS_PER_DOUBT:
            return
        self._doubt = min(self._doubt + _DOUBT_VARIANCE, _MOST_DOUBT)
        self._beyond = self._widest_since_doubt
        self._steps_since_doubt, self._widest_since_doubt = 0, 1
        self._forget_curves()

    def known(self, *, assumed: bool = True) -> dict[int, list[StepTime]]:
        """The times as corrected so far, by context length, at the machine's usual speed.

        Args:
            assumed: whether to include rows that were neither measured nor run.
        """
        exponent = max(self._covariance[2][2], 0.0)
        by_context = {}
        for context in self._contexts:
            plain = self._seconds(self._plain, context)
            times = [StepTime(1, plain, self.stddev)]
            for rows, state in sorted(self._rows.items()):
                if assumed or rows <= self._measured or state.latest is not None:
                    seconds = self._seconds(state, context) * math.exp(self._correction(state))
                    # The next filter takes this share of it. Without the division, short
                    # processes would trust wrong times for ever.
                    own = (state.variance + self._doubt_of(rows)) / _OWN_SHARE
                    variance = own + exponent * state.power**2
                    times.append(StepTime(rows, seconds, math.sqrt(variance)))
            by_context[context] = times
        return by_context

    def _seconds(self, state: _Rows, context: int) -> float:
        """The measured seconds at a context length."""
        if len(state.seconds) == 1 or context <= self._contexts[0]:
            return state.seconds[0]
        end = min(bisect(self._contexts, context), len(self._contexts) - 1)
        start, stop = self._contexts[end - 1], self._contexts[end]
        low, high = state.seconds[end - 1], state.seconds[end]
        return low + (high - low) * (context - start) / (stop - start)

    def _correction(self, state: _Rows) -> float:
        """The logarithm of the ratio of a drafted step's time to the measured one."""
        return self._shared[1] + state.value + self._shared[2] * state.power

    def _forget_curves(self) -> None:
        self._curves.clear()
        for state in (self._plain, *self._rows.values()):
            state.in_curve = self._correction(state)

    def _both(self, context: int) -> tuple[CostCurve, CostCurve]:
        """The curve and the hopeful curve at a context length."""
        if context not in self._curves:
            plain = self._seconds(self._plain, context)
            known = sorted(self._rows.items())
            costs = _rising(
                (
                    self._seconds(state, context) / plain * math.exp(state.in_curve),
                    state.variance + self._doubt_of(rows),
                )
                for rows, state in known
            )
            points, hopeful = [(1, 1.0)], [(1, 1.0)]
            for (rows, state), cost in zip(known, costs, strict=True):
                points.append((rows, cost))
                hopeful.append((rows, cost * math.exp(-self._hope(rows, state))))
            curve = _extended(points)
            self._curves[context] = curve, curve if hopeful == points else _extended(hopeful)
        return self._curves[context]

    def _hope(self, rows: int, state: _Rows) -> float:
        """The most by which the logarithm of a cost may plausibly be too high."""
        parts = 0.0, 1.0, state.power
        shared = _dot(parts, _product(self._covariance, parts))
        variance = state.variance + self._doubt_of(rows) + shared
        return _HOPE * max(math.sqrt(max(variance, 0.0)) - _USUAL_ERROR, 0.0)

    def _doubt_of(self, rows: int) -> float:
        """The extra variance of a cost that no step has shown lately."""
        return self._doubt if rows > self._beyond else 0.0

    def _unseen(self, rows: int) -> _Rows:
        """The expected state for a number of rows that has not run."""
        if rows > self._measured:
            last = self._rows.get(self._measured, self._plain)
            variance, power = last.variance + _UNSEEN_VARIANCE, math.log(rows / self._measured)
            return _Rows(last.seconds, variance, last.value, power)
        # The times of the curves, without the corrections that all rows share.
        common = math.exp(self._shared[1])
        seconds = [
            self._seconds(self._plain, context) * self.curve(context)(rows) / common
            for context in self._contexts
        ]
        variance = max((state.variance for state in self._rows.values()), default=0.0)
        return _Rows(seconds, variance + _UNSEEN_VARIANCE)

    def _learn_noise(self, difference: float) -> None:
        """Learn the noise from the difference of two steps with the same number of rows, in which
        their cost cancels out.
        """
        squared = min(difference * difference / 2, _NOISE_CLIP * self._noise)
        noise = self._noise + _NOISE_RATE * (squared - self._noise)
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)


# The terms that a plain step has, those that drafted steps have in addition, and how the terms
# change if only plain steps do.
_MACHINE, _DRAFTED, _PLAIN_ALONE = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, -1.0, 0.0)


# For three numbers, these take a tenth of NumPy's time.
def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return first[0] * second[0] + first[1] * second[1] + first[2] * second[2]


def _product(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [_dot(row, vector) for row in matrix]


def _plus(
    matrix: Sequence[Sequence[float]], factor: float, vector: Sequence[float]
) -> list[list[float]]:
    """Add ``factor`` times the outer product of a vector with itself."""
    return [
        [value + factor * left * right for value, right in zip(row, vector, strict=True)]
        for row, left in zip(matrix, vector, strict=True)
    ]


def _rising(costs: Iterable[tuple[float, float]]) -> list[float]:
    """Average costs that fall, so that none does (pool adjacent violators, Ayer et al. 1955).

    Otherwise one cost that was measured wrongly, on a busy machine, would raise those of all wider
    steps, however well these are known. The average is that of the logarithms. Its weights fall
    with the square of the variances, so that a cost which steps have shown hardly gives way.

    Args:
        costs: pairs of a cost and the variance of its logarithm, by ascending rows.
    """
    groups: list[tuple[float, float, int]] = []  # a logarithm, its weight, and how many have it
    for cost, variance in costs:
        groups.append((math.log(cost), 1 / (variance + _LEAST_NOISE) ** 2, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (low, low_weight, n_low), (high, high_weight, n_high) = groups[-2:]
            weight = low_weight + high_weight
            mean = (low * low_weight + high * high_weight) / weight
            groups[-2:] = [(mean, weight, n_low + n_high)]
    return [math.exp(value) for value, _, count in groups for _ in range(count)]


def _with_rows_of(
    longer: Mapping[int, StepTime], shortest: Mapping[int, StepTime]
) -> dict[int, StepTime]:
    """The times after the shortest context, and estimates for rows that only a longer one has.

    An estimate is the time after the longer context, reduced as much as the nearest other times.
    """
    rows = sorted(longer)
    known = [r for r in sorted(shortest) if r <= rows[-1]]
    seconds = np.interp(known, rows, [longer[r].seconds for r in rows])
    ratios = [shortest[r].seconds / s for r, s in zip(known, seconds, strict=True)]
    added = {
        r: replace(
            time,
            seconds=time.seconds * float(np.interp(r, known, ratios)),
            uncertainty=math.hypot(time.uncertainty, math.sqrt(_UNSEEN_VARIANCE)),
        )
        for r, time in longer.items()
        if r not in shortest
    }
    return {**shortest, **added}


def _completed(measured: list[dict[int, float]]) -> list[dict[int, float]]:
    """Fill in missing times.

    Afterwards all context lengths have the rows of the shortest one, and no time falls as the
    context grows. For a time that was not measured, the effect of a longer context is derived from
    its effect on other times.

    Args:
        measured: for each context length, the shortest first, the times by rows.
    """
    times = measured[:1]
    for longer in measured[1:]:
        shorter = times[-1]
        rows = sorted(longer.keys() & shorter.keys())
        added = np.interp([*shorter], rows, [longer[row] - shorter[row] for row in rows])
        grown = zip(shorter.items(), added.tolist(), strict=True)
        times.append(
            {r: max(longer.get(r, seconds + more), seconds) for (r, seconds), more in grown}
        )
    return times


def _extended(points: list[tuple[int, float]]) -> CostCurve:
    """The curve through these points, extended to ``WIDEST`` rows."""
    rows = points[-1][0]
    if rows < WIDEST:
        # The cost grows in proportion to the rows, as if each further block of rows cost as much as
        # the first. That is too much if the curve is flat, and right on average if it has stairs.
        points = [*points, (WIDEST, max(cost for _, cost in points) * WIDEST / rows)]
    return CostCurve(points)


def joint_times(known: Mapping[int, Sequence[StepTime]], count: int) -> dict[int, list[StepTime]]:
    """Convert times of one sequence to those of ``count``, whose plain step has ``count`` rows.

    Each sequence attends to its own context. So a longer context adds ``count`` times what it adds
    to a step of one sequence with 1/``count`` of the rows.
    """
    shortest = known[min(known)]
    plain, rows = shortest[0].seconds, [time.rows for time in shortest]
    costs = _rising((time.seconds / plain, time.uncertainty**2) for time in shortest[1:])
    curve = CostCurve([(1, 1.0), *zip(rows[1:], costs, strict=True)])
    widths = sorted({count, *(width for width in rows if width > count), count + WIDEST - 1})
    converted = {}
    for context, times in known.items():
        growth = [time.seconds - first.seconds for time, first in zip(times, shortest, strict=True)]
        added = count * np.interp(np.array(widths) / count, rows, growth)
        errors = [max(time.uncertainty for time in times if time.rows <= width) for width in widths]
        converted[context] = [
            StepTime(
                width - count + 1,
                plain * curve(width) + float(more),
                math.hypot(error, _OTHER_SEQUENCES),
            )
            for width, more, error in zip(widths, added, errors, strict=True)
        ]
    return converted
