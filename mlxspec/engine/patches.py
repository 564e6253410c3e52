"""The one place where mlx-lm is patched.

mlx-lm's layers assume that the rows of a forward are consecutive positions of one sequence. The
rows of a tree are not consecutive, and a joint forward has rows of several sequences. Four kinds of
functions are wrapped for them:

- ``__call__`` of RoPE modules, to rotate each row by its own position;
- ``scaled_dot_product_attention`` in the modules that define layers, to call ``keys.attend`` if
  the keys have such a method (:class:`~mlxspec.engine.joint.JointCache`), and to split the rows of
  wide drafts (:func:`split_attention`);
- ``__call__`` of modules that take a cache, in models with recurrent states, to call the method
  ``run_block`` of an argument that has it (:class:`~mlxspec.engine.joint.JointStates`);
- the convolutions and recurrences of such models, to record their calls on a :class:`Tape`.

:func:`install` wraps them once for the whole process, and nothing unwraps them. The wrappers act
only inside :func:`forward_at`. Elsewhere they read a context variable and call the wrapped
function. So mlx-lm's own generation is not affected, even with the same model in another thread.

``tests/engine/test_patches.py`` checks the behaviour of mlx-lm that this relies on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

Function = Callable[..., Any]

# --- the tape ---
#
# A recurrent state cannot be trimmed, and to run the accepted tokens again would take another
# forward. Instead, a Tape keeps the inputs of a forward's short convolutions and recurrences. The
# states after the first n rows then take only a few small operations per layer: a convolution's
# state is a slice of its inputs, and a recurrence runs again over n rows. llama.cpp (#28123) and
# mlx-vlm (rollback_speculative_cache) undo rejected drafts in the same way.

RECURRENCES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "gated_delta_update": (("q", "k", "v", "a", "b"), 1, "state"),
    "ssm_update": (("hidden_states", "B", "C", "dt"), 1, "state"),
    "recurrent_gla": (("q", "k", "v"), 2, "h"),
}
"""mlx-lm's functions that return outputs and the state after the last row. For each, by its name:
the arguments that have an axis of rows, the index of this axis, and the argument with the state.
"""


_signature = functools.cache(inspect.signature)  # otherwise the slowest part of recording a call


_Call = tuple[Callable[[Any, int], bool], Callable[[int, int, slice], mx.array]]
"""Two functions of a recorded call. The first says whether the call led to a given state after a
number of rows. The second returns the state after the first ``rows`` of ``of`` rows, for a slice of
the batch.
"""


class Tape:
    """The calls of a forward that lead to recurrent states."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        """The calls that no state is assigned to yet, in order."""
        self._calls_of: dict[int, tuple[list[_Call], int, slice]] = {}
        """For each cache, by its id: the call that led to each of its states, the number of its
        rows, and its slice of the batch.
        """

    def note_convolution(self, inputs: mx.array) -> None:
        """Record a convolution by its inputs, (batch, kept + rows, channels). They begin with the
        state, (batch, kept, channels).
        """
        batch, length, channels = inputs.shape

        def led_to(state: Any, rows: int) -> bool:
            return state is not None and bool(state.shape == (batch, length - rows, channels))

        def state_after(rows: int, of: int, place: slice) -> mx.array:
            return mx.contiguous(inputs[place, rows : rows + length - of])

        self._calls.append((led_to, state_after))

    def note_recurrence(
        self, function: Function, arguments: dict[str, Any], returned: mx.array
    ) -> None:
        """Record a call of one of :data:`RECURRENCES`.

        Args:
            arguments: its arguments by name.
            returned: the state that it returned.
        """
        names, axis, name_of_state = RECURRENCES[function.__name__]
        before = arguments.get(name_of_state)

        def led_to(state: Any, rows: int) -> bool:
            return state is returned and arguments.get("mask") is None

        def state_after(rows: int, of: int, place: slice) -> mx.array:
            first = (place, *[slice(None)] * (axis - 1), slice(rows))
            changed = {name: arguments[name][first] for name in names}
            changed[name_of_state] = None if before is None else before[place]
            return function(**arguments | changed)[1]

        self._calls.append((led_to, state_after))

    def assign(self, states: Sequence[Any], members: Sequence[ArraysCache], rows: int) -> None:
        """Find the calls that led to the states of a layer.

        Args:
            states: the states after all rows.
            members: the caches of the sequences of the batch, in the order of the states' first
                axis.
            rows: the number of rows of each sequence.
        """
        calls: list[_Call] = []
        for state in states:
            call = next((call for call in self._calls if call[0](state, rows)), None)
            if call is None:
                return
            self._calls.remove(call)
            calls.append(call)
        for place, member in enumerate(members):
            self._calls_of[id(member)] = calls, rows, slice(place, place + 1)

    def states_after(self, rows: int, caches: Iterable[Any]) -> list[list[mx.array]] | None:
        """The states of recurrent layers after the first rows of a sequence.

        Args:
            rows: the number of these rows, at least 1.
            caches: the sequence's caches of recurrent layers.

        Returns:
            for each cache, its states, lazy; None if the tape lacks the call for some state.
        """
        states = []
        for cache in caches:
            if id(cache) not in self._calls_of:
                return None
            calls, of, place = self._calls_of[id(cache)]
            states.append([state_after(rows, of, place) for _, state_after in calls])
        return states


# --- the wrappers ---

_positions: ContextVar[mx.array | None] = ContextVar("positions", default=None)
"""The positions of the running forward's rows, (rows,); None outside :func:`forward_at`."""

_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)
"""The tape on which the calls of the running forward are recorded, if they are."""

_split_from: ContextVar[int | None] = ContextVar("split_from", default=None)
"""The number of keys from which the running forward splits its attention."""

_ATTENTION = "scaled_dot_product_attention"
_FUSED_ROWS = 8  # the limit of rows for MLX's fused attention
_FUSED_QUERIES = 32  # its limit of rows times heads that share keys

_installed: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_wrappers: set[Function] = set()


def forward_at(
    model: Callable[..., mx.array],
    tokens: mx.array,
    caches: Sequence[Any],
    positions: mx.array | None,
    tape: Tape | None = None,
    split_from: int | None = None,
) -> mx.array:
    """Run a forward whose rows have positions of their own, or whose calls are recorded.

    Args:
        model: an mlx-lm model for which :func:`install` was called.
        tokens: (1, rows), or (rows, 1).
        caches: one per layer.
        positions: the position of each row, (rows,), relative to the caches' ``offset``; None if
            they are consecutive.
        tape: records the forward's calls.
        split_from: the number of keys from which attention is split; None never splits it.

    Returns:
        lazy logits, (1, rows, vocabulary) or (rows, 1, vocabulary).
    """
    # The variables are set in a copy of the context, so nothing has to be reset: even after an
    # interrupt, the next forward does not see them.
    context = copy_context()
    context.run(_positions.set, positions)
    context.run(_tape.set, tape)
    context.run(_split_from.set, split_from)
    return context.run(model, tokens, cache=caches)


def split_attention(loaded: LoadedModel, least_keys: int | None) -> None:
    """Split the attention of wide drafts into several calls, to make it faster.

    MLX's fused attention for few rows is limited to 8 rows, and to 32 queries over the heads that
    share keys (mlx 0.32, ``scaled_dot_product_attention.cpp``). Wider drafts cannot use it, and
    take several times as long after a long context (mlx#3826). Calls within these limits give the
    same result, except for rounding. :func:`mlxspec.engine.calibration.calibrate` measures whether
    they are faster.

    Args:
        least_keys: the number of keys from which attention is split; None never splits it.
    """
    if least_keys is not None:
        install(loaded.model)
    loaded.split_from = least_keys


def install(model: nn.Module) -> None:
    """Wrap the layers of a model, and the functions that they call, where that is needed."""
    if _installed.get(id(model)) is model:
        return
    # No lock is needed: if two threads wrap a function, the second wrapper replaces the first.
    layers: set[Any] = {type(module) for module in model.modules() if callable(module)}
    for kind in layers:
        names = inspect.unwrap(kind.__call__).__globals__
        if names.get(_ATTENTION) is base.scaled_dot_product_attention:
            names[_ATTENTION] = _wrapped(base.scaled_dot_product_attention, _attending)
        for name in RECURRENCES.keys() & names.keys():
            names[name] = _wrapped(names[name], _recurring)
    for kind in _rope_classes(model):
        kind.__call__ = _wrapped(kind.__call__, _rotating)
    if any(isinstance(cache, ArraysCache | CacheList) for cache in make_prompt_cache(model)):
        for kind in layers:
            if _has_parameter(kind.__call__, "cache"):
                kind.__call__ = _wrapped(kind.__call__, _running)
        nn.Conv1d.__call__ = _wrapped(nn.Conv1d.__call__, _convolving)
    _installed[id(model)] = model


def _rope_classes(model: nn.Module) -> set[Any]:
    """The classes of submodules that have "rope" in their own name or their class's."""
    return {
        type(child)
        for module in model.modules()
        for name, child in module.children().items()
        if isinstance(child, nn.Module)
        and "rope" in f"{name} {type(child).__name__}".lower()
        and callable(child)
        and _has_parameter(type(child).__call__, "offset")
        and len(child.modules()) == 1  # not a module that contains a RoPE
    }


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _wrapped(function: Function, wrapper_of: Callable[[Function], Function]) -> Function:
    """Wrap a function; a function that is already a wrapper is returned unchanged."""
    if function not in _wrappers:
        function = functools.wraps(function)(wrapper_of(function))
        _wrappers.add(function)
    return function


# The wrappers name the arguments that every caller passes, since ``*args`` takes more time.


def _rotating(rope: Function) -> Function:
    def rotate(
        module: nn.Module, x: mx.array, offset: int | mx.array = 0, **kwargs: Any
    ) -> mx.array:
        """Rotate each row by its own position; x: (1, heads, rows, head_dim)."""
        positions = _positions.get()
        if positions is None:
            return rope(module, x, offset=offset, **kwargs)
        if not isinstance(offset, int) or offset != 0:
            positions = offset + positions
        if len(x) > 1:  # (rows, heads, 1, head_dim): the rows are already a batch
            return rope(module, x, offset=positions, **kwargs)
        # mx.fast.rope takes one offset per batch entry, so the rows move onto the batch axis.
        rotated = rope(module, x.transpose(2, 1, 0, 3), offset=positions, **kwargs)
        return rotated.transpose(2, 1, 0, 3)

    return rotate


def _attending(attention: Function) -> Function:
    def attend(queries: mx.array, keys: Any, *args: Any, **kwargs: Any) -> mx.array:
        """Compute attention, by ``keys.attend`` if it exists; split it if that is set."""
        least_keys = _split_from.get()
        run = attention if least_keys is None else functools.partial(_split, attention, least_keys)
        if _positions.get() is None or not hasattr(keys, "attend"):
            return run(queries, keys, *args, **kwargs)
        return keys.attend(run, queries, *args, **kwargs)

    return attend


def _split(
    attention: Function,
    least_keys: int,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute attention in calls of as many rows as the fused kernel allows.

    Attention to quantised keys, which are three arrays, is not split: no fused kernel reads them.

    Args:
        attention: mlx-lm's function; the arguments not listed are what it is called with.
        least_keys: the number of keys from which attention is split.
        queries: (batch, heads, rows, head_dim).
        keys, values: (batch, key heads, entries, head_dim); they end with those of the rows.
        mask: (…, rows or 1, entries), "causal", or None if all rows see all entries.
    """
    run = functools.partial(attention, cache=cache, scale=scale, sinks=sinks)
    rows, entries = queries.shape[2], keys.shape[2] if isinstance(keys, mx.array) else 0
    fused = entries >= max(least_keys, 1)
    width = min(_FUSED_ROWS, _FUSED_QUERIES * keys.shape[1] // queries.shape[1]) if fused else rows
    if not 0 < width < rows:
        return run(queries, keys, values, mask=mask)
    if isinstance(mask, mx.array):  # it may have a single row, for all rows
        mask = mx.broadcast_to(mask, (*mask.shape[:-2], rows, mask.shape[-1]))
    outputs = []
    for start in range(0, rows, width):
        end = min(start + width, rows)
        of_rows = mask[..., start:end, :] if isinstance(mask, mx.array) else mask
        # With a causal mask, a row sees the entries up to its own; an array covers all entries.
        seen = entries - rows + end if isinstance(mask, str) else entries
        outputs.append(
            run(queries[:, :, start:end], keys[:, :, :seen], values[:, :, :seen], mask=of_rows)
        )
    return mx.concatenate(outputs, axis=2)


def _running(block: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        """Run a block, or let an argument's ``run_block`` run it."""
        if _positions.get() is not None:
            for argument in (*args[1:], *kwargs.values()):
                if hasattr(argument, "run_block"):
                    return argument.run_block(block, args, kwargs)
        return block(*args, **kwargs)

    return run


def _convolving(convolution: Function) -> Function:
    def convolve(module: nn.Module, x: mx.array) -> mx.array:
        """Record the inputs of a convolution, (batch, length, channels)."""
        if tape := _tape.get():
            tape.note_convolution(x)
        return convolution(module, x)

    return convolve


def _recurring(recurrence: Function) -> Function:
    def recur(*args: Any, **kwargs: Any) -> Any:
        """Record the arguments of a recurrence, and the state that it returns."""
        outputs, state = recurrence(*args, **kwargs)
        if tape := _tape.get():
            arguments = _signature(recurrence).bind(*args, **kwargs).arguments
            tape.note_recurrence(recurrence, arguments, state)
        return outputs, state

    return recur


def finite(logits: mx.array) -> mx.array:
    """Logits that can be subtracted: infinite ones are replaced by 0."""
    return mx.where(mx.isinf(logits), 0, logits)
