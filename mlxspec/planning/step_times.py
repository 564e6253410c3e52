"""What steps cost: wall time by number of rows, measured on the steps that run."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median

_KEPT = 64  # recent steps per number of rows: enough for a median, and a hot chip is noticed


@dataclass(frozen=True)
class StepTime:
    """T(rows) as measured.

    Attributes:
        rows: rows per forward.
        pipelined: whether the forward was dispatched during the step before, as in plain
            decoding; such a step has one row.
        steps: how many steps of this width ran.
        seconds: median wall time of the recent ones.
        cost: T(rows) / T(1), the verify cost, with T(1) pipelined if such a step has run; None
            while no step of one row has.
    """

    rows: int
    pipelined: bool
    steps: int
    seconds: float
    cost: float | None


class StepTimes:
    """T(rows): the wall time of whole steps by their number of rows.

    A whole step is proposing, forward, reading, acceptance and cache commit. Times hold for one
    model on one machine in one data type. Threads may record at once.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[int, bool], deque[float]] = {}
        self._steps: Counter[tuple[int, bool]] = Counter()
        self._lock = threading.Lock()

    def record(self, rows: int, seconds: float, pipelined: bool = False) -> None:
        """Add the wall time of one step."""
        with self._lock:
            self._recent.setdefault((rows, pipelined), deque(maxlen=_KEPT)).append(seconds)
            self._steps[rows, pipelined] += 1

    def table(self) -> list[StepTime]:
        """One entry per kind of step that has run, fewest rows first."""
        with self._lock:
            seconds = {kind: median(recent) for kind, recent in self._recent.items()}
            steps = self._steps.copy()
        one_row = seconds.get((1, True)) or seconds.get((1, False))
        return [
            StepTime(*kind, steps[kind], time, time / one_row if one_row else None)
            for kind, time in sorted(seconds.items())
        ]
