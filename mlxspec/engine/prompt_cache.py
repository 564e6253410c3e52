"""mlx-lm's prompt caches: lent by a caller, continued by a generation, and given back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
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
from .caches import TreeKVCache, TreeQuantizedKVCache, parts
from .prompt_cache_file import check_fits
from .target import Target
from .window_cache import WindowKVCache

_MLX_LM_CLASSES: dict[type, Any] = {
    TreeKVCache: KVCache,
    TreeQuantizedKVCache: QuantizedKVCache,
    WindowKVCache: RotatingKVCache,
}
_lock = threading.RLock()
"""Held while caches change hands. One for all, and reentrant: a generation that is collected as
garbage gives its caches back wherever that happens, here included."""
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
    with _lock:
        # What an unfinished generation holds is looked at when another one takes it over.
        if any(type(cache) is _LentCache for cache in lent):
            return lent
        held = [copy.copy(cache) for cache in lent]
    # What a model's own kind of cache holds, its first token does not tell.
    if all(type(part) in _JUDGED and not part.empty() for part in parts(held)):
        check_fits(held, model, "prompt_cache")
    return lent


def as_mlx_lms(cache: Any) -> Any:
    """mlx-lm's cache with the content of a target's; the arrays are shared."""
    if isinstance(cache, CacheList):
        return CacheList(*map(as_mlx_lms, cache.caches))
    if type(cache) not in _MLX_LM_CLASSES:
        return cache
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    return _MLX_LM_CLASSES[type(cache)].from_state(state)


class _State(Enum):
    RUNNING = "its generation runs"
    PAUSED = "its generation waits for its consumer"
    RETURNING = "the caches are being given back"
    RETURNED = "the caches are the caller's again"


class Loan:
    """A caller's caches, which a generation continues until it gives them back.

    In mlx-lm a cache follows its generation: whenever a response has been taken, it holds the
    prompt and the output taken so far. A target's caches are one token behind, or several
    ahead, so while they are lent a stand-in is in the place of each. Whoever uses one, mlx-lm
    included, finds what mlx-lm would have left there at that moment; then the caches are the
    caller's again, and are lent anew when the generation goes on.

    Args:
        prompt_cache: the caller's list. Nothing is done with it until :meth:`take`.

    Attributes:
        end: ends the generation, before its caches are given to another one or back for good.
    """

    def __init__(self, prompt_cache: Sequence[Any]) -> None:
        self.end: Callable[[], None] | None = None
        self._caches = list(prompt_cache)
        self._state = _State.RETURNED
        self._target: Target | None = None
        self._context: Sequence[int] = ()
        self._given: list[Any] = []

    def take(self, new_target: Callable[[list[Any]], Target]) -> Target:
        """A target that continues the caches from now on.

        Whatever other generation has them must end: it fails if it is advanced.

        Args:
            new_target: called with caches that hold what the caller's do.

        Raises:
            PromptCacheError: a generation is running on them, in another thread.
        """
        with _lock:
            reclaim(self._caches)
            target = self._target = new_target([copy.copy(cache) for cache in self._caches])
            self._start = target.length
            self._caches = self._caches[: len(target.cache)]
            self._lend()
        return target

    def pause(self, context: Sequence[int]) -> None:
        """Let the caches be used, until :meth:`resume`. Does nothing if they have been returned.

        Args:
            context: prompt and output taken so far, what the caches held before left out.
        """
        if self._state is _State.RUNNING:
            self._context = context
            self._state = _State.PAUSED

    def resume(self) -> None:
        """Go on with the caches.

        Raises:
            PromptCacheError: they have been changed, or another generation has taken them.
        """
        with _lock:
            if self._state is _State.RETURNED:
                if self._target is None or not self._is_as_given():
                    raise PromptCacheError(
                        "prompt_cache has been continued or changed since this generation's last "
                        "response, which cannot go on: start another one"
                    )
                self._given = []
                self._lend()
            self._state = _State.RUNNING

    def give_back(self, context: Sequence[int], complete: bool = True) -> None:
        """End the generation, and let the caches hold what was taken of it, for good.

        Args:
            context: as for :meth:`pause`.
            complete: run what the target has not seen of it; if not, it is left out.
        """
        with _lock:
            end, self.end = self.end, None
            if end:
                end()
            if self._state in (_State.RUNNING, _State.PAUSED):
                self._context = context
                self._return(complete)
            if self._state is _State.RETURNED:
                self._target, self._given = None, []

    def reclaim(self, for_good: bool = False) -> None:
        """Return the caches to the caller, while the generation is paused.

        Args:
            for_good: the generation will not go on.

        Raises:
            PromptCacheError: it is running.
        """
        with _lock:
            if self._state in (_State.RUNNING, _State.RETURNING):
                raise PromptCacheError(
                    "prompt_cache is in use by a generation that is running: use it between two "
                    "responses, or when the generation has ended"
                )
            if for_good:
                self.give_back(self._context)
            elif self._state is _State.PAUSED:
                assert self._target is not None
                with self._target.undone_at_the_end():
                    self._return(complete=True)
                self._given = _contents(self._caches)

    def offset(self, place: int) -> int | None:
        """The offset that mlx-lm's cache would have now; None when it has that cache again."""
        target = self._target
        if target is None or self._state in (_State.RETURNING, _State.RETURNED):
            return None
        if self._state is _State.PAUSED:
            return self._start + len(self._context)
        return int(target.cache[place].offset)

    def kind(self, place: int) -> type:
        """The class that mlx-lm's cache would have now."""
        target = self._target
        kind = type(self._caches[place] if target is None else target.cache[place])
        return _MLX_LM_CLASSES.get(kind, kind)

    def _lend(self) -> None:
        """Put stand-ins in the place of the caches; their arrays are the target's alone.

        MLX writes into an array in place only if nobody else holds it. In between, a thread that
        looks finds either all that a cache needs or all that a stand-in does.
        """
        for place, cache in enumerate(self._caches):
            held = vars(cache)
            before = list(held)
            held.update(_loan=self, _place=place, _has_offset="offset" in held)
            cache.__class__ = _LentCache
            for name in before:
                del held[name]
        self._state = _State.RUNNING

    def _is_as_given(self) -> bool:
        """Whether nobody has changed the caches since they were returned."""
        if any(type(cache) is _LentCache for cache in self._caches):
            return False
        now = _contents(self._caches)
        return len(now) == len(self._given) and all(
            new is given if isinstance(new, mx.array) else new == given
            for new, given in zip(now, self._given, strict=True)
        )

    def _return(self, complete: bool) -> None:
        """Turn the stand-ins back into what the caller has lent."""
        target = self._target
        assert target is not None
        before, self._state = self._state, _State.RETURNING
        try:
            with mx.stream(generation_stream):
                target.truncate(min(target.length, self._start + len(self._context)))
                target.flush_pending()
                if complete:
                    target.prefill(self._context[target.length - self._start :])
                returned = [as_mlx_lms(cache) for cache in target.cache]
                mx.eval([part.state for part in parts(returned)])
            for stand_in, cache in zip(self._caches, returned, strict=True):
                if type(stand_in) is _LentCache:  # all, unless an interrupt came between
                    _turn_into(stand_in, cache)
        except BaseException:
            self._state = before  # whoever uses a stand-in next tries again
            raise
        self._state = _State.RETURNED


def reclaim(caches: Iterable[Any]) -> None:
    """Take over caches that unfinished generations hold; those cannot go on.

    Raises:
        PromptCacheError: one is running.
    """
    for cache in caches:
        if type(cache) is _LentCache and (loan := _held(cache).get("_loan")):
            loan.reclaim(for_good=True)


class _LentCache:
    """What a caller's cache is while it is lent: any use turns it into mlx-lm's cache again.

    Its class and its offset, which programs watch while they generate, are told without that.
    """

    def __getattribute__(self, name: str) -> Any:
        held = _held(self)
        loan, place = held.get("_loan"), held.get("_place")
        if loan is None or place is None:  # it has been turned back just now
            return getattr(self, name)
        if name == "__class__":
            return loan.kind(place)
        if name == "offset" and held.get("_has_offset"):
            offset = loan.offset(place)
            if offset is not None:
                return offset
        return getattr(_reclaimed(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_reclaimed(self), name, value)

    def __getitem__(self, index: Any) -> Any:
        return _reclaimed(self)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        _reclaimed(self)[index] = value

    def __copy__(self) -> Any:
        return copy.copy(_reclaimed(self))


def _held(stand_in: _LentCache) -> dict[str, Any]:
    held: dict[str, Any] = object.__getattribute__(stand_in, "__dict__")
    return held


def _reclaimed(stand_in: _LentCache) -> Any:
    """The same object, which is mlx-lm's cache again."""
    if loan := _held(stand_in).get("_loan"):
        loan.reclaim()
    return stand_in


def _turn_into(stand_in: _LentCache, cache: Any) -> None:
    """Make a stand-in a cache of this class and content."""
    held = _held(stand_in)
    held.update(vars(cache))
    object.__setattr__(stand_in, "__class__", type(cache))
    for name in ("_loan", "_place", "_has_offset"):
        del held[name]


def _contents(caches: Iterable[Any]) -> list[Any]:
    """The arrays and numbers that caches hold."""
    return [value for part in parts(caches) for _, value in tree_flatten(vars(part))]
