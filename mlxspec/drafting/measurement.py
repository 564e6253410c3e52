"""Measures T(rows): runs steps within a time limit, and evaluates their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from .cost_file import Reliability, StepTime
from .time_filter import STEP_SECONDS


@dataclass(frozen=True)
class MeasurementPlan:
    """How thoroughly to measure.

    Attributes:
        rows: the numbers of rows to measure, the most informative first: if time runs out, the last
            are left out.
        rounds: how often to measure each number.
        plain_tokens: the number of consecutive plain steps per round.
        seconds: the time limit, prefill included. A step that would exceed it does not start.
        least_uncertainty: the least relative error of a time: repetition does not reveal all of it.
        source: the ``source`` of the measured times; see
            :class:`mlxspec.drafting.cost_file.Calibration`.
    """

    rows: tuple[int, ...]
    rounds: int
    plain_tokens: int
    seconds: float
    least_uncertainty: float
    source: Reliability

    @property
    def tokens(self) -> int:
        """About how many tokens the steps emit, that is, how much the context grows."""
        return self.rounds * (self.plain_tokens + len(self.rows) + 2) + len(self.rows)

    @property
    def room(self) -> int:
        """The number of positions after the context that the steps need, even if the last step is
        the widest.
        """
        return self.tokens + max(self.rows, default=1)


# Costs bend where MLX uses other kernels: published curves rise up to 8, 12 or 16 rows, and are
# flat from there to 32 (see chips.json). So both sides of the bend are measured before the rows in
# between. Some kernels read the weights once for every five rows, which makes costs jump after 5
# and 10 rows; others jump after 13. Both sides of these jumps are measured, too.
CAREFUL = MeasurementPlan(
    rows=(2, 4, 8, 16, 32, 5, 6, 10, 12, 3, 24, 64, 13, 7, 9, 14, 20, 28, 33, 40, 48),
    rounds=20,
    plain_tokens=6,
    seconds=30.0,
    least_uncertainty=0.02,
    source="careful",
)
# Used before a model's first generation, whose first token should not wait. The costs of drafts
# then begin with typical ones, which the first few drafted steps correct.
FIRST_USE = MeasurementPlan(
    rows=(), rounds=1, plain_tokens=3, seconds=0.5, least_uncertainty=0.1, source="steps"
)
# Used after a first long context. Other rows are derived from these.
FIRST_LONG_CONTEXT = MeasurementPlan(
    rows=(4, 8, 16), rounds=8, plain_tokens=3, seconds=1.1, least_uncertainty=0.08, source="quick"
)


# Where these come from: notes/planner.md, "Constants".
_FEW = 3  # steps; quartiles of fewer mean nothing
_ERROR_OF_ONE = 0.4  # the relative error of a single time, or more if plain steps scatter more

_CONFIDENCE = 1.96  # standard errors: half the width of a 95 % confidence interval
_MOST_ERROR = 0.25  # the largest relative error of a cost by which drafts can be chosen
_MOST_FALL = 2.0  # the factor by which a cost may fall when rows are added; kernels cause less
_MOST_COST_PER_ROW = 2.5  # plain steps; a time that shows more was disturbed


def cost_errors(times: Sequence[StepTime]) -> list[float]:
    """The relative errors of T(M)/T(1) to show after "±": half the widths of the 95 % intervals.

    Args:
        times: T(1), then other times.

    Returns:
        an error for each time; 0 for T(1)/T(1).
    """
    plain, *others = (time.uncertainty for time in times)
    return [0.0, *(_CONFIDENCE * math.hypot(plain, other) for other in others)]


def noise(times: Sequence[StepTime]) -> str | None:
    """A clause that says why a measurement cannot be used; None if it can.

    It cannot be used if half of the costs are known only to ± 25 % or worse, if some rows cost less
    than half as much as fewer rows, or if a row costs more than 2.5 plain steps. Costs from only a
    few steps do not count for the first condition, unless plain steps scatter.

    Args:
        times: from :func:`measure`.
    """
    plain, *others = times
    often = [
        time
        for time in others
        if min(time.steps, plain.steps) >= _FEW
        or _CONFIDENCE * time.uncertainty * math.sqrt(time.steps) > _ERROR_OF_ONE
    ]
    error = median(cost_errors([plain, *often])[1:] or [0.0])
    if error > _MOST_ERROR:
        return (
            "the times scatter too much: half of the costs T(M)/T(1) are known only to "
            f"±{error:.0%} or worse, and the limit is ±{_MOST_ERROR:.0%}"
        )
    slowest = plain
    for time in others:
        falls = time.seconds * _MOST_FALL < slowest.seconds
        if falls or time.seconds > _MOST_COST_PER_ROW * time.rows * plain.seconds:
            other = slowest if falls else plain
            return (
                f"the times contradict each other: {other.rows} rows took "
                f"{other.seconds * 1e3:.3g} ms, and {time.rows} rows {time.seconds * 1e3:.3g} ms"
            )
        slowest = max(slowest, time, key=lambda step_time: step_time.seconds)
    return None


def measure(
    plain: Callable[[int], list[float]],
    drafted: Callable[[int], float],
    plan: MeasurementPlan,
    max_rows: int,
    started: float,
    clock: Callable[[], float],
    on_progress: Callable[[float], None] | None = None,
) -> list[StepTime]:
    """Measure T(rows) in rounds over all numbers of rows, so that slow moments affect all equally.

    The first step of each number of rows warms up and does not count. Plain steps are measured
    even if the time limit has passed.

    Args:
        plain: runs the given number of pipelined plain steps, and returns the seconds of each.
        drafted: runs a whole drafted step of the given number of rows, and returns its seconds.
        plan: what to measure.
        max_rows: the most rows that a step may have.
        started: the time from which the limit counts.
        clock: returns the time in seconds.
        on_progress: called with the fraction done after every measurement.

    Returns:
        a time for each number of rows that was measured, the fewest rows first.
    """
    widths = [rows for rows in plan.rows if rows <= max_rows]
    samples = {1: plain(1 if clock() > started + plan.seconds else plan.plain_tokens)}
    for done in range(plan.rounds * len(widths)):
        round_number, index = divmod(done, len(widths))
        # Every other round runs in reverse, so that heat affects wide and narrow steps equally.
        rows = widths[index] if round_number % 2 == 0 else widths[-1 - index]
        left = started + plan.seconds - clock()
        if index == 0 and round_number and _predicted(samples, 1) * plan.plain_tokens <= left:
            samples[1] += plain(plan.plain_tokens)
        if rows not in samples and 2 * _predicted(samples, rows) <= left:
            drafted(rows)
            samples[rows] = [drafted(rows)]
        elif rows in samples and _predicted(samples, rows) <= left:
            samples[rows].append(drafted(rows))
        if on_progress:
            on_progress((done + 1) / (plan.rounds * len(widths)))
    spread = max(samples[1]) / max(min(samples[1]), STEP_SECONDS[0]) - 1
    times = [_summary(rows, samples[rows], spread) for rows in sorted(samples)]
    least = plan.least_uncertainty
    return [replace(time, uncertainty=max(time.uncertainty, least)) for time in times]


def _predicted(samples: dict[int, list[float]], rows: int) -> float:
    """The seconds of a step as predicted from the measurements so far."""
    measured = max(known for known in samples if known <= rows)
    return min(samples[measured]) * rows / measured


def _summary(rows: int, seconds: list[float], spread: float) -> StepTime:
    """T(rows): the lower quartile of ``seconds``, or their minimum if there are only a few.

    Other programs can only make steps longer. If they delay every other step, the quartile is still
    the time of an undisturbed one.

    Args:
        rows: the number of rows.
        seconds: the measured times.
        spread: the relative scatter of plain steps; if there are only a few times, a single one is
            at least this uncertain.
    """
    seconds = [max(STEP_SECONDS[0], s) for s in seconds]  # a coarse clock may return 0
    if len(seconds) < _FEW:
        error = max(_ERROR_OF_ONE, spread) / math.sqrt(len(seconds))
        return StepTime(rows, min(seconds), error / _CONFIDENCE, len(seconds))
    low, _, _ = quantiles(seconds, n=4, method="inclusive")
    # The number of times below the true quartile has a binomial distribution, whatever that of the
    # times. So the quartile is between two of the sorted times with a probability of 95 %. A few
    # times that other programs have lengthened are beyond both.
    ordered, mean = sorted(seconds), len(seconds) / 4
    reach = _CONFIDENCE * math.sqrt(mean * 3 / 4)
    first, last = max(1, round(mean - reach)), min(len(seconds), round(mean + reach))
    error = (ordered[last - 1] - ordered[first - 1]) / 2 / low
    return StepTime(rows, low, error / _CONFIDENCE, len(seconds))
