"""The KV caches of a step: made from mlx-lm's, masked for a tree, cut to what was accepted.

In the order in which a step needs them: :func:`for_steps` makes caches that can be cut back,
:func:`masked_for` lets them answer with the mask of a draft tree, :func:`move_rows` and :func:`cut`
commit what was accepted, and a :class:`Snapshot` brings back what cannot be cut.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .slots import SlotKVCache, Slots
from .tree_attention import TreeRows, TreeSteps
from .window_cache import WindowKVCache


class TreeKVCache(TreeSteps, KVCache):
    """mlx-lm's plain cache, which during a tree step answers with the tree's mask."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> TreeQuantizedKVCache:
        quantized = super().to_quantized(group_size=group_size, bits=bits)
        return TreeQuantizedKVCache.from_state(quantized.state)


class TreeQuantizedKVCache(TreeSteps, QuantizedKVCache):
    """The same for mlx-lm's quantised cache, whose keys and values are three arrays each."""


TREE_CACHES = (TreeKVCache, TreeQuantizedKVCache, WindowKVCache, SlotKVCache)
"""Caches that verify trees and can be cut back at any time."""


def for_steps(cache: Any) -> Any:
    """A cache with the same content that can be cut back after a step, where there is such a kind.

    Args:
        cache: one of mlx-lm's, or of a model's own kind. The new cache shares its arrays.
    """
    if type(cache) is KVCache:
        return TreeKVCache.from_state(cache.state)
    if type(cache) is QuantizedKVCache:
        return TreeQuantizedKVCache.from_state(cache.state)
    if type(cache) is RotatingKVCache:
        return WindowKVCache.of(cache)
    if type(cache) is CacheList:
        return CacheList(*map(for_steps, cache.caches))
    return cache


def compact(caches: Iterable[Any]) -> None:
    """Let states be arrays of their own: one may be a view of all rows of a prefill."""
    for cache in parts(caches):
        if isinstance(cache, ArraysCache):
            cache.cache = [
                state if state is None else mx.contiguous(state) for state in cache.cache
            ]


def drop_unseen(caches: Iterable[Any]) -> None:
    """Let windows and chunks drop what the next row does not see."""
    for cache in parts(caches):
        if isinstance(cache, WindowKVCache):
            cache.compact()
        elif isinstance(cache, ChunkedKVCache) and cache.keys is not None:
            cache.maybe_trim_front()
            cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)


def parts(caches: Iterable[Any]) -> list[Any]:
    """All caches, with the members of mlx-lm's ``CacheList`` in its place."""
    found = []
    for cache in caches:
        found += parts(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def cached_length(caches: Iterable[Any]) -> int:
    """The number of positions that caches hold; 0 where they only hold a state."""
    return max((getattr(cache, "offset", 0) for cache in parts(caches)), default=0)


def are_quantized(caches: Iterable[Any]) -> bool:
    """Whether any of these caches is quantised."""
    return any(isinstance(part, QuantizedKVCache) for part in parts(caches))


def smallest_window(caches: Iterable[Any], keeping: bool = False) -> int | None:
    """The size of the smallest window, or of those that keep the first positions; None if none."""
    windows = [part for part in parts(caches) if isinstance(part, RotatingKVCache | WindowKVCache)]
    return min((part.max_size for part in windows if part.keep or not keeping), default=None)


def held_arrays(caches: Iterable[Any]) -> list[mx.array]:
    """The arrays in caches; pass :func:`parts` of them if there may be lists of caches."""
    found: list[mx.array] = []
    slots: set[Slots] = set()  # each is many sequences'
    for cache in caches:
        if type(cache) is TreeKVCache and cache.keys is not None:  # most are: asked first
            found += (cache.keys, cache.values)
            continue
        if isinstance(cache, SlotKVCache):
            slots.add(cache.slots)
            continue
        for value in vars(cache).values():  # at each step: tree_flatten takes many times as long
            if isinstance(value, mx.array):
                found.append(value)
            elif isinstance(value, list | tuple):
                found += [part for part in value if isinstance(part, mx.array)]
    for layer in slots:
        found += [layer.keys, layer.values]
    return found


def is_trimmable(cache: Any) -> bool:
    """Whether a cache can forget its last positions, whatever it holds."""
    # A rotating cache says so until it has wrapped.
    return cache.is_trimmable() and not isinstance(cache, RotatingKVCache)


def is_trimmable_anywhere(cache: Any) -> bool:
    """Whether a cache still holds all its positions, and can forget the last of them."""
    return is_trimmable(cache) and not isinstance(cache, WindowKVCache | ChunkedKVCache)


@contextmanager
def masked_for(rows: TreeRows, caches: Sequence[Any]) -> Iterator[None]:
    """While entered, caches answer with the mask of a tree step's rows."""
    try:
        for cache in caches:
            cache.rows = rows
        yield
    finally:
        for cache in caches:
            cache.rows = None


class Kept(NamedTuple):
    """What a step keeps of one sequence's rows.

    Attributes:
        caches: of the sequence, all of which can be cut.
        start: where the rows were written.
        rows: which of them stay, in order.
    """

    caches: Sequence[Any]
    start: int
    rows: Sequence[int]


def move_rows(kept: Iterable[Kept]) -> None:
    """Move rows that stay together, to where the first of all rows stands; one wait for all.

    Their RoPE positions are right already: a row's position is its depth, and kept rows have
    consecutive depths. What stands behind them is still to be :func:`cut`.
    """
    moved: list[tuple[mx.array, Any, mx.array]] = []
    changed: list[Any] = []
    for caches, start, rows in kept:
        if not rows or rows[-1] == len(rows) - 1:
            continue
        changed += caches
        for cache in caches:
            first = cache.index(start)
            taken = mx.array([first + row for row in rows])
            place = cache.place, ..., slice(first, first + len(rows)), slice(None)
            for array in held_arrays([cache]):
                moved.append((array, place, array[cache.place, ..., taken, :]))
    if not moved:
        return
    # MLX writes into an array in place once nothing is left to read it. Without this, each
    # of these small writes would copy the cache of the whole context.
    mx.eval([new for *_, new in moved])
    for array, place, new in moved:
        array[place] = new
    # Otherwise they would be lazy until the next step, and could not be read in its thread.
    mx.async_eval(held_arrays(changed))


def cut(caches: Iterable[Any], length: int) -> None:
    """Drop everything after the first ``length`` positions.

    Each cache is cut by itself: an interrupted forward leaves some longer than others.

    Raises:
        ValueError: a window has dropped positions that the next row would see.
    """
    for cache in caches:
        if isinstance(cache, TREE_CACHES):
            cache.rows = None  # which an interrupted tree step may have left there
        cache.trim(max(0, cache.offset - length))


def can_be_cut(cache: Any, length: int) -> bool:
    """Whether a cache still holds all that a row after its first ``length`` positions sees."""
    if isinstance(cache, WindowKVCache):
        return cache.reaches_back_to(length)
    if isinstance(cache, ChunkedKVCache):
        return bool(cache.start_position <= length // cache.chunk_size * cache.chunk_size)
    return is_trimmable(cache)


def first_positions(cache: Any, length: int, room: int) -> Any:
    """mlx-lm's cache with a copy of what a cache holds of its first ``length`` positions.

    Args:
        cache: one that :func:`can_be_cut` to the length, or ends there. It may be in use.
        length: at least 1.
        room: for how many positions plain caches get room, so that writing up to there
            copies nothing again.
    """
    if isinstance(cache, CacheList):
        return CacheList(*(first_positions(part, length, room) for part in cache.caches))
    if isinstance(cache, WindowKVCache):
        cut_back = copy.copy(cache)
        cut_back.offset = length
        return RotatingKVCache.from_state(cut_back.rotating_state())
    if isinstance(cache, SlotKVCache | KVCache | QuantizedKVCache):
        kind = QuantizedKVCache if isinstance(cache, QuantizedKVCache) else KVCache
        if cache.keys is None:  # a layer that has seen nothing yet
            return copy.copy(cache)

        def taken(array: mx.array) -> mx.array:
            held = array[cache.place if isinstance(cache, TreeSteps) else slice(None)]
            size = -(-max(length, room) // kind.step) * kind.step
            new = mx.zeros((*held.shape[:2], size, held.shape[3]), held.dtype)
            new[..., :length, :] = held[..., :length, :]
            return new

        keys, values = tree_map(taken, (cache.keys, cache.values))
        settings = cache.state[3:] if kind is QuantizedKVCache else ()
        return kind.from_state((keys, values, length, *settings))
    taken_over = copy.deepcopy(cache)
    if isinstance(taken_over, ChunkedKVCache):
        taken_over.trim(taken_over.offset - length)
    return taken_over


class Snapshot:
    """What caches that cannot be cut held at one moment; cheap, since arrays are shared.

    Models replace the arrays of an ``ArraysCache`` and never write into them, so references
    are enough. A cache of another kind may write into its arrays: those are copied, which MLX
    does only when one of the two is written to.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._held = [(cache, _copied(cache, vars(cache))) for cache in caches]

    def restore(self) -> None:
        """Give the caches back what they held; may be called more than once."""
        for cache, held in self._held:
            vars(cache).update(_copied(cache, held))

    def content_of(self, cache: Any) -> Any:
        """A cache of its own with what one of these caches held."""
        found = copy.copy(cache)
        (held,) = (held for own, held in self._held if own is cache)
        vars(found).update(_copied(cache, held))
        return found

    @property
    def arrays(self) -> list[mx.array]:
        """All that the caches held."""
        held = tree_flatten([held for _, held in self._held])
        return [value for _, value in held if isinstance(value, mx.array)]


def _copied(cache: Any, held: dict[str, Any]) -> dict[str, Any]:
    return {"cache": [*held["cache"]]} if type(cache) is ArraysCache else copy.deepcopy(held)
