"""What is known of all generations, and of those that have ended."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .errors import ApiError
from .events import Ended, Event
from .metrics import Metrics, outcome_of
from .served_request import EventStream, ServedRequest

_log = logging.getLogger("mlxspec.server")

_RECENT = 12  # ended generations whose figures are kept


class Records:
    """The generations of all models; the worker's thread writes, others read.

    Args:
        on_end: called in the worker's thread with all requests of a client's body, once all its
            generations have ended.

    Attributes:
        metrics: of all that has happened.
        requests: that have not ended, in the order in which they came.
        recent: figures of those that have ended last, with when that was.
    """

    def __init__(self, on_end: Callable[[Sequence[ServedRequest]], object]) -> None:
        self.on_end = on_end
        self.metrics = Metrics()
        self.requests: list[ServedRequest] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._outbox: dict[ServedRequest, list[Event | ApiError]] = {}

    def tell(self, request: ServedRequest, event: Event | ApiError) -> None:
        """Let its client hear of an event at the end of the turn."""
        self._outbox.setdefault(request, []).append(event)

    def end(self, request: ServedRequest, ended: Ended | ApiError) -> None:
        """A request has ended."""
        now = time.perf_counter()
        request.outcome = outcome_of(ended)
        request.failure = ended if isinstance(ended, ApiError) else None
        self.tell(request, ended)
        self.recent.append(request.figures() | {"ended": now})
        self.requests.remove(request)
        self.metrics.add_end(ended, now - request.asked)
        try:
            if all(one.outcome for one in request.stream.requests):
                self.on_end(request.stream.requests)
        except Exception:  # such as a log that nobody reads any more
            _log.exception("the end of a generation could not be recorded")

    def deliver(self) -> None:
        """A turn has ended: hand over all that is to be told."""
        outbox, self._outbox = self._outbox, {}
        EventStream.deliver([*outbox.items()])
