"""When a step goes without a draft, so that the time of a plain one is measured."""

from __future__ import annotations

_ROUND = 30
_PLAIN = range(12, 18)  # pipelined steps come in a row, and the first and last tell nothing


class PlainSteps:
    """Of every 30 steps in which plain ones are sought, six in a row go without a draft.

    All costs relate to the time of a plain step. Where every step has a draft, nothing tells
    it apart from the speed of the machine.

    Attributes:
        sought: whether plain steps are in need of measurement.
    """

    def __init__(self) -> None:
        self.sought = False
        self._steps = 0

    @property
    def due(self) -> bool:
        """Whether the next step shall be a plain one."""
        return self._steps % _ROUND in _PLAIN

    def count(self) -> None:
        """A step has run."""
        self._steps = self._steps + 1 if self.sought else 0
