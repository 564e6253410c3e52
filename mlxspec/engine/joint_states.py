"""Recurrent blocks in a joint forward.

A block's state goes from row to row, so the rows of several sequences cannot follow each other in
it. Those of sequences with equally many rows become a batch: :class:`JointStates` stands in for
the states of one layer, and the modules that use a state are made to look for it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache


class JointStates:
    """Stands in for the recurrent states of one layer during a joint forward.

    Args:
        members: per sequence its cache.
        spans: per sequence its rows; together they are all rows of the forward, in order.
    """

    def __init__(self, members: Sequence[ArraysCache], spans: Sequence[slice]) -> None:
        batches: dict[Any, list[int]] = {}
        for index, (member, span) in enumerate(zip(members, spans, strict=True)):
            begun = tuple(array is not None for array in member.cache)
            batches.setdefault((span.stop - span.start, begun), []).append(index)
        self._batches = [[members[index] for index in batch] for batch in batches.values()]
        rows = [
            [row for index in batch for row in range(spans[index].start, spans[index].stop)]
            for batch in batches.values()
        ]
        self._rows = [mx.array(each) for each in rows]
        self._n_rows = spans[-1].stop
        order = [row for each in rows for row in each]
        self._places = mx.array(sorted(range(len(order)), key=order.__getitem__))
        """Where each row stands among those of the batches, one batch after another."""

    def make_mask(self, N: int) -> None:
        """A batch has no padding to be hidden."""

    def run(self, block: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Call a block for each batch.

        Args:
            block: returns an array, or several.
            args, named: its arguments. One is this object; arrays of all rows, (1, rows, …), are
                divided, and others passed on.

        Returns:
            as the block, for all rows.
        """
        outputs = []
        for members, rows in zip(self._batches, self._rows, strict=True):
            states = _joined(members)
            own = functools.partial(self._of_batch, states, rows.reshape(len(members), -1))
            outputs.append(block(*map(own, args), **{name: own(named[name]) for name in named}))
            for place, member in enumerate(members):
                member.cache = [
                    None if array is None else array[place : place + 1] for array in states.cache
                ]
        if isinstance(outputs[0], mx.array):
            return self._gathered(outputs)
        return tuple(map(self._gathered, zip(*outputs, strict=True)))

    def _of_batch(self, states: ArraysCache, rows: mx.array, argument: Any) -> Any:
        """A block's argument for one batch.

        Args:
            states: of the batch.
            rows: (sequences, rows of each), among the rows of all.
            argument: as the block got it.
        """
        if argument is self:
            return states
        if isinstance(argument, mx.array) and argument.shape[:2] == (1, self._n_rows):
            return argument[0, rows]
        return argument

    def _gathered(self, outputs: Sequence[mx.array]) -> mx.array:
        """The rows of all, (1, rows, …), from the batches' (sequences, rows of each, …)."""
        rows = [output.reshape(-1, *output.shape[2:]) for output in outputs]
        return mx.concatenate(rows)[self._places][None]


def _joined(members: Sequence[ArraysCache]) -> ArraysCache:
    """The states of a batch, one after another along the first axis."""
    joined = ArraysCache(len(members[0].cache))
    joined.cache = [
        None if arrays[0] is None else mx.concatenate(list(arrays))
        for arrays in zip(*(member.cache for member in members), strict=True)
    ]
    return joined


def dispatch_states(model: nn.Module) -> None:
    """Let the modules of a model that use recurrent states look for :class:`JointStates`.

    They compute as before with any other cache, so other threads are not disturbed.
    """
    caches = make_prompt_cache(model)
    if not any(isinstance(cache, ArraysCache | CacheList) for cache in caches):
        return
    users: set[type] = set()
    # The graph is built to see who uses a state, and never evaluated.
    model(mx.array([[0]]), cache=[_watched(cache, users) for cache in caches])
    with _lock:
        for kind in users - _dispatched:
            setattr(kind, "__call__", _looking_for_states(kind.__call__))  # noqa: B010
            _dispatched.add(kind)


_lock = threading.Lock()
_dispatched: set[type] = set()


def _looking_for_states(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def looking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, JointStates):
                return argument.run(functools.partial(call, self), args, kwargs)
        return call(self, *args, **kwargs)

    return looking


class _WatchedState(ArraysCache):
    """Notes the classes of the modules that read it."""

    users: set[type]

    def __getitem__(self, index: int) -> Any:
        frame = inspect.currentframe()
        while frame and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        if frame:
            self.users.add(type(frame.f_locals["self"]))
        return super().__getitem__(index)


def _watched(cache: Any, users: set[type]) -> Any:
    """A new cache of the same kind, whose states note who uses them."""
    if isinstance(cache, CacheList):
        return CacheList(*(_watched(part, users) for part in cache.caches))
    if type(cache) is not ArraysCache:
        return cache
    watched = _WatchedState(len(cache.cache))
    watched.users = users
    return watched
