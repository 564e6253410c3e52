"""mlx-lm's prompt caches: borrowed from a caller, continued by a generation, and returned."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..errors import OptionError, PromptCacheError
from .caches import TreeKVCache, TreeQuantizedKVCache, WindowKVCache, parts
from .prompt_cache_file import check_fits
from .target import Target

_MLX_LM_CLASSES: dict[type, Any] = {
    TreeKVCache: KVCache,
    TreeQuantizedKVCache: QuantizedKVCache,
    WindowKVCache: RotatingKVCache,
}
_JUDGED = {*_MLX_LM_CLASSES.values(), ArraysCache}
"""Classes whose shapes after one token are known for any number of tokens."""


def lent_caches(prompt_cache: Sequence[Any], model: nn.Module) -> list[Any]:
    """A model's caches in a prompt cache; a draft model's caches may follow them.

    Args:
        prompt_cache: from ``mlx_lm.models.cache.make_prompt_cache``, empty or not.
        model: the model that will continue it.

    Raises:
        OptionError: the cache was made for a model with fewer layers.
        PromptCacheError: the cache holds another model's keys and values.
    """
    needed = len(make_prompt_cache(model))
    if len(prompt_cache) < needed:
        raise OptionError(
            f"prompt_cache has {len(prompt_cache)} caches and the model needs {needed}: make it "
            "with make_prompt_cache(model)"
        )
    lent = list(prompt_cache[:needed])
    if all(type(part) in _JUDGED and not part.empty() for part in parts(lent)):
        check_fits(lent, model, "prompt_cache")
    return lent


def as_mlx_lms(cache: Any) -> Any:
    """Convert a target's cache to mlx-lm's class; they share arrays."""
    if isinstance(cache, CacheList):
        return CacheList(*map(as_mlx_lms, cache.caches))
    if type(cache) not in _MLX_LM_CLASSES:
        return copy.copy(cache)  # since the target will restore its own
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    return _MLX_LM_CLASSES[type(cache)].from_state(state)


class Loan:
    """A caller's caches, which a generation continues and returns at its end.

    Until then a target has their arrays, since MLX writes into an array in place only if nothing
    else refers to it. A target's caches may also be ahead of the output that the caller has read.

    Args:
        caches: the caller's, from :func:`lent_caches`; untouched until :meth:`take`.
    """

    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches
        self._target: Target | None = None

    def take(self, new_target: Callable[[list[Any]], Target]) -> Target:
        """Borrow the caches; return a target that continues them.

        Args:
            new_target: called with caches of the same content.

        Raises:
            PromptCacheError: another generation has borrowed them.
        """
        held = [copy.copy(cache) for cache in self._caches]
        if any(isinstance(cache, _LentCache) for cache in held):
            raise PromptCacheError(_IN_USE)
        target = new_target(held)
        self._start, self._target = target.length, target
        for cache in self._caches:
            cache.__class__ = _LentCache
            vars(cache).clear()
        return target

    def give_back(self, context: Sequence[int], complete: bool = True) -> None:
        """Return the caches, unless they have been returned.

        Args:
            context: prompt and output that the consumer has read, without what the caches held
                before.
            complete: run the context's tokens that the target has not seen, instead of omitting
                them.
        """
        target = self._target
        if target is None:
            return
        with mx.stream(generation_stream):
            target.truncate(min(target.length, self._start + len(context)))
            target.flush_pending()
            if complete:
                target.prefill(context[target.length - self._start :])
            returned = [as_mlx_lms(cache) for cache in target.cache]
            mx.eval([part.state for part in parts(returned)])
        for lent, cache in zip(self._caches, returned, strict=True):
            lent.__class__ = type(cache)
            vars(lent).update(vars(cache))
        self._target = None


_IN_USE = (
    "prompt_cache is in use by another generation: use it once that generation has ended, or close "
    "the generation"
)


class _LentCache:
    """The class of a caller's cache while it is lent: any use is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for them, to copy an object
            raise AttributeError(name)
        raise PromptCacheError(_IN_USE)

    def __getitem__(self, index: int) -> Any:
        raise PromptCacheError(_IN_USE)
