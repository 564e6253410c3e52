"""Measures T(rows): plans steps within a time limit, and evaluates their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Literal

from .costs import STEP_SECONDS, KnownTime

ShareDone = Callable[[float], None]
"""Called with the fraction of a measurement that is done, from 0 to 1."""


@dataclass(frozen=True)
class MeasurementPlan:
    """How thoroughly to measure.

    Attributes:
        rows: the numbers of rows, the most informative first: if time runs out, the last are left
            out.
        rounds: how often to measure each.
        plain_tokens: consecutive plain steps per round.
        seconds: the time limit, prefill included. A step that would exceed it does not start.
        least_uncertainty: the relative error that repetition does not reveal.
        source: the ``source`` of the measured times.
    """

    rows: tuple[int, ...]
    rounds: int
    plain_tokens: int
    seconds: float
    least_uncertainty: float
    source: Literal["quick", "careful"]

    @property
    def tokens(self) -> int:
        """About how many tokens the steps emit, by which the context grows."""
        return self.rounds * (self.plain_tokens + len(self.rows) + 2) + len(self.rows)

    @property
    def room(self) -> int:
        """The positions after the context that the steps need, with the widest step at the end."""
        return self.tokens + max(self.rows, default=1)


# Costs bend where kernels change: published curves rise up to 8, 12 or 16 rows, and are flat from
# there to 32 (see chips.json). So both sides of the bend are measured before the rows in between.
# Kernels that read the weights once per five rows make costs jump after 5 and 10, which are
# measured before the next wider ones; others change after 13.
QUICK = MeasurementPlan(
    rows=(2, 4, 8, 16, 5, 6, 10, 12, 32),
    rounds=20,
    plain_tokens=5,
    seconds=1.8,
    least_uncertainty=0.08,
    source="quick",
)
# After a long context, in the rest of three seconds; other rows are derived from these.
QUICK_LONG = replace(QUICK, rows=(4, 8, 16), rounds=8, plain_tokens=3, seconds=1.1)
CAREFUL = MeasurementPlan(
    rows=(2, 4, 8, 16, 32, 5, 6, 10, 12, 3, 24, 64, 13, 7, 9, 14, 20, 28, 33, 40, 48),
    rounds=20,
    plain_tokens=6,
    seconds=30.0,
    least_uncertainty=0.02,
    source="careful",
)


# Where these come from: notes/planner.md, "Constants".
_FEW = 3  # steps; quartiles of fewer are meaningless
_ERROR_OF_ONE = 0.4  # or more, if plain steps scatter more

_CONFIDENCE = 1.96  # standard errors: half the width of a 95 % confidence interval
_MOST_ERROR = 0.25  # of a cost, for drafts to be chosen by it
_MOST_FALL = 2.0  # of the cost when rows are added; changing kernels make smaller falls
COST_PER_ROW = (0.2, 2.5)
"""T(M) lies between 0.2·T(1) and 2.5·M·T(1); other times were disturbed."""


def cost_errors(times: Sequence[KnownTime]) -> list[float]:
    """Half the relative widths of the 95 % confidence intervals of T(M)/T(1), shown after "±".

    Args:
        times: T(1) and other times.

    Returns:
        one for each time; 0 for T(1)/T(1).
    """
    plain, *others = (time.uncertainty for time in times)
    return [0.0, *(_CONFIDENCE * math.hypot(plain, other) for other in others)]


def noise(times: Sequence[KnownTime]) -> str | None:
    """A clause that says why a measurement cannot be used; None if it can.

    It is too noisy if half of the costs are known only to ± 25 % or worse, if more rows cost less
    than half as much as fewer rows, or if a row costs more than 2.5 plain steps. The first is not
    checked for times from only a few steps, unless plain steps scatter.

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
            f"the times scatter too much: half of the costs T(M)/T(1) are known to ±{error:.0%}"
            f" or worse, and more than ±{_MOST_ERROR:.0%} is not kept"
        )
    slowest = plain
    for time in others:
        falls = time.seconds * _MOST_FALL < slowest.seconds
        if falls or time.seconds > COST_PER_ROW[1] * time.rows * plain.seconds:
            other = slowest if falls else plain
            return (
                f"the times contradict each other: {other.rows} rows took "
                f"{other.seconds * 1e3:.3g} ms, and {time.rows} rows {time.seconds * 1e3:.3g} ms"
            )
        slowest = max(slowest, time, key=lambda one: one.seconds)
    return None


def is_whole(times: Sequence[KnownTime]) -> bool:
    """Whether times cover drafts: steps of 2 or 3 rows, of 4 to 7, and of 8 to 15."""
    return {2, 3, 4} <= {time.rows.bit_length() for time in times}


def measure(
    plain: Callable[[int], list[float]],
    drafted: Callable[[int], float],
    plan: MeasurementPlan,
    max_rows: int,
    started: float,
    clock: Callable[[], float],
    on_progress: ShareDone | None = None,
) -> list[KnownTime]:
    """Measure T(rows) in rounds over all numbers of rows, so that slow moments affect all alike.

    The first step of each number of rows warms up and does not count. Plain steps are measured
    even if the time is up.

    Args:
        plain: runs the given number of pipelined plain steps; returns the seconds of each.
        drafted: runs one whole drafted step of the given rows; returns its seconds.
        plan: what to run.
        max_rows: the most rows that a step may have.
        started: the time from which the limit counts.
        clock: returns the time in seconds.
        on_progress: called with the fraction done after every measurement.

    Returns:
        one entry per number of rows that was measured, fewest rows first.
    """
    widths = [rows for rows in plan.rows if rows <= max_rows]
    samples = {1: plain(1 if clock() > started + plan.seconds else plan.plain_tokens)}
    for done in range(plan.rounds * len(widths)):
        round_number, index = divmod(done, len(widths))
        # Alternately up and down, so that warming and cooling affect wide and narrow steps alike.
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
    """The predicted time of a step, from the measurements so far."""
    measured = max(known for known in samples if known <= rows)
    return min(samples[measured]) * rows / measured


def _summary(rows: int, times: list[float], spread: float) -> KnownTime:
    """T(rows), the lower quartile of ``times``, or the least of a few.

    The uncertainty of a few is at least ``spread``, how much plain steps scatter. Other programs
    only make steps longer: if they double every other step, the quartile is still the time of the
    others.
    """
    times = [max(STEP_SECONDS[0], seconds) for seconds in times]  # a coarse clock may return 0
    if len(times) < _FEW:
        error = max(_ERROR_OF_ONE, spread) / math.sqrt(len(times))
        return KnownTime(rows, min(times), error / _CONFIDENCE, len(times))
    low, _, _ = quantiles(times, n=4, method="inclusive")
    # The number of times below the true quartile is binomial, whatever their distribution. So the
    # quartile lies between two of the sorted times with a probability of 95 %. A few times
    # lengthened by other programs lie beyond both.
    ordered, mean = sorted(times), len(times) / 4
    reach = _CONFIDENCE * math.sqrt(mean * 3 / 4)
    first, last = max(1, round(mean - reach)), min(len(times), round(mean + reach))
    error = (ordered[last - 1] - ordered[first - 1]) / 2 / low
    return KnownTime(rows, low, error / _CONFIDENCE, len(times))
