"""Recomputes the states of recurrent layers after any row of a forward.

A recurrent state cannot be cut back, and running accepted tokens again takes rows through the whole
model. Instead, a :class:`Tape` keeps the inputs of a forward's short convolutions and recurrences.
The states after the first n rows then take a few small operations per layer: a convolution's state
is a slice of its inputs, and a recurrence runs again over n rows.

:mod:`mlxspec.engine.patches` reports the calls. llama.cpp (#28123) and mlx-vlm
(``rollback_speculative_cache``) undo rejected drafts in the same way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache


class _Arguments(NamedTuple):
    """The arguments of a recurrence that :class:`Tape` changes.

    Attributes:
        rows: the names of the arguments with an axis of rows.
        axis: that axis.
        state: the name of the state.
    """

    rows: tuple[str, ...]
    axis: int
    state: str


RECURRENCES = {
    "gated_delta_update": _Arguments(("q", "k", "v", "a", "b"), 1, "state"),
    "ssm_update": _Arguments(("hidden_states", "B", "C", "dt"), 1, "state"),
    "recurrent_gla": _Arguments(("q", "k", "v"), 2, "h"),
}
"""mlx-lm's functions, by name; they return outputs and the state after the last row."""


_signature = functools.cache(inspect.signature)  # the slowest part of recording a call


@dataclass(frozen=True, eq=False)
class Convolution:
    """A call of a convolution; its inputs, (batch, kept + rows, channels), begin with its state."""

    inputs: mx.array

    def state_after(self, rows: int, of: int, place: slice) -> mx.array:
        kept = self.inputs.shape[1] - of
        return mx.contiguous(self.inputs[place, rows : rows + kept])

    def leads_to(self, state: Any, rows: int) -> bool:
        batch, length, channels = self.inputs.shape
        shape = batch, length - rows, channels
        return state is not None and bool(state.shape == shape)


@dataclass(frozen=True, eq=False)
class Recurrence:
    """A call of one of :data:`RECURRENCES`: its arguments by name, and the state it returned."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    state: mx.array

    def state_after(self, rows: int, of: int, place: slice) -> mx.array:
        names, axis, state = RECURRENCES[self.function.__name__]
        before = self.arguments.get(state)
        changed = {state: None if before is None else before[place]}
        first = (place, *[slice(None)] * (axis - 1), slice(rows))
        changed |= {name: self.arguments[name][first] for name in names}
        return self.function(**self.arguments | changed)[1]

    def leads_to(self, state: Any, rows: int) -> bool:
        return state is self.state and self.arguments.get("mask") is None


class Tape:
    """The calls of a forward that lead to recurrent states.

    Attributes:
        calls: the calls that no state is assigned to yet, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Convolution | Recurrence] = []
        self._calls_of: dict[int, tuple[list[Convolution | Recurrence], int, slice]] = {}
        """By a cache's id: the call for each state, the number of rows, its slice of the batch."""

    def note_recurrence(
        self, function: Callable[..., Any], args: Any, kwargs: Any, state: mx.array
    ) -> None:
        """Record the call of a recurrence."""
        arguments = _signature(function).bind(*args, **kwargs).arguments
        self.calls.append(Recurrence(function, arguments, state))

    def assign(self, states: Sequence[Any], members: Sequence[ArraysCache], rows: int) -> None:
        """Find the calls that led to the states of a layer.

        Args:
            states: the states after all rows.
            members: the caches that hold the states, one for each entry of their first axis.
            rows: the number of rows of each member.
        """
        found: list[Convolution | Recurrence] = []
        for state in states:
            call = next((call for call in self.calls if call.leads_to(state, rows)), None)
            if call is None:
                return
            self.calls.remove(call)
            found.append(call)
        for place, member in enumerate(members):
            self._calls_of[id(member)] = found, rows, slice(place, place + 1)

    def states_after(self, rows: int, caches: Iterable[Any]) -> list[list[mx.array]] | None:
        """The states of recurrent layers after the first rows of a sequence, lazily.

        Args:
            rows: the number of rows, at least 1.
            caches: the sequence's caches of these layers.

        Returns:
            per cache, its states; None if the tape lacks a call for some state.
        """
        states = []
        for cache in caches:
            if id(cache) not in self._calls_of:
                return None
            calls, of, place = self._calls_of[id(cache)]
            states.append([call.state_after(rows, of, place) for call in calls])
        return states
