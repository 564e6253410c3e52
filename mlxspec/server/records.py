"""What is known of all generations, and of those that have ended."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .errors import ApiError
from .events import Ended
from .metrics import Metrics, outcome_of
from .tickets import Batch, EventStream, Ticket

_log = logging.getLogger("mlxspec.server")

_RECENT = 12  # ended generations whose figures are kept


class Records:
    """The generations of all models; the worker's thread writes, others read.

    Args:
        on_end: called in the worker's thread with the tickets of each request, once all its
            generations have ended.

    Attributes:
        metrics: of all that has happened.
        tickets: of the generations that have not ended, in the order in which they came.
        recent: figures of those that have ended last, with when that was.
    """

    def __init__(self, on_end: Callable[[Sequence[Ticket]], object]) -> None:
        self.on_end = on_end
        self.metrics = Metrics()
        self.tickets: list[Ticket] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._outbox: list[Batch] = []

    def end(self, ticket: Ticket, ended: Ended | ApiError) -> None:
        """A generation has ended."""
        now = time.perf_counter()
        ticket.state, ticket.outcome = "ended", outcome_of(ended)
        ticket.error = ended if isinstance(ended, ApiError) else None
        self.recent.append(ticket.figures() | {"ended": now})
        self.tickets.remove(ticket)
        self.metrics.add_end(ended, now - ticket.asked)
        try:
            if all(one.state == "ended" for one in ticket.stream.tickets):
                self.on_end(ticket.stream.tickets)
        except Exception:  # such as a log that nobody reads any more
            _log.exception("the end of a generation could not be recorded")

    def tell(self, ticket: Ticket) -> None:
        """Let its client hear what has happened to a generation, at the turn's end."""
        if batch := ticket.hand_over():
            self._outbox.append((ticket, batch))

    def deliver(self) -> None:
        """A turn has ended: hand over all that is to be told."""
        outbox, self._outbox = self._outbox, []
        EventStream.deliver(outbox)
