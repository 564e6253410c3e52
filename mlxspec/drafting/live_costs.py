"""What steps cost now: one live curve per range of context lengths, and the sync overhead."""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from .cost_curve import USUAL_SYNC_OVERHEAD, CostCurve
from .live_curve import WIDEST, KnownTime, LiveCurve

# Where these come from: docs/planner-notes.md, "Constants".
_MOST = 0.5
_FIRST_VARIANCE = 0.1**2  # of the usual sync overhead, before anything was learned
_CHANGE = 0.005**2  # variance of its change from one run of plain steps to the next
_STEPS_NOISE = 6  # of a run's surplus: a step of about 2 T(1), a short one, and twice T(1) itself
_CLIP = 3.0  # standard deviations


class SyncOverhead:
    """What it costs to wait for a token, as a share of a pipelined plain step.

    It is learned from runs of plain steps. The first step of a run waits for its token and for a
    part of the second's forward; the last one finds its own forward nearly done. What the two
    take beyond 2 T(1) is a small difference of large times: where other programs disturb the
    steps, a single run says next to nothing. So each run counts as much as its noise allows (a
    Kalman filter of one number).
    """

    def __init__(self) -> None:
        self._mean, self._variance = USUAL_SYNC_OVERHEAD, _FIRST_VARIANCE

    @property
    def value(self) -> float:
        """From 0 to 0.5."""
        return min(max(self._mean, 0.0), _MOST)

    def learn(self, surplus: float, noise: float) -> None:
        """Learn from a run of plain steps.

        Args:
            surplus: by how many T(1) its first and last step together took longer than two
                pipelined ones.
            noise: relative standard deviation of a step's time.
        """
        variance = self._variance + _CHANGE
        of_surplus = variance + _STEPS_NOISE * noise * noise
        limit = _CLIP * math.sqrt(of_surplus)
        error = min(max(-limit, surplus - self._mean), limit)
        self._mean += variance / of_surplus * error
        self._variance = variance - variance / of_surplus * variance


_Costs = TypeVar("_Costs", bound="LiveCosts")

_SHORTEST_RANGE = 1024
_RANGE_FACTOR = 4
_PLAIN_STEPS_PER_LESSON = 8  # in a row; learning from each would slow them down
_MOST_STDDEV = 0.04  # that drafted steps' costs have in common, before plain steps are wanted
_OTHER_SEQUENCES = 0.15  # of a cost that was measured with another number of sequences
_OTHER_CONTEXT = 0.15  # relative uncertainty of a cost that was measured in another range


def context_range(context: int) -> int:
    """The end of the range that a context length falls in: 1024, 4096, 16384, and so on.

    The longer the context, the more time a step takes to read the KV cache. Within a factor of
    four that changes the curve by less than the steps correct at once, so one curve serves each
    range.
    """
    end = _SHORTEST_RANGE
    while context >= end:
        end *= _RANGE_FACTOR
    return end


class LiveCosts:
    """T(rows) at the current context length, corrected by every step.

    A range of context lengths that nobody has measured starts with what is known of the nearest
    one. Generations that run at the same time have each their own :meth:`for_generation`, and
    learn together.

    Args:
        known: per range, by its end as :func:`context_range` has it, the measured times; at
            least one range.

    Attributes:
        predicted: what the generation's steps should have taken so far, in plain steps; one
            without a draft is 1, whether it has waited for its token or not.
    """

    def __init__(self, known: Mapping[int, Iterable[KnownTime]]) -> None:
        self._lock = threading.RLock()
        self._curves = {end: LiveCurve(times) for end, times in known.items()}
        self._sync_overhead = SyncOverhead()
        self._unsaved: Counter[int] = Counter()  # steps by range
        self._joint: dict[int, LiveCosts] = {}
        self._enter(min(self._curves))
        self._begin_run()

    def for_generation(self: _Costs) -> _Costs:
        """The same costs, for one generation: with its context length and its runs of steps."""
        own = copy.copy(self)
        own._begin_run()
        return own

    def for_sequences(self, count: int) -> LiveCosts:
        """What joint steps of so many sequences cost, learned from them alone.

        One row there is a plain step of all sequences, each further row one of a draft. Until
        such steps have run, they are taken to cost what as many rows of one sequence do, and to
        wait as long for a token.
        """
        with self._lock:
            if count not in self._joint:
                known = {
                    end: _beside(curve.known(stddev=_OTHER_SEQUENCES), count)
                    for end, curve in self._curves.items()
                }
                self._joint[count] = self._begun_with(known, count)
                self._joint[count]._sync_overhead = copy.copy(self._sync_overhead)
            return self._joint[count].for_generation()

    def _begun_with(self, known: Mapping[int, list[KnownTime]], count: int) -> LiveCosts:
        """Costs of ``count`` sequences, of which nothing is known but what others' steps tell."""
        return LiveCosts(known)

    def end(self) -> None:
        """The generation has ended: nothing to do."""

    def _begin_run(self) -> None:
        """Forget the latest steps: each generation has runs of its own."""
        self.predicted = 0.0
        self._plain_steps = 0  # in a row
        # Seconds of the last run of plain steps: the one that waited, and the last pipelined one.
        self._last_waiting: float | None = None
        self._last_pipelined: float | None = None

    @property
    def unsaved_steps(self) -> int:
        """Steps recorded since the last :meth:`changes`."""
        with self._lock:
            return sum(self._unsaved.values())

    def move_to(self, context: int) -> None:
        """Tell how many positions the context has now; cheap enough for every step."""
        if not self._start <= context < self._end:
            self._enter(context_range(context))

    @property
    def curve(self) -> CostCurve:
        """T(rows)/T(1), as far as is known; the same object until a cost has changed noticeably."""
        with self._lock:
            return self._live.curve

    @property
    def hopeful(self) -> CostCurve:
        """What drafts are planned with; see :attr:`LiveCurve.hopeful`."""
        with self._lock:
            return self._live.hopeful

    def seconds(self, rows: int) -> float:
        """The wall time that a step over ``rows`` rows would take now."""
        with self._lock:
            return self._live.seconds(rows)

    @property
    def slowdown(self) -> float:
        """Time of a plain step now against the measured one; above 1 on a hot or busy machine."""
        return self._live.slowdown

    @property
    def sync_overhead(self) -> float:
        """What it costs if a plain step waits for its token, as a share of a pipelined one."""
        return self._sync_overhead.value

    @property
    def wants_plain_steps(self) -> bool:
        """Whether plain steps should run between drafted ones, to tell what drafts cost.

        Nothing else tells costs apart from the machine's speed. Where hardly any plain step runs,
        a T(1) that was measured on a busy machine would stay, and make all drafts look cheap.
        """
        return self._live.stddev > _MOST_STDDEV

    def record(self, rows: int, seconds: float, pipelined: bool) -> None:
        """Learn from a step.

        Plain steps tell T(1) only in the middle of a pipeline. The first and the last one tell
        the sync overhead; see :class:`SyncOverhead`.

        Args:
            rows: its rows.
            seconds: its wall time; of a pipelined one of a single sequence, what it would be
                without drafter.
            pipelined: whether its forward had been dispatched during the step before.
        """
        with self._lock:
            self.predicted += self.curve(rows)
            self._record(rows, seconds, pipelined)
            self._live.ran(rows)
            self._unsaved[self._end] += 1

    def _record(self, rows: int, seconds: float, pipelined: bool) -> None:
        before, self._last_pipelined = self._last_pipelined, seconds if pipelined else None
        if not pipelined:
            if self._last_waiting is not None:
                self._learn_sync_overhead(self._last_waiting, before)
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
        self._live.record(rows, seconds)

    def changes(self) -> dict[int, list[KnownTime]]:
        """What was measured or steps told, of the ranges in which steps ran since the last call."""
        with self._lock:
            changed = {end: self._curves[end].known(assumed=False) for end in sorted(self._unsaved)}
            self._unsaved.clear()
            return changed

    def _learn_sync_overhead(self, first: float, last: float | None) -> None:
        """Learn from a run of plain steps: the one that waited, and the last pipelined one."""
        steps, seconds = (1, first) if last is None else (2, first + last)
        self._sync_overhead.learn(seconds / self.seconds(1) - steps, self._live.noise)

    def _enter(self, end: int) -> None:
        with self._lock:
            if end not in self._curves:
                nearest = min(self._curves, key=lambda other: abs(math.log(other / end)))
                self._curves[end] = LiveCurve(
                    self._curves[nearest].known(stddev=_OTHER_CONTEXT, assumed=False)
                )
            self._live = self._curves[end]
            self._live.reopen()
        self._plain_steps = 0
        self._end = end
        self._start = end // _RANGE_FACTOR if end > _SHORTEST_RANGE else 0


def _beside(times: Iterable[KnownTime], count: int) -> list[KnownTime]:
    """Times of one sequence as those of ``count``, whose plain step has so many rows."""
    times = list(times)
    curve = CostCurve([(time.rows, time.seconds / times[0].seconds) for time in times])
    rows = [count, *(time.rows for time in times if time.rows > count), count + WIDEST - 1]

    def uncertainty(own: int) -> float:
        return max(time.uncertainty for time in times if time.rows <= own)

    return [
        KnownTime(own - count + 1, times[0].seconds * curve(own), uncertainty(own))
        for own in sorted(set(rows))
    ]
