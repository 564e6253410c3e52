"""The caches that steps run on, made from those that mlx-lm gives a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .kv_caches import TreeKVCache, TreeQuantizedKVCache
from .tree_rows import TreeRows
from .window_cache import WindowKVCache

TREE_CACHES = (TreeKVCache, TreeQuantizedKVCache, WindowKVCache)
"""Caches that verify trees and can be cut back at any time."""


def for_steps(cache: Any) -> Any:
    """A cache with the same content that can be cut back after a step, as far as there is one.

    Args:
        cache: one of mlx-lm's, or of a model's own. Its arrays are shared.
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


def parts(caches: Iterable[Any]) -> list[Any]:
    """All caches, those inside lists of caches too."""
    found = []
    for cache in caches:
        found += parts(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


def cached_length(caches: Iterable[Any]) -> int:
    """The number of positions that caches hold; 0 where they only hold a state."""
    return max((getattr(cache, "offset", 0) for cache in parts(caches)), default=0)


def held_arrays(caches: Iterable[Any]) -> list[mx.array]:
    """The arrays in caches, none of which is a list of caches."""
    found = []
    for cache in caches:
        for value in vars(cache).values():  # at each step: tree_flatten takes many times as long
            if isinstance(value, mx.array):
                found.append(value)
            elif isinstance(value, list | tuple):
                found += [part for part in value if isinstance(part, mx.array)]
    return found


def can_be_cut(cache: Any) -> bool:
    """Whether a cache can forget its last positions, whatever it holds."""
    # A rotating cache says so until it has wrapped.
    return isinstance(cache, TREE_CACHES) or (
        cache.is_trimmable() and not isinstance(cache, RotatingKVCache)
    )


def keep_rows(caches: Sequence[Any], start: int, rows: Sequence[int]) -> None:
    """Move some of the rows that were written from ``start`` on together, and cut the others.

    Their RoPE positions are right already: a row's position is its depth, and kept rows have
    consecutive depths.
    """
    if rows and rows[-1] != len(rows) - 1:
        moved = [cache.read_rows(start, rows) for cache in caches]
        # MLX writes into an array in place once nothing is left to read it. Without this, each
        # of these small writes would copy the cache of the whole context.
        mx.eval(moved)
        for cache, new in zip(caches, moved, strict=True):
            cache.write_rows(start, new)
        # Otherwise they would be lazy until the next step, and could not be read in its thread.
        mx.async_eval(held_arrays(caches))
    cut(caches, start + len(rows))


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


def can_be_cut_anywhere(cache: Any) -> bool:
    """Whether a cache still holds all its positions, and can forget the last of them."""
    return can_be_cut(cache) and not isinstance(cache, WindowKVCache | ChunkedKVCache)


def check_cut(caches: Iterable[Any], length: int) -> None:
    """Make sure that the next rows will see what they should if caches are cut.

    Raises:
        ValueError: a cache has dropped some of it. (A window says so itself.)
    """
    for cache in caches:
        if isinstance(cache, ChunkedKVCache) and length < cache.offset:
            chunk_start = length // cache.chunk_size * cache.chunk_size
            if cache.start_position > chunk_start:
                raise ValueError(f"the chunk at {length} positions has been dropped")


def cut(caches: Iterable[Any], length: int) -> None:
    """Forget what stands behind the first ``length`` positions.

    Each cache is cut by itself: an interrupted forward leaves some longer than others.
    """
    for cache in caches:
        if isinstance(cache, TREE_CACHES):
            cache.rows = None  # which an interrupted tree step may have left there
            cache.cut(length)
        else:
            cache.trim(max(0, cache.offset - length))


class Snapshot:
    """What caches that cannot be cut held at one moment; cheap, since arrays are shared.

    Models replace the arrays of an ``ArraysCache`` and never write into them, so references
    are enough. A cache of another kind may write into its arrays: those are copied, which MLX
    does only when one of the two is written to.

    Args:
        caches: the ones to take down.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        self._caches = caches
        self._held = [
            list(cache.cache) if type(cache) is ArraysCache else copy.deepcopy(vars(cache))
            for cache in caches
        ]

    def restore(self) -> None:
        """Give the caches back what they held; as often as needed."""
        for cache, held in zip(self._caches, self._held, strict=True):
            if type(cache) is ArraysCache:
                cache.cache = list(held)
            else:
                vars(cache).update(copy.deepcopy(held))


class Moment(NamedTuple):
    """A state that a target can return to.

    Attributes:
        length, pending: the target's.
        state: what its caches held that cannot be cut back.
    """

    length: int
    pending: tuple[int, ...]
    state: Snapshot
