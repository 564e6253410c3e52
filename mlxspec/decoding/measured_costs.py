"""The costs of a model's steps: from the cache, or measured quickly at first use."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.nn as nn

from ..models.identity import machine_identity, model_identity
from ..planning.cost_cache import CostCache, CostKey, KnownRange, Ranges
from ..planning.live_costs import LiveCosts, context_range
from ..planning.live_curve import KnownTime
from ..planning.measurement import QUICK, Effort, RowsTime, ShareDone
from .calibration import calibrate

_STEPS_WORTH_SAVING = 32
_SECONDS_BETWEEN_SAVES = 30.0


def cost_key(model: nn.Module) -> CostKey:
    """What the step times of this model on this machine are kept under."""
    return CostKey(machine_identity(), model_identity(model))


def costs_for(
    model: nn.Module, *, cache: CostCache | None = None, on_progress: ShareDone | None = None
) -> KeptCosts:
    """What steps of a model cost on this machine.

    Args:
        model: an mlx-lm model.
        cache: where measured times are kept; the user's own by default.
        on_progress: told the share that is done while a first measurement runs, which takes
            less than 3 seconds.
    """
    cache = cache or CostCache()
    key = cost_key(model)
    ranges = cache.read(key)
    if not ranges:
        times = calibrate(model, QUICK, on_progress=on_progress)
        ranges = {context_range(QUICK.context): known_range(times, QUICK, "quick")}
        cache.update(key, ranges)
    return KeptCosts(cache, key, ranges)


def known_range(times: list[RowsTime], effort: Effort, source: str) -> KnownRange:
    """A measurement as the cache keeps it."""
    return KnownRange.now([time.known(effort.least_uncertainty) for time in times], source)


class KeptCosts(LiveCosts):
    """Costs whose corrections by real steps are kept for the next run.

    Args:
        cache: where they are kept.
        key: of the model on this machine.
        ranges: what was kept so far, at least one range.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        cache: CostCache,
        key: CostKey,
        ranges: Ranges,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__({end: known.times for end, known in ranges.items()})
        self._cache = cache
        self._key = key
        self._sources = {end: known.source for end, known in ranges.items()}
        self._clock = clock
        self._next_save = clock()

    def save(self) -> None:
        """Keep what was learned, if it is worth it and the last time is a while ago.

        To be called after each generation.
        """
        if self.unsaved_steps < _STEPS_WORTH_SAVING or self._clock() < self._next_save:
            return
        self._next_save = self._clock() + _SECONDS_BETWEEN_SAVES
        self._cache.update(
            self._key, {end: self._range(end, times) for end, times in self.changes().items()}
        )

    def _range(self, end: int, times: list[KnownTime]) -> KnownRange:
        return KnownRange.now(times, self._sources.get(end, "steps"))
