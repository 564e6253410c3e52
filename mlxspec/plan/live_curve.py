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

    A step that is far off is ignored, until most of the recent steps with as many rows are.

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
        self._noise = _FIRST_NOISE
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
    def slowdown(self) -> float:
        """Time of a plain step now against the measured one; above 1 on a hot or busy machine."""
        return math.exp(self._parts[_MACHINE]) / self._usual.seconds

    @property
    def stddev(self) -> float:
        """Relative standard error that the costs of all drafted steps have in common.

        It becomes small only where both plain and drafted steps run.
        """
        return math.sqrt(max(self._covariance[_DRAFTED, _DRAFTED], 0.0))

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

    def reopen(self) -> None:
        """Expect the machine's speed to have changed: no step was measured for some time."""
        self._widen(_MACHINE, _MACHINE_VARIANCE - self._covariance[_MACHINE, _MACHINE])

    def known(self, stddev: float = 0.0) -> list[KnownTime]:
        """What is now known, as times at the machine's usual speed.

        Args:
            stddev: relative uncertainty to add, for use at another context length.
        """
        times = [KnownTime(1, self._usual.seconds, math.hypot(self.stddev, stddev))]
        for rows, part in sorted(self._part_of_rows.items()):
            cost = math.exp(self._parts[_DRAFTED] + self._parts[part])
            uncertainty = math.sqrt(max(self._covariance[part, part], 0.0) + stddev**2)
            times.append(KnownTime(rows, self._usual.seconds * cost, uncertainty))
        return times

    def _rebuild(self) -> None:
        """Make the curve of the parts as they are now."""
        points = [(1, 1.0)]
        for rows, part in sorted(self._part_of_rows.items()):
            points.append((rows, math.exp(self._parts[_DRAFTED] + self._parts[part])))
        rows = points[-1][0]
        if rows < WIDEST:
            # In proportion to the rows, as if each further block cost what the first one does:
            # too much where the curve is flat, and right on average where it has stairs.
            points.append((WIDEST, max(cost for _, cost in points) * WIDEST / rows))
        self._curve = CostCurve(points)
        self._in_curve = self._parts.copy()
        self._stale = False

    def _add_unseen(self, rows: int) -> None:
        """Add the part of a number of rows that no step had."""
        value = math.log(self.curve(rows)) - self._parts[_DRAFTED]
        known = sorted(self._part_of_rows)
        after = bisect(known, rows)
        left, right = known[after - 1 : after + 1] if 0 < after < len(known) else (1, WIDEST)
        if right > _NEAR * left:
            variance = max(self._covariance.diagonal()[_DRAFTED + 1 :], default=0.0)
            self._add_part(rows, value, variance + _UNSEEN_VARIANCE)
            return
        weights = np.array([right - rows, rows - left]) / (right - left)
        neighbours = [self._part_of_rows[left], self._part_of_rows[right]]
        shared = weights @ self._covariance[neighbours]
        variance = float(shared[neighbours] @ weights)
        self._add_part(rows, value, variance + _BETWEEN_VARIANCE, shared)

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


def _change(part: int) -> float:
    """The variance of a part's change from step to step."""
    return {_MACHINE: _MACHINE_CHANGE, _DRAFTED: _DRAFTED_CHANGE}.get(part, _ROWS_CHANGE)
