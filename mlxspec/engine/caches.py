"""mlx-lm's caches, and what the steps of draft trees ask of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from ..errors import OptionError
from .params import CacheOptions
from .tree_attention import TreeRows


def check_quantization(model: nn.Module, options: CacheOptions) -> None:
    """Refuse to quantise what cannot be quantised, before a generation has come that far.

    The graph of two small forwards is built and never evaluated.

    Raises:
        OptionError: mlx-lm has no quantised cache for this model, or not with these options.
    """
    if options.kv_bits is None:
        return
    cache = make_prompt_cache(model, options.max_kv_size)
    token = mx.array([[0]])
    try:
        model(token, cache=cache)
        maybe_quantize_kv_cache(cache, 0, options.kv_group_size, options.kv_bits)
        model(token, cache=cache)
    except NotImplementedError as error:
        raise OptionError(
            "kv_bits: a cache that drops old positions cannot be quantised; leave kv_bits out"
            + (" or max_kv_size" if options.max_kv_size is not None else "")
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"kv_bits {options.kv_bits} with kv_group_size {options.kv_group_size} does not suit "
            f"this model's cache: {' '.join(str(error).split())[:150]}"
        ) from error


class _TreeSteps:
    """What a tree step asks of a cache whose entries stand in the order of their positions."""

    keys: Any
    values: Any
    offset: int
    rows: TreeRows | None = None
    """The rows of the tree step that is being run."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is None:
            return super().make_mask(N, return_array=return_array, window_size=window_size)  # type: ignore[misc]
        return self.rows.mask(self.offset, window_size)

    def read_rows(self, start: int, rows: Sequence[int]) -> list[mx.array]:
        """Lazy copies of some of the rows that were written from ``start`` on."""
        taken = mx.array(list(rows)) + start
        return [array[..., taken, :] for array in self._arrays()]

    def write_rows(self, start: int, rows: list[mx.array]) -> None:
        """Put rows of :meth:`read_rows` in a row, from ``start`` on."""
        for array, new in zip(self._arrays(), rows, strict=True):
            array[..., start : start + new.shape[-2], :] = new

    def cut(self, length: int) -> None:
        """Forget what stands behind the first ``length`` positions."""
        self.offset = min(self.offset, length)

    def _arrays(self) -> list[mx.array]:
        return [array for _, array in tree_flatten((self.keys, self.values))]


class TreeKVCache(_TreeSteps, KVCache):
    """mlx-lm's plain cache, which during a tree step answers with the tree's mask."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> TreeQuantizedKVCache:
        quantized = super().to_quantized(group_size=group_size, bits=bits)
        return TreeQuantizedKVCache.from_state(quantized.state)


class TreeQuantizedKVCache(_TreeSteps, QuantizedKVCache):
    """The same for mlx-lm's quantised cache, whose keys and values are three arrays each."""


_STEP = 256  # entries that the buffers grow by
_SLACK = 16  # entries beyond the window that stay when others are dropped


class WindowKVCache:
    """The keys and values of the latest positions, and of the first few where those are kept.

    mlx-lm's rotating cache overwrites its oldest entry with each new one, so what a rejected
    draft has overwritten is lost. This one appends, and drops old entries only when its buffers
    are full: it can be cut back to any length that it had since then, and 16 positions further.
    It holds at most the window, the rows of one step and 272 entries more.

    The entries stand in the order of their positions: the first ``keep`` ones, then those from
    ``start`` on without a gap. What a row sees is what mlx-lm's cache shows a step of one row:
    the latest ``max_size`` positions, its own included, or where the first are kept those and
    the latest ``max_size - keep``.

    Args:
        max_size: how many positions a row sees at most.
        keep: how many of them are the first ones, for ever.
    """

    rows: TreeRows | None = None
    """The rows of the tree step that is being run."""

    def __init__(self, max_size: int, keep: int = 0) -> None:
        self.max_size = max_size
        self.keep = keep
        self.offset = 0
        self.keys: Any = None
        self.values: Any = None
        self._start = keep
        self._seen = slice(0, 0)

    @classmethod
    def of(cls, rotating: RotatingKVCache) -> WindowKVCache:
        """The content of mlx-lm's cache, whatever turn its rotation has taken."""
        cache = cls(rotating.max_size, rotating.keep)
        if rotating.keys is not None:
            cache.keys = rotating._temporal_order(rotating.keys)
            cache.values = rotating._temporal_order(rotating.values)
            cache.offset = rotating.offset
            cache._start = rotating.offset - (cache.keys.shape[2] - rotating.keep)
        return cache

    def rotating_state(self) -> tuple[Any, ...]:
        """The state of mlx-lm's cache with the same content, its rotation turned back."""
        if self.keys is None:
            return None, None, 0, self.keep, self.max_size, 0
        end = self._index(self.offset)
        dropped = max(0, end - self.max_size)
        kept = min(self.keep, end)

        def ordered(array: mx.array) -> mx.array:
            first, latest = array[..., :kept, :], array[..., kept + dropped : end, :]
            return mx.concatenate([first, latest], axis=2)

        keys, values = ordered(self.keys), ordered(self.values)
        return keys, values, self.offset, self.keep, self.max_size, keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a step's rows; return what they may see, in the order of :meth:`make_mask`."""
        rows = keys.shape[2]
        if self.keys is None:
            # Without a position yet; _make_room gives them their size.
            self.keys, self.values = keys[..., :0, :], values[..., :0, :]
        self._make_room(rows)
        begin = self._index(self.offset)
        end = begin + rows
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self._seen = slice(begin - self._cached(), end)
        self.offset += rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the rows of the last step might see."""
        return self.keys[..., self._seen, :], self.values[..., self._seen, :]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the next step, for what :meth:`update_and_fetch` will return.

        mlx-lm's own mask for several rows drops the first positions that it keeps, so that
        rows would not see what they see one by one.
        """
        span = min(window_size or self.max_size, self.max_size)
        if self.keep and self.offset + N > self.max_size:
            self._make_room(N)  # now, so that the mask is for the entries that will be left
            return self._mask_with_gap(N, span)
        cached = self._cached()
        if self.rows is not None:
            return self.rows.mask(cached, span)
        if cached + N > span:
            return create_causal_mask(N, cached, window_size=span)
        return create_attention_mask(N, cached, return_array, None)

    def read_rows(self, start: int, rows: Sequence[int]) -> list[mx.array]:
        """Lazy copies of some of the rows that were written from ``start`` on."""
        taken = mx.array(list(rows)) + self._index(start)
        return [array[..., taken, :] for array in (self.keys, self.values)]

    def write_rows(self, start: int, rows: list[mx.array]) -> None:
        """Put rows of :meth:`read_rows` in a row, from ``start`` on."""
        begin = self._index(start)
        for array, new in zip((self.keys, self.values), rows, strict=True):
            array[..., begin : begin + new.shape[2], :] = new

    def cut(self, length: int) -> None:
        """Forget what stands behind the first ``length`` positions.

        Raises:
            ValueError: positions are gone that the next row would see.
        """
        if length < self.offset:
            oldest_seen = length + 1 - (self.max_size - self.keep)
            if self._start > max(self.keep, oldest_seen):
                raise ValueError(f"the window has moved on too far to be cut to {length} positions")
            self.offset = length

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def state(self) -> tuple[Any, Any]:
        """What has to be evaluated."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def _index(self, position: int) -> int:
        """Where in the buffers the entry of a position stands."""
        return position if position < self.keep else self.keep + position - self._start

    def _cached(self) -> int:
        """How many entries in front of the next rows they may see."""
        entries = self._index(self.offset)
        # Where the first positions are kept the mask hides what lies between.
        return entries if self.keep else min(entries, self.max_size - 1)

    def _make_room(self, rows: int) -> None:
        """If the buffers are full, drop what no row will see and grow them for so many rows."""
        end = self._index(self.offset)
        if self.keys is None or end + rows <= self.keys.shape[2]:
            return
        start = max(self._start, self.offset - self.max_size - _SLACK)
        room = math.ceil(rows / _STEP) * _STEP
        first, latest = slice(0, self.keep), slice(self.keep + start - self._start, end)

        def moved(old: mx.array) -> mx.array:
            empty = mx.zeros((*old.shape[:2], room, old.shape[3]), old.dtype)
            return mx.concatenate([old[..., first, :], old[..., latest, :], empty], axis=2)

        if end <= self.keep:
            first, latest = slice(0, end), slice(0, 0)
        self.keys, self.values = moved(self.keys), moved(self.values)
        self._start = start

    def _mask_with_gap(self, rows: int, span: int) -> mx.array:
        """Rows see the first ``keep`` positions and their latest ones, (rows, entries)."""
        depths = mx.arange(rows) if self.rows is None else self.rows.depths
        related = mx.tri(rows, dtype=mx.bool_) if self.rows is None else self.rows.ancestors
        own = self.offset + depths
        first = mx.arange(min(self.keep, self.offset))
        cached = mx.concatenate([first, mx.arange(self._start, max(self._start, self.offset))])
        positions = mx.concatenate([cached, own])
        # Up to max_size positions nothing has been dropped yet.
        seen_from = mx.where(own < self.max_size, 0, own - (span - self.keep) + 1)[:, None]
        in_sight = (positions < self.keep) | (positions >= seen_from)
        in_cache = mx.ones((rows, cached.size), dtype=mx.bool_)
        return in_sight & mx.concatenate([in_cache, related], axis=1)


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


def is_trimmable(cache: Any) -> bool:
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


def is_trimmable_anywhere(cache: Any) -> bool:
    """Whether a cache still holds all its positions, and can forget the last of them."""
    return is_trimmable(cache) and not isinstance(cache, WindowKVCache | ChunkedKVCache)


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


class Checkpoint(NamedTuple):
    """A state that a target can return to.

    Attributes:
        length, pending: the target's.
        state: what its caches held that cannot be cut back.
    """

    length: int
    pending: tuple[int, ...]
    state: Snapshot
