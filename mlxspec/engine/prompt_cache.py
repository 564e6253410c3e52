"""mlx-lm's prompt caches: lent by a caller, continued by a generation, and given back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

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
from .caches import TreeKVCache, TreeQuantizedKVCache, WindowKVCache, parts
from .prompt_cache_file import check_fits, check_lengths
from .target import Target

_MLX_LM_CLASSES: dict[type, Any] = {
    TreeKVCache: KVCache,
    TreeQuantizedKVCache: QuantizedKVCache,
    WindowKVCache: RotatingKVCache,
}
_JUDGED = {*_MLX_LM_CLASSES.values(), ArraysCache}
"""Classes whose content after one token shows what they hold after many."""

_lock = threading.RLock()
"""Held while caches change hands. One for all caches, and reentrant: a generation that is garbage
collected gives its caches back wherever the collector runs, in here too."""


def lent_caches(prompt_cache: Sequence[Any], model: nn.Module) -> list[Any]:
    """The caches of a prompt cache that a model takes; a draft model's may follow them.

    Args:
        prompt_cache: from ``mlx_lm.models.cache.make_prompt_cache``, empty or not.
        model: the model that will continue it.

    Raises:
        OptionError: the cache was made for a model with fewer layers.
        PromptCacheError: it holds keys and values of another model.
    """
    needed = len(make_prompt_cache(model))
    if len(prompt_cache) < needed:
        raise OptionError(
            f"prompt_cache has {len(prompt_cache)} caches and the model needs {needed}: make it "
            "with make_prompt_cache(model)"
        )
    lent = list(prompt_cache[:needed])
    with _lock:
        # Those of an unfinished generation are checked when this one takes them over.
        if any(type(cache) is _LentCache for cache in lent):
            return lent
        held = [copy.copy(cache) for cache in lent]
    _check_shapes(held, model)
    return lent


def _check_shapes(held: Sequence[Any], model: nn.Module) -> None:
    if all(type(part) in _JUDGED and not part.empty() for part in parts(held)):
        check_fits(held, model, "prompt_cache")


def as_mlx_lms(cache: Any) -> Any:
    """mlx-lm's cache with the content of a target's; the arrays are shared."""
    if isinstance(cache, CacheList):
        return CacheList(*map(as_mlx_lms, cache.caches))
    if type(cache) not in _MLX_LM_CLASSES:
        return copy.copy(cache)  # the target's own is restored to where the target stands
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    return _MLX_LM_CLASSES[type(cache)].from_state(state)


class Loan:
    """A caller's caches, which a generation continues until it gives them back.

    In mlx-lm a cache follows its generation: after each response it holds the prompt and the
    output so far. A target's caches are one token behind, or several ahead. So while caches are
    lent, the caller's objects are stand-ins. Any code that uses one, mlx-lm included, finds what
    mlx-lm would have left there at that moment: the target is brought to that point, the caches
    become the caller's again, and when the generation resumes it borrows them again.

    Args:
        caches: the caller's, from :func:`lent_caches`; untouched until :meth:`take`.
        model: the model that will continue them.

    Attributes:
        end: ends the generation, before its caches are given to another one or back for good.
    """

    def __init__(self, caches: list[Any], model: nn.Module) -> None:
        self.end: Callable[[], None] | None = None
        self._caches, self._model = caches, model
        self._state: Literal["running", "paused", "returning", "returned"] = "returned"
        self._target: Target | None = None
        self._context: Sequence[int] = ()
        self._given: list[Any] = []

    def take(self, new_target: Callable[[list[Any]], Target]) -> Target:
        """Borrow the caches; returns a target that continues them.

        Another generation that has them ends here: advancing it fails from now on.

        Args:
            new_target: called with caches that hold what the caller's do.

        Raises:
            PromptCacheError: a generation is running on them, in another thread, or they are
                another model's or damaged by now.
        """
        with _lock:
            reclaim(self._caches)
            held = [copy.copy(cache) for cache in self._caches]
            _check_shapes(held, self._model)
            check_lengths(held, "prompt_cache")
            target = self._target = new_target(held)
            self._start = target.length
            self._lend()
        return target

    def pause(self, context: Sequence[int]) -> None:
        """Let others use the caches until :meth:`resume`. Does nothing if they are back already.

        Args:
            context: prompt and output so far, without what the caches held before.
        """
        if self._state == "running":
            self._context = context
            self._state = "paused"

    def resume(self) -> None:
        """Resume with the caches; borrow them again if they have been used meanwhile.

        Raises:
            PromptCacheError: they have been changed, or another generation has taken them.
        """
        with _lock:
            if self._state == "returned":
                if self._target is None or not self._is_as_given():
                    raise PromptCacheError(
                        "prompt_cache has been continued or changed since this generation's last "
                        "response, which cannot go on: start another one"
                    )
                self._given = []
                self._lend()
            self._state = "running"

    def give_back(self, context: Sequence[int], complete: bool = True) -> None:
        """End the generation; from now on the caches hold what the consumer has taken of it.

        Args:
            context: as for :meth:`pause`.
            complete: run the tokens of it that the target has not seen; otherwise leave them out.
        """
        with _lock:
            end, self.end = self.end, None
            try:
                if end:
                    end()
            finally:
                if self._state in ("running", "paused"):
                    self._context = context
                    self._return(complete)
                if self._state == "returned":
                    self._target, self._given = None, []

    def reclaim(self, for_good: bool = False) -> None:
        """Return the caches to the caller while the generation is paused.

        Args:
            for_good: the generation is not to go on.

        Raises:
            PromptCacheError: it is running.
        """
        with _lock:
            if self._state in ("running", "returning"):
                raise PromptCacheError(
                    "prompt_cache is in use by a generation that is running: use it between two "
                    "responses, or when the generation has ended"
                )
            if for_good:
                self.give_back(self._context)
            elif self._state == "paused":
                assert self._target is not None
                with self._target.rolled_back():
                    self._return(complete=True)
                self._given = _contents(self._caches)

    def offset(self, place: int) -> int | None:
        """The offset that mlx-lm's cache would have now; None if it has none, or was returned."""
        target = self._target
        if target is None or self._state in ("returning", "returned"):
            return None
        own: int | None = getattr(target.cache[place], "offset", None)
        paused = own is not None and self._state == "paused"
        return self._start + len(self._context) if paused else own

    def kind(self, place: int) -> type:
        """The class that mlx-lm's cache would have now."""
        target = self._target
        if target is None:  # it is back, or another loan's by now, which knows
            return self._caches[place].__class__
        kind = type(target.cache[place])
        return _MLX_LM_CLASSES.get(kind, kind)

    def _lend(self) -> None:
        """Turn the caches into stand-ins, so that the target alone holds the arrays.

        MLX writes into an array in place only if nothing else holds it. A thread that looks
        meanwhile finds either all that a cache needs or all that a stand-in does.
        """
        self._state = "running"  # first, so that an interrupt returns them
        for place, cache in enumerate(self._caches):
            held = vars(cache)
            before = list(held)
            held.update(_loan=self, _place=place)
            cache.__class__ = _LentCache
            for name in before:
                del held[name]

    def _is_as_given(self) -> bool:
        """Whether the caches are unchanged since they were returned."""
        if any(type(cache) is _LentCache for cache in self._caches):
            return False
        now = _contents(self._caches)
        return len(now) == len(self._given) and all(
            new is given if isinstance(new, mx.array) else new == given
            for new, given in zip(now, self._given, strict=True)
        )

    def _return(self, complete: bool) -> None:
        """Turn the stand-ins back into mlx-lm's caches."""
        target = self._target
        assert target is not None
        before, self._state = self._state, "returning"
        try:
            with mx.stream(generation_stream):
                target.truncate(min(target.length, self._start + len(self._context)))
                target.flush_pending()
                if complete:
                    target.prefill(self._context[target.length - self._start :])
                returned = [as_mlx_lms(cache) for cache in target.cache]
                mx.eval([part.state for part in parts(returned)])
            for stand_in, cache in zip(self._caches, returned, strict=True):
                if "_loan" in _held(stand_in):  # all, unless an interrupt came between
                    _turn_into(stand_in, cache)
        except BaseException:
            self._state = before  # the next use of a stand-in tries again
            raise
        self._state = "returned"


def reclaim(caches: Iterable[Any]) -> None:
    """Take caches back from unfinished generations, which cannot go on then.

    Raises:
        PromptCacheError: one is running.
    """
    for cache in caches:
        if type(cache) is _LentCache and (loan := _held(cache).get("_loan")):
            loan.reclaim(for_good=True)


class _LentCache:
    """What a caller's cache is while it is lent: any use of it turns it into mlx-lm's cache again.

    Its class and its offset, which programs watch while they generate, are answered without that.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "offset":
            with _lock:  # it is neither returned nor lent again between two looks
                offset = _offset(self)
                return getattr(_reclaimed(self), name) if offset is None else offset
        if name == "__class__":
            return _kind(self)
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


def _offset(stand_in: _LentCache) -> int | None:
    held = _held(stand_in)
    loan = held.get("_loan")
    return None if loan is None else loan.offset(held["_place"])


def _kind(stand_in: _LentCache) -> type:
    held = _held(stand_in)
    loan, place = held.get("_loan"), held.get("_place")
    if loan is None or place is None:  # another thread has just turned it back
        return stand_in.__class__
    return loan.kind(place)


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
    del held["_loan"], held["_place"]


def _contents(caches: Iterable[Any]) -> list[Any]:
    """The arrays and numbers that caches hold."""
    return [value for part in parts(caches) for _, value in tree_flatten(vars(part))]
