"""Bar charts of speeds against plain decoding; ``templates/bars.html`` draws them as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_HEADROOM = 1.05


@dataclass(frozen=True)
class Bar:
    """One speed.

    Attributes:
        label: what has it.
        value: the speed, 1 for plain decoding; None where there is none to show.
        ticks: the speeds that it sums up.
        missing: what to write where there is no value.
        unreachable: what nothing can reach, shown beside what competes.
    """

    label: str
    value: float | None
    ticks: Sequence[float] = ()
    missing: str = "–"
    unreachable: bool = False


@dataclass(frozen=True)
class BarGroup:
    """Bars to be compared with each other."""

    title: str
    bars: Sequence[Bar]

    @property
    def best(self) -> float:
        """The highest speed, the unreachable left out."""
        values = (bar.value for bar in self.bars if not bar.unreachable)
        return max((value for value in values if value is not None), default=0.0)


@dataclass(frozen=True)
class BarChart:
    """Groups of bars on one scale.

    Attributes:
        groups: what is drawn.
        slow_below: the speed below which a bar is drawn as slower than plain decoding.
    """

    groups: Sequence[BarGroup]
    slow_below: float = 0.98

    def percent(self, value: float) -> float:
        """Where a speed stands on the scale, from 0 on the left to 100 on the right."""
        return round(100 * value / (self._highest * _HEADROOM), 2)

    @property
    def _highest(self) -> float:
        bars = [bar for group in self.groups for bar in group.bars]
        values = [value for bar in bars for value in (bar.value, *bar.ticks) if value is not None]
        return max([1.0, *values])
