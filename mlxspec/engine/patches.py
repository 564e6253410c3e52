"""The one place where mlx-lm is patched.

mlx-lm's layers take all rows of a forward for consecutive positions of one sequence. The rows of a
tree are not consecutive, and a joint forward has rows of several sequences. So some functions have
to look at what they are given first:

- RoPE modules rotate each row by a position of its own;
- ``scaled_dot_product_attention`` leaves attention to keys that have a method ``attend``;
- blocks with a recurrent state leave themselves to a state that has a method ``run_block``.

:func:`install` wraps these functions: the attention function in the modules that define a model's
layers, the others as ``__call__`` of their classes. It does so once, and they stay wrapped. The
wrappers do all this in forwards of :func:`forward_at` only. Any other forward, of whatever model
and in whatever thread, costs one look-up for each wrapped call.

``tests/engine/test_patches.py`` checks what this relies on in mlx-lm.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

_positions: ContextVar[mx.array | None] = ContextVar("positions", default=None)
"""Of the rows of the forward that is being run, (rows,)."""

_installed: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_wrappers: set[Callable[..., Any]] = set()


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
    """Wrap the functions of a model's layers that have to look at what they are given."""
    # Without a lock: of two threads that wrap a function at once, the later one's wrapper stays.
    if _installed.get(id(model)) is model:
        return
    kinds = {type(module) for module in model.modules()}
    for source in {kind.__module__ for kind in kinds}:
        names = vars(sys.modules[source])
        if names.get("scaled_dot_product_attention") is base.scaled_dot_product_attention:
            _wrap(sys.modules[source], "scaled_dot_product_attention", _attend)
    for rope in _rope_classes(model):
        _wrap(rope, "__call__", _rotate)
    if any(isinstance(cache, ArraysCache | CacheList) for cache in make_prompt_cache(model)):
        for kind in filter(_takes_a_cache, kinds):
            _wrap(kind, "__call__", _run_block)
    _installed[id(model)] = model


def _rope_classes(model: nn.Module) -> set[type]:
    return {
        type(child)
        for module in model.modules()
        for name, child in module.children().items()
        if isinstance(child, nn.Module)
        and "rope" in f"{name} {type(child).__name__}".lower()
        and len(child.modules()) == 1  # none that only has one inside
    }


def _takes_a_cache(kind: type) -> bool:
    call = kind.__call__
    return inspect.isfunction(call) and "cache" in inspect.signature(call).parameters


def _wrap(place: Any, name: str, instead: Callable[..., Any]) -> None:
    """Let a function of a class or a module be replaced in the forwards of :func:`forward_at`.

    Args:
        place, name: where it is found.
        instead: is called with the positions, the function, and the function's arguments.
    """
    function = getattr(place, name)
    if function in _wrappers:
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        positions = _positions.get()
        if positions is None:
            return function(*args, **kwargs)
        return instead(positions, function, *args, **kwargs)

    _wrappers.add(wrapper)  # first: an interrupt in between must not let it be wrapped again
    setattr(place, name, wrapper)


def _rotate(
    positions: mx.array,
    rope: Callable[..., mx.array],
    module: nn.Module,
    x: mx.array,
    offset: int | mx.array = 0,
    **kwargs: Any,
) -> mx.array:
    """Rotate each row by its own position; x: (1, heads, rows, head_dim)."""
    if not isinstance(offset, int) or offset != 0:
        positions = offset + positions
    if len(x) > 1:  # (rows, heads, 1, head_dim): rows of several sequences that are a batch already
        return rope(module, x, offset=positions, **kwargs)
    # mx.fast.rope takes one offset per batch entry, so the rows move onto the batch axis.
    rotated = rope(module, x.transpose(2, 1, 0, 3), offset=positions, **kwargs)
    return rotated.transpose(2, 1, 0, 3)


def _attend(
    _: mx.array,
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> mx.array:
    """Attention, or what the keys make of it."""
    if hasattr(keys, "attend"):
        return keys.attend(attention, queries, *args, **kwargs)
    return attention(queries, keys, *args, **kwargs)


def _run_block(_: mx.array, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block, or leave it to the state that it is given."""
    for argument in (*args[1:], *kwargs.values()):
        if hasattr(argument, "run_block"):
            return argument.run_block(block, args, kwargs)
    return block(*args, **kwargs)
