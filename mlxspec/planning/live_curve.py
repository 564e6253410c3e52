"""The verify cost as the steps that run correct it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from .cost_curve import CostCurve

WIDEST = 64
"""Rows up to which costs are foreseen; on no chip whose costs are known do wider steps pay."""

# Variances, all of natural logarithms of seconds. Of a part at first:
_MACHINE = 0.3**2  # what a machine may have become while nobody measured
_DRAFTED = 0.05**2  # real drafts also take a proposal, and their tokens are other ones
_UNSEEN = 0.1**2  # of a number of rows between two that were measured
# Of a part's change from step to step:
_MACHINE_CHANGE = 0.03**2
_DRAFTED_CHANGE = 0.001**2
_ROWS_CHANGE = 0.002**2
# Of the noise of one step:
_LEAST_NOISE, _FIRST_NOISE, _MOST_NOISE = 0.02**2, 0.1**2, 0.4**2

_NOISE_RATE = 0.05
_NOISE_CLIP = 4.0  # variances
_OUTLIER = 4.0  # standard deviations
_RECENT = 7  # steps of each number of rows, among which outliers are told from changes
_NOTICEABLE = 0.02  # relative change of a cost that is worth a new curve


@dataclass(frozen=True)
class KnownTime:
    """T(rows) as far as it is known.

    Attributes:
        rows: rows of a step; 1 is a pipelined plain step.
        seconds: its wall time.
        uncertainty: relative standard error of ``seconds``.
    """

    rows: int
    seconds: float
    uncertainty: float


@dataclass
class _Part:
    """An estimated logarithm.

    Attributes:
        value: the estimate.
        variance: of its error.
        change: the variance of what it changes by from step to step.
        in_curve: the estimate when the curve was built.
    """

    value: float
    variance: float
    change: float
    in_curve: float = 0.0


class LiveCurve:
    """T(rows) at about one context length, corrected by every step.

    The logarithm of a step's time is taken as a sum: the machine's speed now (the time of a
    plain step), what drafted steps have in common, and what this number of rows adds. Where a
    step takes another time than foreseen, each part is corrected in proportion to how uncertain
    it is: a Kalman filter (Kalman 1960) without the covariances. So a hot or busy machine
    changes the first part and leaves the costs, which are ratios, alone, and a number of rows
    that was never measured is believed at once.

    A step that is far off is ignored, until most of the recent steps of as many rows are.

    Args:
        known: measured times, one of them of a plain step.
    """

    def __init__(self, known: Iterable[KnownTime]) -> None:
        times = {time.rows: time for time in known}
        self._usual = plain = times.pop(1)
        self._machine = _Part(math.log(plain.seconds), _MACHINE, _MACHINE_CHANGE)
        self._drafted = _Part(0.0, _DRAFTED + plain.uncertainty**2, _DRAFTED_CHANGE)
        self._by_rows = {
            rows: _Part(math.log(time.seconds / plain.seconds), time.uncertainty**2, _ROWS_CHANGE)
            for rows, time in times.items()
        }
        self._noise = _FIRST_NOISE
        self._step = 0
        # Per number of rows: errors of the recent steps, the last step that took the time
        # foreseen, and since which step they have not.
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
        return math.exp(self._machine.value) / self._usual.seconds

    def seconds(self, rows: int) -> float:
        """The wall time that a step over ``rows`` rows would take now."""
        return math.exp(self._machine.value) * self.curve(rows)

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a step over ``rows`` rows, 1 being a pipelined plain step."""
        if not 1 <= rows <= WIDEST or not 0 < seconds < math.inf:
            return
        parts = self._parts(rows)
        foreseen = variance = 0.0
        for part in parts:
            part.variance += part.change
            foreseen += part.value
            variance += part.variance
        error, variance = math.log(seconds) - foreseen, variance + self._noise
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
            variance += self._doubt(rows, parts)
        self._fitted[rows] = self._step
        self._off_since.pop(rows, None)
        self._correct(parts, error, variance)

    def reopen(self) -> None:
        """Expect the machine's speed to have changed, since time has passed unmeasured."""
        self._machine.variance = max(self._machine.variance, _MACHINE)

    def known(self, doubt: float = 0.0) -> list[KnownTime]:
        """What is known by now, in times of the machine's usual speed.

        Args:
            doubt: further relative uncertainty, for use at another context length.
        """
        times = [KnownTime(1, self._usual.seconds, math.hypot(self._usual.uncertainty, doubt))]
        for rows, own in sorted(self._by_rows.items()):
            cost = math.exp(self._drafted.value + own.value)
            uncertainty = math.sqrt(own.variance + doubt**2)
            times.append(KnownTime(rows, self._usual.seconds * cost, uncertainty))
        return times

    def _parts(self, rows: int) -> tuple[_Part, ...]:
        """What the logarithm of a step's time is the sum of."""
        if rows not in self._recent:
            self._recent[rows] = deque(maxlen=_RECENT)
        if rows == 1:
            return (self._machine,)
        if rows not in self._by_rows:
            variances = [own.variance for own in self._by_rows.values()]
            value = math.log(self.curve(rows)) - self._drafted.value
            variance = max(variances, default=0.0) + _UNSEEN
            self._by_rows[rows] = _Part(value, variance, _ROWS_CHANGE, in_curve=value)
        return self._machine, self._drafted, self._by_rows[rows]

    def _learn_noise(self, difference: float) -> None:
        """Learn from the difference between two steps of as many rows, however misjudged both."""
        squared = min(difference * difference / 2, _NOISE_CLIP * self._noise)
        noise = self._noise + _NOISE_RATE * (squared - self._noise)
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)

    def _doubt(self, rows: int, parts: tuple[_Part, ...]) -> float:
        """Make the part uncertain that is to blame for a time that has changed; by how much.

        Where steps of other rows still take the time foreseen, it is not the machine.
        """
        if any(step > self._off_since[rows] for step in self._fitted.values()):
            self._recent[rows].clear()
            blamed = parts[-1]
        else:
            self._recent.clear()  # these were errors against the former speed
            self._off_since.clear()
            blamed = self._machine
        blamed.variance += _MACHINE
        return _MACHINE

    def _correct(self, parts: tuple[_Part, ...], error: float, variance: float) -> None:
        """Spread an error over the parts, the uncertain ones first."""
        for part in parts:
            gain = part.variance / variance
            part.value += gain * error
            part.variance *= 1 - gain
            if part is not self._machine and abs(part.value - part.in_curve) > _NOTICEABLE:
                self._stale = True

    def _rebuild(self) -> None:
        points = [(1, 1.0)]
        for rows, own in sorted(self._by_rows.items()):
            # A costlier narrow step could be padded to a cheaper wide one, so costs never fall.
            points.append((rows, max(points[-1][1], math.exp(self._drafted.value + own.value))))
        rows, cost = points[-1]
        if rows < WIDEST:
            # As if each further block of rows cost what the measured ones do: too much where
            # the curve is flat, and on average right where it has stairs.
            points.append((WIDEST, cost * WIDEST / rows))
        self._curve = CostCurve(points)
        for part in (self._drafted, *self._by_rows.values()):
            part.in_curve = part.value
        self._stale = False
