"""The verify cost at about one context length, corrected by every step."""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from .cost_curve import CostCurve

WIDEST = 64
"""Rows up to which costs are predicted; wider steps pay on no chip whose costs are known."""

# Where these come from: docs/planner-notes.md, "Constants".
# Variances, all of natural logarithms of seconds. Of a part at first:
_MACHINE_VARIANCE = 0.3**2  # a machine's speed may change while nobody measures
_DRAFTED_VARIANCE = 0.08**2  # real drafts have to be proposed, and have other tokens than measured
_UNSEEN_VARIANCE = 0.1**2  # of a number of rows between two that were measured
_BETWEEN_VARIANCE = 0.02**2  # of one between two that are near, from the line between these
# Of a part's change from step to step:
_MACHINE_CHANGE = 0.008**2
_DRAFTED_CHANGE = 0.002**2
_ROWS_CHANGE = 0.002**2
# Of the noise of one step:
_LEAST_NOISE, _FIRST_NOISE, _MOST_NOISE = 0.02**2, 0.07**2, 0.4**2

_NEAR = 1.4  # times as many rows: hardly a stair in between, which would tell on both
_TIED_VARIANCE = 0.2**2  # where both sides are known no better, an error is likelier theirs

# What rows cost where nobody has measured it: the square root of their number, half-way between
# rows that cost nothing and rows that cost a plain step each; published curves lie around it
# (docs/planner-notes.md, "Costs that nobody knows"). The exponent's standard error reaches both.
_USUAL_EXPONENT, _EXPONENT_ERROR = 0.5, 0.35
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
# Recent steps of each number of rows, by which outliers are told from a lasting change; so many
# that a burst of another program's work does not count as one.
_RECENT = 15
_NOTICEABLE = 0.02  # relative change of a cost that is worth a new curve

STEP_SECONDS = 1e-6, 1e4
"""No step takes less or more; a clock that says so has measured something else."""
MOST_UNCERTAINTY = 10.0
"""Relative; whoever knows a time no better than that knows nothing of it."""


@dataclass(frozen=True)
class KnownTime:
    """T(rows) and how well it is known.

    Attributes:
        rows: rows of a step; 1 is a pipelined plain step.
        seconds: its wall time.
        uncertainty: relative standard error of ``seconds``.
    """

    rows: int
    seconds: float
    uncertainty: float

    @property
    def bounded(self) -> KnownTime:
        """The nearest that a step can take, so that nothing computed of it overflows."""
        low, high = STEP_SECONDS
        seconds = min(max(low, self.seconds), high)
        return KnownTime(self.rows, seconds, min(max(0.0, self.uncertainty), MOST_UNCERTAINTY))


# The first parts of the logarithm of a step's time; what each number of rows adds comes after.
_MACHINE, _DRAFTED = 0, 1


class LiveCurve:
    """T(rows) at about one context length, corrected by every step.

    The logarithm of a step's time is modelled as a sum of parts: the machine's speed now (the time
    of a plain step), what drafted steps have in common, and what this number of rows adds. A
    Kalman filter (Kalman 1960) corrects all parts by each step's time, the uncertain ones most.
    It keeps their covariances: where a drafted step takes longer than predicted, the next plain
    steps tell whether the machine or the costs have changed. So a hot or busy machine changes the
    first part and not the costs, which are ratios, and the first step with a number of rows that
    was never measured settles most of its cost. Where it is between two that are near, the three
    are tied: otherwise a single slow step would bar the rows behind it for good.

    Where wide steps were never measured, the curve begins with what rows usually cost, which is
    very uncertain, and for all rows in the same direction: one real step corrects them all.

    A step that is far off is ignored, until most of the recent steps with as many rows are.

    What looks expensive is not drafted, and would never be corrected. So drafts are planned with
    the :attr:`hopeful` curve, and costs that no step has told of lately become uncertain.

    Args:
        known: measured times in any order, one of them of a plain step. However noisy they are,
            all that the curve says is finite.
    """

    def __init__(self, known: Iterable[KnownTime]) -> None:
        times = {time.rows: time.bounded for time in known if time.rows <= WIDEST}
        self._usual = plain = times.pop(1)
        shared_variance = _DRAFTED_VARIANCE + plain.uncertainty**2
        # Few numbers of rows ever run, and a small matrix stays in the processor's cache.
        self._parts = self._in_curve = np.array([math.log(plain.seconds), 0.0])
        self._covariance = np.diag([_MACHINE_VARIANCE, shared_variance])
        # Allocated once, and filled in place: allocating a kilobyte between two steps can make
        # the C library tidy up what the forward has freed, which takes longer than the lesson.
        # (Multiplying by broadcasting would allocate, too.)
        self._correction = np.empty_like(self._covariance)
        self._part_of_rows: dict[int, int] = {}
        for rows, time in sorted(times.items()):
            self._add_part(rows, math.log(time.seconds / plain.seconds), time.uncertainty**2)
        self._assumed: set[int] = set()  # rows that were not measured, and of which no step told
        self._assume_usual_costs()
        self._steps_since_doubt, self._widest_since_doubt, self._reach = 0, 1, _FIRST_REACH
        self._doubt = 0.0  # variance of what drafted steps have in common
        # Where plain steps scattered so much that T(1) is hardly known, others will scatter, too.
        self._noise = min(max(_FIRST_NOISE, plain.uncertainty**2), _MOST_NOISE)
        self._step = 0
        # Per number of rows: the errors of recent steps, the last step that took the predicted
        # time, and the first of those that have not since then.
        self._recent: dict[int, deque[float]] = {}
        self._fitted: dict[int, int] = {}
        self._off_since: dict[int, int] = {}
        self._rebuild()

    @property
    def curve(self) -> CostCurve:
        """T(rows)/T(1) up to ``WIDEST`` rows, never falling; a new one when it has changed."""
        if self._stale:
            self._rebuild()
        return self._curve

    @property
    def hopeful(self) -> CostCurve:
        """The least that steps plausibly cost: below :attr:`curve` where that is hardly known.

        There is hope for few rows, and for up to twice as many as have run lately.
        """
        if self._stale:
            self._rebuild()
        return self._hopeful

    @property
    def slowdown(self) -> float:
        """Time of a plain step now against the measured one; above 1 on a hot or busy machine."""
        return math.exp(self._parts[_MACHINE]) / self._usual.seconds

    @property
    def stddev(self) -> float:
        """Relative standard error that the costs of all drafted steps have in common.

        It becomes small only where both plain and drafted steps run. What is doubted because none
        of the latter ran lately is left out: the first of them will tell.
        """
        return math.sqrt(max(self._covariance[_DRAFTED, _DRAFTED] - self._doubt, 0.0))

    @property
    def noise(self) -> float:
        """Relative standard deviation of a step's time."""
        return math.sqrt(self._noise)

    def seconds(self, rows: int) -> float:
        """The wall time that a step over ``rows`` rows would take now."""
        return math.exp(self._parts[_MACHINE]) * self.curve(rows)

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a step over ``rows`` rows, 1 being a pipelined plain step."""
        if not 1 <= rows <= WIDEST or not STEP_SECONDS[0] <= seconds <= STEP_SECONDS[1]:
            return
        parts = self._parts_of(rows)
        for part in parts:
            self._covariance[part, part] += _change(part)
        error = math.log(seconds) - sum(self._parts[part] for part in parts)
        shared = sum((self._covariance[part] for part in parts), np.zeros(len(self._parts)))
        # Rounding may leave a little less than nothing of what is known well.
        variance = max(sum(shared[part] for part in parts), 0.0) + self._noise
        recent = self._recent[rows]
        if recent:
            self._learn_noise(error - recent[-1])
        recent.append(error)
        limit = _OUTLIER * math.sqrt(variance)
        self._step += 1
        if abs(error) > limit:
            self._off_since.setdefault(rows, self._step)
            error = median_low(recent)
            if len(recent) <= _RECENT // 2 or abs(error) <= limit:
                return
            blamed = self._blame(rows, parts)
            shared[blamed] += _MACHINE_VARIANCE
            variance += _MACHINE_VARIANCE
        self._fitted[rows] = self._step
        self._off_since.pop(rows, None)
        self._correct(error, shared, variance)
        self._assumed.discard(rows)
        if rows > 1:
            self._doubt = 0.0
            self._stale |= rows in self._hoped_for  # there is less to hope for now

    def ran(self, rows: int) -> None:
        """Take note of a step, recorded or not: costs of wider ones become doubtful."""
        self._widest_since_doubt = max(self._widest_since_doubt, rows)
        self._steps_since_doubt += 1
        if self._steps_since_doubt < _STEPS_PER_DOUBT:
            return
        if self._widest_since_doubt == 1:
            doubted = [_DRAFTED]  # it stands for all
        else:
            beyond = self._widest_since_doubt
            doubted = [part for rows, part in self._part_of_rows.items() if rows > beyond]
        doubted = [part for part in doubted if self._covariance[part, part] < _MOST_DOUBT]
        self._covariance[np.ix_(doubted, doubted)] += _DOUBT_VARIANCE
        self._doubt += _DOUBT_VARIANCE if _DRAFTED in doubted else 0.0
        self._reach = max(_FIRST_REACH, 2 * self._widest_since_doubt)
        self._steps_since_doubt, self._widest_since_doubt = 0, 1
        self._stale = True

    def reopen(self) -> None:
        """Expect the machine's speed to have changed: no step was measured for some time."""
        self._widen(_MACHINE, _MACHINE_VARIANCE - self._covariance[_MACHINE, _MACHINE])

    def known(self, stddev: float = 0.0, *, assumed: bool = True) -> list[KnownTime]:
        """What is now known, as times at the machine's usual speed.

        Args:
            stddev: relative uncertainty to add, for use at another context length.
            assumed: whether what was neither measured nor told by a step counts, too.
        """
        common = math.sqrt(max(self._covariance[_DRAFTED, _DRAFTED], 0.0))
        times = [KnownTime(1, self._usual.seconds, math.hypot(common, stddev))]
        for rows, part in sorted(self._part_of_rows.items()):
            if rows in self._assumed and not assumed:
                continue
            cost = math.exp(self._parts[_DRAFTED] + self._parts[part])
            uncertainty = math.sqrt(max(self._covariance[part, part], 0.0) + stddev**2)
            times.append(KnownTime(rows, self._usual.seconds * cost, uncertainty))
        return times

    def _rebuild(self) -> None:
        """Make the curves of the parts as they are now."""
        numbers = sorted(self._part_of_rows)
        parts = [self._part_of_rows[rows] for rows in numbers]
        costs = np.exp(self._parts[_DRAFTED] + self._parts[parts])
        hopes = np.where(np.array(numbers) <= self._reach, self._hopes(parts), 0.0)
        self._hoped_for = {rows for rows, hope in zip(numbers, hopes, strict=True) if hope}
        self._curve = _extended(numbers, costs)
        self._hopeful = _extended(numbers, costs * np.exp(-hopes)) if any(hopes) else self._curve
        self._in_curve = self._parts.copy()
        self._stale = False

    def _hopes(self, parts: list[int]) -> np.ndarray:
        """By how much the logarithms of costs may plausibly be too high, given their parts."""
        own, common = self._covariance[parts, parts], self._covariance[_DRAFTED, parts]
        variances = self._covariance[_DRAFTED, _DRAFTED] + own + 2 * common
        return _HOPE * np.maximum(np.sqrt(np.maximum(variances, 0.0)) - _USUAL_ERROR, 0.0)

    def _assume_usual_costs(self) -> None:
        """Add parts for steps that are wider than the measured ones, where these are narrow."""
        widest = max(self._part_of_rows, default=1)
        if widest >= _WIDE:
            return
        last = self._part_of_rows.get(widest)
        value = 0.0 if last is None else self._parts[last]
        variance = 0.0 if last is None else self._covariance[last, last]
        for rows in _USUAL_ROWS:
            if rows <= widest:
                continue
            distance = math.log(rows / widest)
            shared = np.zeros(len(self._parts))
            for known, part in self._part_of_rows.items():
                if known >= widest:
                    other = math.log(known / widest)
                    shared[part] = variance + _EXPONENT_ERROR**2 * distance * other
            own = variance + (_EXPONENT_ERROR * distance) ** 2 + _UNSEEN_VARIANCE
            self._add_part(rows, value + _USUAL_EXPONENT * distance, own, shared)
            self._assumed.add(rows)

    def _add_unseen(self, rows: int) -> None:
        """Add the part of a number of rows that no step had."""
        value = math.log(self.curve(rows)) - self._parts[_DRAFTED]
        known = sorted(self._part_of_rows)
        after = bisect(known, rows)
        if 0 < after < len(known):
            left, right = known[after - 1 : after + 1]
            weights = np.array([right - rows, rows - left]) / (right - left)
            neighbours = [self._part_of_rows[left], self._part_of_rows[right]]
            shared = weights @ self._covariance[neighbours]
            variance, is_near = float(shared[neighbours] @ weights), right <= _NEAR * left
            if is_near or variance > _TIED_VARIANCE:
                own = _BETWEEN_VARIANCE if is_near else _UNSEEN_VARIANCE
                self._add_part(rows, value, variance + own, shared)
                return
        variance = max(self._covariance.diagonal()[_DRAFTED + 1 :], default=0.0)
        self._add_part(rows, value, variance + _UNSEEN_VARIANCE)

    def _add_part(
        self, rows: int, value: float, variance: float, shared: np.ndarray | None = None
    ) -> None:
        """Add the part of a number of rows.

        Args:
            value, variance: its own.
            shared: its covariances with the parts so far; by default none.
        """
        parts, in_curve = np.append(self._parts, value), np.append(self._in_curve, value)
        covariance = np.pad(self._covariance, (0, 1))
        if shared is not None:
            covariance[-1, :-1] = covariance[:-1, -1] = shared
        covariance[-1, -1] = variance
        correction = np.empty_like(covariance)
        # All at once, since an interrupt in between would leave arrays of unequal sizes.
        arrays = parts, in_curve, covariance, correction
        self._parts, self._in_curve, self._covariance, self._correction = arrays
        self._part_of_rows[rows] = len(parts) - 1

    def _widen(self, part: int, variance: float) -> None:
        self._covariance[part, part] += max(variance, 0.0)

    def _parts_of(self, rows: int) -> list[int]:
        """The parts whose sum is the logarithm of a step's time, by index."""
        if rows not in self._recent:
            self._recent[rows] = deque(maxlen=_RECENT)
        if rows == 1:
            return [_MACHINE]
        if rows not in self._part_of_rows:
            self._add_unseen(rows)
        return [_MACHINE, _DRAFTED, self._part_of_rows[rows]]

    def _learn_noise(self, difference: float) -> None:
        """Learn from the difference between two steps of as many rows; their cost cancels out."""
        squared = min(difference * difference / 2, _NOISE_CLIP * self._noise)
        noise = self._noise + _NOISE_RATE * (squared - self._noise)
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)

    def _blame(self, rows: int, parts: list[int]) -> int:
        """Find the part to blame for times that have changed, make it uncertain, and return it.

        Where steps with other numbers of rows still take the predicted time, it is not the
        machine.
        """
        if any(step > self._off_since[rows] for step in self._fitted.values()):
            self._recent[rows].clear()
            blamed = parts[-1]
        else:
            self._recent.clear()  # these errors were relative to the former speed
            self._off_since.clear()
            blamed = _MACHINE
        self._widen(blamed, _MACHINE_VARIANCE)
        return blamed

    def _correct(self, error: float, shared: np.ndarray, variance: float) -> None:
        """Spread an error over the parts, the uncertain ones first.

        Args:
            error: of the logarithm of a step's time.
            shared: covariance of each part with that logarithm.
            variance: of the logarithm, the step's noise included.
        """
        self._parts += shared * (error / variance)
        np.dot(shared[:, None], shared[None, :] / variance, out=self._correction)
        self._covariance -= self._correction
        if np.abs(self._parts - self._in_curve)[1:].max() > _NOTICEABLE:
            self._stale = True


def _extended(numbers: list[int], costs: np.ndarray) -> CostCurve:
    """The curve through the costs of these numbers of rows, and on to ``WIDEST`` rows."""
    points = [(1, 1.0), *zip(numbers, costs.tolist(), strict=True)]
    rows = points[-1][0]
    if rows < WIDEST:
        # In proportion to the rows, as if each further block cost what the first one does: too
        # much where the curve is flat, and right on average where it has stairs.
        points.append((WIDEST, max(cost for _, cost in points) * WIDEST / rows))
    return CostCurve(points)


def _change(part: int) -> float:
    """The variance of a part's change from step to step."""
    return {_MACHINE: _MACHINE_CHANGE, _DRAFTED: _DRAFTED_CHANGE}.get(part, _ROWS_CHANGE)
