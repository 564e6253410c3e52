"""mlx-lm's prompt caches: lent by a caller, continued by a generation, and given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

from ..errors import OptionError
from .kv_caches import TreeKVCache, TreeQuantizedKVCache
from .prompt_cache_file import check_fits
from .step_caches import TREE_CACHES, can_be_cut, for_steps, parts
from .target import Target
from .tier import Tier
from .window_cache import WindowKVCache

_MLX_LM_CLASSES = {
    TreeKVCache: KVCache,
    TreeQuantizedKVCache: QuantizedKVCache,
    WindowKVCache: RotatingKVCache,
}
_JUDGED = {*_MLX_LM_CLASSES.values(), ArraysCache}


def lent_caches(prompt_cache: Sequence[Any], own: Sequence[Any]) -> list[Any]:
    """The caches of a prompt cache that a model takes; a draft model's may follow them.

    Args:
        prompt_cache: from ``mlx_lm.models.cache.make_prompt_cache``, empty or not.
        own: what that function makes for the model.

    Raises:
        OptionError: the cache was made for a model with more layers.
    """
    if len(prompt_cache) < len(own):
        raise OptionError(
            f"prompt_cache has {len(prompt_cache)} caches and the model needs {len(own)}: make it "
            "with make_prompt_cache(model)"
        )
    return list(prompt_cache[: len(own)])


def fitting_caches(prompt_cache: Sequence[Any], model: nn.Module) -> list[Any]:
    """As :func:`lent_caches`, of caches that the model could have made.

    Raises:
        OptionError: the cache was made for a model with more layers.
        PromptCacheError: it holds keys and values of another model.
    """
    lent = lent_caches(prompt_cache, make_prompt_cache(model))
    # What a model's own kind of cache holds, its first token does not tell.
    if all(type(part) in _JUDGED and not part.empty() for part in parts(lent)):
        check_fits(lent, model, "prompt_cache")
    return lent


def tier_with(caches: Iterable[Any], tier: Tier) -> Tier:
    """What a model can verify on lent caches, which may be of another kind than its own.

    Args:
        caches: mlx-lm's.
        tier: the model's, with the caches that mlx-lm makes for it.
    """
    if tier not in (Tier.TREE, Tier.CHAIN):
        return tier
    found = parts(map(for_steps, caches))
    if not all(map(can_be_cut, found)):
        return Tier.REPLAY
    return tier if all(isinstance(cache, TREE_CACHES) for cache in found) else Tier.CHAIN


def as_mlx_lms(cache: Any) -> Any:
    """mlx-lm's cache with the content of a target's; the arrays are shared."""
    if isinstance(cache, CacheList):
        return CacheList(*map(as_mlx_lms, cache.caches))
    if type(cache) not in _MLX_LM_CLASSES:
        return cache
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    return _MLX_LM_CLASSES[type(cache)].from_state(state)


class Loan:
    """Caches that a target continues, until it gives them back.

    While they are lent they do not follow what the target does. Given back they hold what
    mlx-lm leaves in them: prompt and output, the output's last token included.

    Args:
        prompt_cache: the caller's list; what is quantised meanwhile is replaced in it.
        target: runs on its caches; not prefilled yet.
    """

    def __init__(self, prompt_cache: list[Any], target: Target) -> None:
        self._lent: list[Any] | None = prompt_cache
        self._target = target
        self._start = target.length

    def give_back(self, context: Sequence[int], complete: bool = True) -> None:
        """Let the caches hold the prompt and as much of the output as the caller has seen.

        Does nothing the second time.

        Args:
            context: prompt and output, what the caches held before left out.
            complete: run what the target has not seen of it; if not, it is left out.
        """
        if self._lent is None:
            return
        lent, self._lent = self._lent, None
        target = self._target
        with mx.stream(generation_stream):
            target.truncate(min(target.length, self._start + len(context)))
            target.commit()
            if complete:
                target.prefill(context[target.length - self._start :])
        for place, cache in enumerate(target.cache):
            returned = _returned(cache, lent[place])
            if returned is not lent[place]:  # a tuple will do, too, as long as nothing is replaced
                lent[place] = returned


def _returned(cache: Any, lent: Any) -> Any:
    """Put what a target's cache holds into the lent one, or into one that takes its place."""
    if cache is lent:
        return lent
    if isinstance(cache, CacheList):
        lent.caches = tuple(map(_returned, cache.caches, lent.caches))
        return lent
    mlx_lm_class = _MLX_LM_CLASSES[type(cache)]
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    if type(lent) is not mlx_lm_class:
        return mlx_lm_class.from_state(state)
    lent.state = state
    return lent
