"""mlx-lm's prompt caches: borrowed from a caller, continued by a generation, and returned."""

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

from ..errors import FileError, OptionError
from .caches import TreeKVCache, TreeQuantizedKVCache, WindowKVCache, parts
from .prompt_cache_file import check_fits, check_lengths
from .target import Target

_MLX_LM_CLASSES: dict[type, Any] = {
    TreeKVCache: KVCache,
    TreeQuantizedKVCache: QuantizedKVCache,
    WindowKVCache: RotatingKVCache,
}
_JUDGED = {*_MLX_LM_CLASSES.values(), ArraysCache}
"""Classes whose shapes after one token are known for any number of tokens."""

_lock = threading.RLock()
"""Held while caches are borrowed or returned. There is one for all caches, and it is reentrant: a
garbage-collected generation returns its caches wherever the collector runs, here too."""


def lent_caches(prompt_cache: Sequence[Any], model: nn.Module) -> list[Any]:
    """A model's caches in a prompt cache; a draft model's caches may follow them.

    Args:
        prompt_cache: from ``mlx_lm.models.cache.make_prompt_cache``, empty or not.
        model: the model that will continue it.

    Raises:
        OptionError: the cache was made for a model with fewer layers.
        FileError: the cache holds another model's keys and values.
    """
    needed = len(make_prompt_cache(model))
    if len(prompt_cache) < needed:
        raise OptionError(
            f"prompt_cache has {len(prompt_cache)} caches and the model needs {needed}: make it "
            "with make_prompt_cache(model)"
        )
    lent = list(prompt_cache[:needed])
    with _lock:
        # An unfinished generation's caches are checked when this generation takes them over.
        if any(type(cache) is _LentCache for cache in lent):
            return lent
        held = [copy.copy(cache) for cache in lent]
    _check_shapes(held, model)
    return lent


def _check_shapes(held: Sequence[Any], model: nn.Module) -> None:
    if all(type(part) in _JUDGED and not part.empty() for part in parts(held)):
        check_fits(held, model, "prompt_cache")


def as_mlx_lms(cache: Any) -> Any:
    """Convert a target's cache to mlx-lm's class; they share arrays."""
    if isinstance(cache, CacheList):
        return CacheList(*map(as_mlx_lms, cache.caches))
    if type(cache) not in _MLX_LM_CLASSES:
        return copy.copy(cache)  # since the target will restore its own
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    return _MLX_LM_CLASSES[type(cache)].from_state(state)


class Loan:
    """A caller's caches, which a generation continues and then returns.

    In mlx-lm a cache follows its generation: after each response it holds the prompt and the
    output so far. A target's caches are one token behind, or several ahead. So while caches are
    borrowed, the caller's objects are stand-ins. Any use of one returns the caches first, with the
    content that mlx-lm's would have at that moment. When the generation resumes, it borrows them
    again.

    Args:
        caches: the caller's, from :func:`lent_caches`; untouched until :meth:`take`.
        model: the model that will continue them.

    Attributes:
        end: ends the generation, before its caches go to another one or are returned for good.
    """

    def __init__(self, caches: list[Any], model: nn.Module) -> None:
        self.end: Callable[[], None] | None = None
        self._caches, self._model = caches, model
        self._state: Literal["running", "paused", "returning", "returned"] = "returned"
        self._target: Target | None = None
        self._context: Sequence[int] = ()
        self._given: list[Any] = []

    def take(self, new_target: Callable[[list[Any]], Target]) -> Target:
        """Borrow the caches; return a target that continues them.

        This ends another generation that has borrowed them: it can no longer advance.

        Args:
            new_target: called with caches of the same content.

        Raises:
            FileError: a generation is using them in another thread, another model made
                them, or they are damaged.
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
        """Let others use the caches until :meth:`resume`; if returned already, do nothing.

        Args:
            context: prompt and output so far, without what the caches held before.
        """
        if self._state == "running":
            self._context = context
            self._state = "paused"

    def resume(self) -> None:
        """Resume the generation; borrow the caches again if they were used in between.

        Raises:
            FileError: they have changed, or another generation has borrowed them.
        """
        with _lock:
            if self._state == "returned":
                if self._target is None or not self._is_as_given():
                    raise FileError(
                        "prompt_cache has been continued or changed since this generation's last "
                        "response, so it cannot continue: start another one"
                    )
                self._given = []
                self._lend()
            self._state = "running"

    def give_back(self, context: Sequence[int], complete: bool = True) -> None:
        """End the generation; return the caches with the context that the consumer has read.

        Args:
            context: as for :meth:`pause`.
            complete: run the context's tokens that the target has not seen, instead of omitting
                them.
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
            for_good: end the generation.

        Raises:
            FileError: the generation is running.
        """
        with _lock:
            if self._state in ("running", "returning"):
                raise FileError(
                    "prompt_cache is in use by a generation that is running: use it between two "
                    "responses, or after the generation"
                )
            if for_good:
                self.give_back(self._context)
            elif self._state == "paused":
                assert self._target is not None
                with self._target.rolled_back():
                    self._return(complete=True)
                self._given = _contents(self._caches)

    def offset(self, place: int) -> int | None:
        """The offset that mlx-lm's cache would have now; None without one, or if returned."""
        target = self._target
        if target is None or self._state in ("returning", "returned"):
            return None
        own: int | None = getattr(target.cache[place], "offset", None)
        paused = own is not None and self._state == "paused"
        return self._start + len(self._context) if paused else own

    def kind(self, place: int) -> type:
        """The class that mlx-lm's cache would have now."""
        target = self._target
        if target is None:  # returned, or borrowed by another loan, which knows
            return self._caches[place].__class__
        kind = type(target.cache[place])
        return _MLX_LM_CLASSES.get(kind, kind)

    def _lend(self) -> None:
        """Turn the caches into stand-ins, which leaves the target as the only owner of the arrays.

        MLX writes into an array in place only if nothing else refers to it. At every moment the
        objects have all attributes of a cache or all of a stand-in, as other threads may look.
        """
        self._state = "running"  # first, so an interrupt returns them
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
                if complete:
                    target.prefill(self._context[target.length - self._start :])
                returned = [as_mlx_lms(cache) for cache in target.cache]
                mx.eval([part.state for part in parts(returned)])
            for stand_in, cache in zip(self._caches, returned, strict=True):
                if "_loan" in _held(stand_in):  # False only after an interrupt of this loop
                    _turn_into(stand_in, cache)
        except BaseException:
            self._state = before  # the next use of a stand-in tries again
            raise
        self._state = "returned"


def reclaim(caches: Iterable[Any]) -> None:
    """Take caches back from unfinished generations, which this ends.

    Raises:
        FileError: one of the generations is running.
    """
    for cache in caches:
        if type(cache) is _LentCache and (loan := _held(cache).get("_loan")):
            loan.reclaim(for_good=True)


class _LentCache:
    """The class of a caller's cache while it is lent; any use turns it into mlx-lm's cache again.

    Reading its class or its offset, which programs do while they generate, does not.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "offset":
            with _lock:  # nobody returns or lends it between the two reads
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
    """Turn a stand-in into mlx-lm's cache again; return it."""
    if loan := _held(stand_in).get("_loan"):
        loan.reclaim()
    return stand_in


def _turn_into(stand_in: _LentCache, cache: Any) -> None:
    """Give a stand-in a cache's class and content."""
    held = _held(stand_in)
    held.update(vars(cache))
    object.__setattr__(stand_in, "__class__", type(cache))
    del held["_loan"], held["_place"]


def _contents(caches: Iterable[Any]) -> list[Any]:
    """The arrays and numbers that caches hold."""
    return [value for part in parts(caches) for _, value in tree_flatten(vars(part))]
