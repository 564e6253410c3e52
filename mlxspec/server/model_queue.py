"""The requests to one served model: an engine that admits them by memory and shared prefixes."""

from __future__ import annotations

import logging

from ..generation.engine import Engine
from ..generation.options import GenerationOptions
from ..generation.request import Request, State
from .served_model import ServedModel
from .served_request import Records, ServedRequest

_log = logging.getLogger("mlxspec.server")

_MOST_UNREAD = 64  # tokens that a slow reader may leave unread before its generation waits


class ModelQueue(Engine):
    """Runs the requests to one model; used in the worker's thread alone.

    Args:
        served: the model.
        active: how many generations run at once at most.
        stall: seconds for which running ones may wait for others' prompts.
        records: of all requests.
    """

    def __init__(self, served: ServedModel, active: int, stall: float, records: Records) -> None:
        super().__init__(served.decoder, max_active=active, stall=stall, max_unread=_MOST_UNREAD)
        self._served = served
        self._records = records

    def warm_up(self) -> None:
        """Find out what the model verifies and what steps cost, before the first request."""
        decoder = self._served.decoder
        make_drafter = self._served.make_drafter((), self._served.owner)
        decoder.remembers = False  # nobody has asked for these
        for prompt in ([1, 1], [1, 1, 1]):
            self.add(decoder.new_request(prompt, 8, GenerationOptions(), make_drafter))
        while super().turn():
            pass
        decoder.remembers = True

    @property
    def decoding(self) -> bool:
        """Whether there are generations that wait for each step."""
        return bool(self._in(State.DECODE))

    def turn(self, hurried: bool = False) -> bool:
        """As :meth:`Engine.turn`; a fault in it ends all requests."""
        steps = self.steps
        try:
            busy = super().turn(hurried)
        except Exception as error:
            _log.exception("a turn has failed")
            self.close(error)
            return False
        if self.steps > steps:
            self._records.metrics.add_forward(self.step_seconds, *self.step_shape)
        return busy

    def next_waiting(self) -> Request | None:
        """The first in the queue if its caches fit beside those that run.

        One whose prompt begins with what another one is about to run lets others pass, and finds
        it in the cache later.
        """
        for request in self._waiting:
            if not isinstance(request, ServedRequest):  # one to warm up with
                return request
            if self._held + request.nbytes > self._served.memory.limit:
                return None
            if not self._served.cache.worth_waiting(request.prompt, request.partition):
                return request
        return None

    def start(self, request: Request) -> None:
        """Start a request, for whose caches idle ones make room."""
        cache = self._served.cache
        cache.make_room(cache.nbytes + self._held - self._served.memory.limit)
        super().start(request)

    @property
    def _held(self) -> int:
        """Bytes that running generations may come to take."""
        return sum(one.nbytes for one in self._running if isinstance(one, ServedRequest))
