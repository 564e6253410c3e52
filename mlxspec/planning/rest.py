"""When a step is spared the search for a draft."""

from __future__ import annotations

from .cost_curve import CostCurve

_STEEP = 0.6  # of a plain step, that a row costs at least; published curves of Macs stay below 0.3
_PATIENCE = 8
_STEPS_PER_SEARCH = 4


class Rest:
    """Where rows are dear, drafts seldom pay, and to look for one in each step is felt.

    There, after eight steps without a draft only every fourth step looks for one.
    """

    def __init__(self) -> None:
        self._steps_without = 0

    def due(self, curve: CostCurve) -> bool:
        """Whether the next step shall look for no draft."""
        return (
            self._steps_without >= _PATIENCE
            and self._steps_without % _STEPS_PER_SEARCH != 0
            and curve.cheapest_rows[0] > _STEEP
        )

    def count(self, *, drafted: bool) -> None:
        """A step has run, for which a draft was found or not."""
        self._steps_without = 0 if drafted else self._steps_without + 1
