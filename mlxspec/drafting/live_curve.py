"""The verify cost at about one context length, corrected by every step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .cost_curve import CostCurve

WIDEST = 64
"""Rows up to which costs are predicted; wider steps pay on no chip whose costs are known."""

# Where these come from: docs/planner-notes.md, "Constants".
# Variances, all of natural logarithms of seconds. At first:
_MACHINE_VARIANCE = 0.3**2  # a machine's speed may change while nobody measures
_DRAFTED_VARIANCE = 0.14**2  # real drafts have to be proposed, and have other tokens than measured
_OWN_SHARE = 0.5  # of the variance of a measured time; drafted steps have the rest in common
_UNSEEN_VARIANCE = 0.11**2  # of a number of rows between two that were measured
# Of a change from step to step:
_MACHINE_CHANGE = 0.008**2
_DRAFTED_CHANGE = 0.002**2
_ROWS_CHANGE = 0.002**2
# Of the noise of one step:
_LEAST_NOISE, _FIRST_NOISE, _MOST_NOISE = 0.02**2, 0.07**2, 0.4**2

# What rows cost where nobody has measured it: the square root of their number, half-way between
# rows that cost nothing and rows that cost a plain step each; published curves lie around it
# (docs/planner-notes.md, "Costs that nobody knows"). The exponent's standard error reaches both.
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
# Steps in a row by which a lasting change is told from outliers; so many that a burst of another
# program's work does not count as one.
_LASTING = 8
_LOG_WIDEST = math.log(WIDEST)
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


@dataclass(slots=True)
class _Rows:
    """What is known of one number of rows.

    Attributes:
        value: logarithm of its cost beside what all drafted steps share.
        variance: of ``value``.
        power: what the shared exponent is multiplied by.
        assumed: whether it was neither measured nor run.
        in_curve: logarithm of its whole cost in the latest curve.
        latest: error of its latest step; None before the first.
        off: how many of its latest steps in a row were far off.
    """

    value: float
    variance: float
    power: float = 0.0
    assumed: bool = False
    in_curve: float = 0.0
    latest: float | None = None
    off: int = 0


class LiveCurve:
    """T(rows) at about one context length, corrected by every step.

    The logarithm of a step's time is modelled as a sum: the machine's speed now (the time of a
    plain step), what drafted steps have in common, and what this number of rows adds. A Kalman
    filter (Kalman 1960) corrects all of them by each step's time, the uncertain ones most. It
    keeps the covariances of what steps share: where a drafted step takes longer than predicted,
    the next plain steps tell whether the machine or the costs have changed. So a hot or busy
    machine changes the first and not the costs, which are ratios. What a number of rows adds has
    a variance of its own, and its first step settles most of it.

    Where wide steps were never measured, the curve begins with what rows usually cost: a power of
    their number whose exponent is shared, too, so one real step corrects them all.

    A step that is far off is ignored, until several in a row with as many rows are. Where all
    others were, too, it is the machine that has changed.

    What looks expensive is not drafted, and would never be corrected. So drafts are planned with
    the :attr:`hopeful` curve, and costs that no step has told of lately become uncertain.

    Args:
        known: measured times in any order, one of them of a plain step. However noisy they are,
            all that the curve says is finite.
    """

    def __init__(self, known: Iterable[KnownTime]) -> None:
        times = {time.rows: time.bounded for time in known if time.rows <= WIDEST}
        self._usual = plain = times.pop(1)
        # What steps share: the machine's speed, what drafted ones have in common, the exponent.
        self._shared = math.log(plain.seconds), 0.0, _USUAL_EXPONENT
        drafted = _DRAFTED_VARIANCE + plain.uncertainty**2
        # The upper triangle of their covariance matrix, row by row.
        self._covariance = _MACHINE_VARIANCE, 0.0, 0.0, drafted, 0.0, _EXPONENT_VARIANCE
        self._plain = _Rows(0.0, 0.0)
        self._rows = {
            rows: _Rows(math.log(time.seconds / plain.seconds), _OWN_SHARE * time.uncertainty**2)
            for rows, time in sorted(times.items())
        }
        self._measured = max(self._rows, default=1)
        if self._measured < _WIDE:
            for rows in _USUAL_ROWS:
                if rows > self._measured:
                    self._rows[rows] = self._unseen(rows)
        self._steps_since_doubt, self._widest_since_doubt, self._reach = 0, 1, _FIRST_REACH
        self._doubt, self._beyond = 0.0, WIDEST  # variance of the costs of more rows than these
        # Where plain steps scattered so much that T(1) is hardly known, others will scatter, too.
        self._noise = min(max(_FIRST_NOISE, plain.uncertainty**2), _MOST_NOISE)
        self._off = 0  # how many of the latest steps in a row were far off
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
        return math.exp(self._shared[0]) / self._usual.seconds

    @property
    def stddev(self) -> float:
        """Relative standard error that the costs of all drafted steps have in common.

        It becomes small only where both plain and drafted steps run.
        """
        return math.sqrt(max(self._covariance[3], 0.0))

    @property
    def noise(self) -> float:
        """Relative standard deviation of a step's time."""
        return math.sqrt(self._noise)

    def seconds(self, rows: int) -> float:
        """The wall time that a step over ``rows`` rows would take now."""
        return math.exp(self._shared[0]) * self.curve(rows)

    def record(self, rows: int, seconds: float) -> None:
        """Learn from a step over ``rows`` rows, 1 being a pipelined plain step."""
        if not 1 <= rows <= WIDEST or not STEP_SECONDS[0] <= seconds <= STEP_SECONDS[1]:
            return
        own = self._plain if rows == 1 else self._rows.get(rows)
        if own is None:
            own = self._rows[rows] = self._unseen(rows)
            own.in_curve = self._log_cost(own)
        error = math.log(seconds) - self._shared[0]
        mm, md, me, dd, de, ee = self._covariance
        mm += _MACHINE_CHANGE
        # Covariances of what steps share with the logarithm of this one's time, and its variance.
        if rows == 1:
            shared, variance = (mm, md, me), mm
        else:
            error -= self._log_cost(own)
            dd += _DRAFTED_CHANGE
            own.variance += _ROWS_CHANGE
            power = own.power
            shared = mm + md + power * me, md + dd + power * de, me + de + power * ee
            variance = shared[0] + shared[1] + power * shared[2]
        self._covariance = mm, md, me, dd, de, ee
        doubt = self._doubt if rows > self._beyond else 0.0
        # Rounding may leave a little less than nothing of what is known well.
        variance = max(variance, 0.0) + own.variance + doubt + self._noise
        if own.latest is not None:
            self._learn_noise(error - own.latest)
        own.latest = error
        if abs(error) > _OUTLIER * math.sqrt(variance):
            own.off += 1
            self._off += 1
            if own.off < _LASTING:
                return
            variance += _MACHINE_VARIANCE
            if self._off >= _LASTING:  # no other step was right: it is the machine
                self._covariance = mm + _MACHINE_VARIANCE, md, me, dd, de, ee
                shared = shared[0] + _MACHINE_VARIANCE, shared[1], shared[2]
            elif rows == 1:  # drafted steps were right: what they take remains, in other plain ones
                md, dd = md - _MACHINE_VARIANCE, dd + _MACHINE_VARIANCE
                self._covariance = mm + _MACHINE_VARIANCE, md, me, dd, de, ee
                shared = shared[0] + _MACHINE_VARIANCE, shared[1] - _MACHINE_VARIANCE, shared[2]
            else:
                own.variance += _MACHINE_VARIANCE
        own.off = self._off = 0
        self._correct(own, error, shared, doubt, variance)

    def ran(self, rows: int) -> None:
        """Take note of a step, recorded or not: costs of wider ones become doubtful."""
        self._widest_since_doubt = max(self._widest_since_doubt, rows)
        self._steps_since_doubt += 1
        if self._steps_since_doubt < _STEPS_PER_DOUBT:
            return
        self._doubt = min(self._doubt + _DOUBT_VARIANCE, _MOST_DOUBT)
        self._beyond = self._widest_since_doubt
        self._reach = max(_FIRST_REACH, 2 * self._widest_since_doubt)
        self._steps_since_doubt, self._widest_since_doubt = 0, 1
        self._stale = True

    def reopen(self) -> None:
        """Expect the machine's speed to have changed: no step was measured for some time."""
        machine, md, me, dd, de, ee = self._covariance
        self._covariance = max(machine, _MACHINE_VARIANCE), md, me, dd, de, ee

    def known(self, stddev: float = 0.0, *, assumed: bool = True) -> list[KnownTime]:
        """What is now known, as times at the machine's usual speed.

        Args:
            stddev: relative uncertainty to add, for use at another context length.
            assumed: whether what was neither measured nor told by a step counts, too.
        """
        exponent = max(self._covariance[5], 0.0)
        times = [KnownTime(1, self._usual.seconds, math.hypot(self.stddev, stddev))]
        for rows, own in sorted(self._rows.items()):
            if assumed or not own.assumed:
                cost = math.exp(self._log_cost(own))
                variance = own.variance + exponent * own.power**2
                uncertainty = math.sqrt(variance + stddev**2)
                times.append(KnownTime(rows, self._usual.seconds * cost, uncertainty))
        return times

    def _log_cost(self, own: _Rows) -> float:
        return self._shared[1] + own.value + self._shared[2] * own.power

    def _rebuild(self) -> None:
        """Make the curves of what is known now."""
        points, hopeful = [(1, 1.0)], [(1, 1.0)]
        for rows, own in sorted(self._rows.items()):
            value = own.in_curve = self._log_cost(own)
            points.append((rows, math.exp(value)))
            hopeful.append((rows, math.exp(value - self._hope(rows, own))))
        self._curve = _extended(points)
        self._hopeful = self._curve if hopeful == points else _extended(hopeful)
        self._in_curve = self._shared
        self._plain.in_curve = self._log_cost(self._plain)  # so that it shows no change
        self._stale = False

    def _hope(self, rows: int, own: _Rows) -> float:
        """By how much the logarithm of a cost may plausibly be too high."""
        if rows > self._reach:
            return 0.0
        _, _, _, drafted, both, exponent = self._covariance
        variance = own.variance + (self._doubt if rows > self._beyond else 0.0)
        variance += drafted + own.power * (2 * both + own.power * exponent)
        return _HOPE * max(math.sqrt(max(variance, 0.0)) - _USUAL_ERROR, 0.0)

    def _unseen(self, rows: int) -> _Rows:
        """What is expected of a number of rows that no step had."""
        if rows > self._measured and self._measured < _WIDE:
            last = self._rows.get(self._measured, self._plain)
            power = math.log(rows / self._measured)
            return _Rows(last.value, last.variance + _UNSEEN_VARIANCE, power, assumed=True)
        value = math.log(self.curve(rows)) - self._shared[1]
        variance = max((own.variance for own in self._rows.values()), default=0.0)
        return _Rows(value, variance + _UNSEEN_VARIANCE)

    def _learn_noise(self, difference: float) -> None:
        """Learn from the difference between two steps of as many rows; their cost cancels out."""
        squared = min(difference * difference / 2, _NOISE_CLIP * self._noise)
        noise = self._noise + _NOISE_RATE * (squared - self._noise)
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)

    def _correct(
        self,
        own: _Rows,
        error: float,
        shared: tuple[float, float, float],
        doubt: float,
        variance: float,
    ) -> None:
        """Spread an error over all that the step's time is the sum of, the uncertain ones first.

        Args:
            own: what is known of the step's rows.
            error: of the logarithm of its time.
            shared: covariance of each number that steps share with that logarithm.
            doubt: variance that the costs of all rows have in common that did not run lately.
            variance: of the logarithm, the step's noise included.
        """
        gain = error / variance
        (machine, drafted, exponent), (m, d, e) = self._shared, shared
        mm, md, me, dd, de, ee = self._covariance
        self._shared = machine + m * gain, drafted + d * gain, exponent + e * gain
        share_m, share_d, share_e = m / variance, d / variance, e / variance
        self._covariance = (
            mm - m * share_m,
            md - m * share_d,
            me - m * share_e,
            dd - d * share_d,
            de - d * share_e,
            ee - e * share_e,
        )
        own.value += own.variance * gain
        own.variance -= own.variance**2 / variance
        own.assumed = False
        if doubt:
            for rows, other in self._rows.items():
                if rows > self._beyond:
                    other.value += doubt * gain
            self._doubt -= doubt**2 / variance
            self._stale = True
        # The other costs have changed by what they share with this one.
        _, drafted, exponent = self._in_curve
        if (
            abs(self._log_cost(own) - own.in_curve) > _NOTICEABLE
            or abs(self._shared[1] - drafted) > _NOTICEABLE
            or abs(self._shared[2] - exponent) * _LOG_WIDEST > _NOTICEABLE
        ):
            self._stale = True


def _extended(points: list[tuple[int, float]]) -> CostCurve:
    """The curve through these points, and on to ``WIDEST`` rows."""
    rows = points[-1][0]
    if rows < WIDEST:
        # In proportion to the rows, as if each further block cost what the first one does: too
        # much where the curve is flat, and right on average where it has stairs.
        points = [*points, (WIDEST, max(cost for _, cost in points) * WIDEST / rows)]
    return CostCurve(points)
