"""The one place where mlx-lm is patched.

mlx-lm's layers take the rows of a forward for consecutive positions of one sequence. The rows of a
tree are not consecutive, and a joint forward has rows of several sequences. Three kinds of
functions are wrapped for them:

- ``__call__`` of RoPE modules, to rotate each row by a position of its own;
- ``scaled_dot_product_attention`` in the modules that define layers, to call ``keys.attend`` if
  the keys have such a method (:class:`~mlxspec.engine.joint.JointCache`);
- ``__call__`` of the modules that take a cache, in models with recurrent states, to call
  ``run_block`` of an argument that has it (:class:`~mlxspec.engine.joint.JointStates`).

:func:`install` wraps them once for the whole process; nothing unwraps them. The wrappers act only
inside :func:`forward_at`. Elsewhere they call the wrapped function, at the cost of reading one
context variable: mlx-lm's own generation is not affected, not even with the same model in another
thread.

``tests/engine/test_patches.py`` checks the behaviour of mlx-lm that this relies on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

Function = Callable[..., Any]

_positions: ContextVar[mx.array | None] = ContextVar("positions", default=None)
"""Of the rows of the forward that is being run, (rows,)."""

_ATTENTION = "scaled_dot_product_attention"

_installed: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_wrappers: set[Function] = set()


def forward_at(
    model: Callable[..., mx.array], tokens: mx.array, caches: Sequence[Any], positions: mx.array
) -> mx.array:
    """Run a forward whose rows have positions of their own.

    Args:
        model: an mlx-lm model for which :func:`install` was called.
        tokens: (1, rows), or (rows, 1).
        caches: one a layer.
        positions: of each row, (rows,), relative to the caches' ``offset``.

    Returns:
        lazy logits, (1, rows, vocabulary) or (rows, 1, vocabulary).
    """
    # The positions are set in a copy of the context, so there is nothing to undo: not even an
    # interrupt between two lines leaves them to the next forward.
    context = copy_context()
    context.run(_positions.set, positions)
    return context.run(model, tokens, cache=caches)


def install(model: nn.Module) -> None:
    """Wrap the functions that a model's layers call, and the layers themselves, where needed."""
    if _installed.get(id(model)) is model:
        return
    # Without a lock: if two threads wrap the same function, the second wrapper replaces the first.
    layers: set[Any] = {type(module) for module in model.modules() if callable(module)}
    for kind in layers:
        names = inspect.unwrap(kind.__call__).__globals__
        if names.get(_ATTENTION) is base.scaled_dot_product_attention:
            names[_ATTENTION] = _wrapped(base.scaled_dot_product_attention, _attending)
    for kind in _rope_classes(model):
        kind.__call__ = _wrapped(kind.__call__, _rotating)
    if any(isinstance(cache, ArraysCache | CacheList) for cache in make_prompt_cache(model)):
        for kind in layers:
            if _has_parameter(kind.__call__, "cache"):
                kind.__call__ = _wrapped(kind.__call__, _running)
    _installed[id(model)] = model


def _rope_classes(model: nn.Module) -> set[Any]:
    """Of the children that have "rope" in their name, or in that of their class."""
    return {
        type(child)
        for module in model.modules()
        for name, child in module.children().items()
        if isinstance(child, nn.Module)
        and "rope" in f"{name} {type(child).__name__}".lower()
        and callable(child)
        and _has_parameter(type(child).__call__, "offset")
        and len(child.modules()) == 1  # none that only has one inside
    }


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _wrapped(function: Function, wrapper_of: Callable[[Function], Function]) -> Function:
    """A function in its wrapper; one that is a wrapper already is returned as it is."""
    if function not in _wrappers:
        function = functools.wraps(function)(wrapper_of(function))
        _wrappers.add(function)
    return function


# The wrappers name the arguments that callers always pass: packing them takes time.


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
        if len(x) > 1:  # (rows, heads, 1, head_dim): the rows are a batch already
            return rope(module, x, offset=positions, **kwargs)
        # mx.fast.rope takes one offset per batch entry, so the rows move onto the batch axis.
        rotated = rope(module, x.transpose(2, 1, 0, 3), offset=positions, **kwargs)
        return rotated.transpose(2, 1, 0, 3)

    return rotate


def _attending(attention: Function) -> Function:
    def attend(queries: mx.array, keys: Any, *args: Any, **kwargs: Any) -> mx.array:
        """Attention, computed by the keys if they do that themselves."""
        if _positions.get() is None or not hasattr(keys, "attend"):
            return attention(queries, keys, *args, **kwargs)
        return keys.attend(attention, queries, *args, **kwargs)

    return attend


def _running(block: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        """Run a block, or let the state among its arguments run it."""
        if _positions.get() is not None:
            for argument in (*args[1:], *kwargs.values()):
                if hasattr(argument, "run_block"):
                    return argument.run_block(block, args, kwargs)
        return block(*args, **kwargs)

    return run
