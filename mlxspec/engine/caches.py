"""KV caches for verifying drafts: they apply a tree's mask, and can be cut to the accepted rows.

The first half defines the kinds of caches, each for one layer of one sequence: plain, quantised,
with a sliding window, or in a slot next to other sequences. The second half follows the caches
through a step:
:func:`for_steps` converts mlx-lm's caches, :func:`masked_for` sets the mask of a draft tree,
:func:`move_rows` and :func:`cut` commit the accepted rows, and a :class:`Snapshot` restores caches
that cannot be cut.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    create_attention_mask,
)

from ..drafting.tree import DraftTree


class TreeRows:
    """The rows of a tree step, that is, of a forward over the nodes of a draft tree.

    Attributes:
        depths: each row's position, counted from the end of the cache, (rows,).
        ancestors: bool, (rows, rows): which rows each row attends to.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.depths = mx.array(tree.depths, dtype=mx.int32)
        self.ancestors = mx.array(tree.ancestors())

    def mask(self, cached: int, window_size: int | None) -> mx.array:
        """The rows' mask over a cache of ``cached`` positions and themselves."""
        return tree_mask(self.depths, self.ancestors, mx.arange(cached), cached, window_size)


def tree_mask(
    depths: mx.array,
    ancestors: mx.array,
    cached: mx.array,
    offset: int,
    window_size: int | None,
    keep: int = 0,
) -> mx.array:
    """The attention mask of a step's rows: each sees the cache and its ancestors, in the window.

    A window counts positions, not rows: siblings share a position.

    Args:
        depths, ancestors: as in :class:`TreeRows`.
        cached: the positions of the cache's entries, (entries,).
        offset: the first position after the cache's end.
        window_size: the number of positions that a row sees, including its own; None for all.
        keep: the number of the context's first positions that every row sees; they count towards
            ``window_size``.

    Returns:
        bool, (rows, entries + rows): True where a row sees an entry or another row.
    """
    in_cache = mx.ones((depths.size, cached.size), dtype=mx.bool_)
    mask = mx.concatenate([in_cache, ancestors], axis=1)
    if window_size is None:
        return mask
    new = offset + depths
    positions = mx.concatenate([cached, new])
    first_seen = mx.where(new < window_size, 0, new - (window_size - keep) + 1)[:, None]
    return mask & ((positions < keep) | (positions >= first_seen))


class TreeSteps:
    """A base of caches that verify trees, and can be trimmed at any time.

    They make the mask of a tree step. Their entries are ordered by position.
    """

    offset: int
    rows: TreeRows | None = None
    """The rows of the current tree step; None in other steps."""

    place = slice(None)
    """The slice of the arrays' first axis that belongs to the sequence."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is None:
            return create_attention_mask(N, self.offset, return_array, window_size)
        return self.rows.mask(self.offset, window_size)

    def index(self, position: int) -> int:
        """The index of a position's entry in the arrays."""
        return position


_STEP = 256  # buffers grow by multiples of this many entries
_SLACK = 16  # extra entries to keep when entries beyond the window are dropped


class WindowKVCache(TreeSteps):
    """The keys and values of a sliding window and, optionally, of the context's first positions.

    mlx-lm's rotating cache overwrites its oldest entries, so a rejected draft destroys entries
    that are still needed. This cache appends, and drops old entries only when its buffers are
    full. It can be trimmed to its length at the last drop, and by 16 positions more. It holds at
    most the window, the rows of one step and 272 more entries.

    Entries are ordered by position: first those of the ``keep`` first positions, then those of the
    latest positions. Each row sees what it would see if it ran alone with mlx-lm's cache: the
    latest ``max_size`` positions, including its own. If the first positions are kept, it sees them
    and the latest ``max_size - keep``.

    Args:
        max_size: the most positions that a row sees.
        keep: the number of the context's first positions that are never dropped.
    """

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
        """Convert mlx-lm's cache, at any point of its rotation."""
        cache = cls(rotating.max_size, rotating.keep)
        if rotating.keys is not None:
            cache.keys = rotating._temporal_order(rotating.keys)
            cache.values = rotating._temporal_order(rotating.values)
            cache.offset = rotating.offset
            cache._start = rotating.offset - (cache.keys.shape[2] - rotating.keep)
        return cache

    def rotating_state(self) -> tuple[Any, ...]:
        """The content in the form of a rotating cache's state, with entries ordered by position."""
        if self.keys is None:
            return None, None, 0, self.keep, self.max_size, 0
        end = self.index(self.offset)
        dropped = max(0, end - self.max_size)
        kept = min(self.keep, end)

        def ordered(array: mx.array) -> mx.array:
            first, latest = array[..., :kept, :], array[..., kept + dropped : end, :]
            return mx.concatenate([first, latest], axis=2)

        keys, values = ordered(self.keys), ordered(self.values)
        return keys, values, self.offset, self.keep, self.max_size, keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a step's rows; return the entries that the mask from :meth:`make_mask` covers."""
        rows = keys.shape[2]
        if self.keys is None:
            # Empty arrays, which _make_room enlarges.
            self.keys, self.values = keys[..., :0, :], values[..., :0, :]
        self._make_room(rows)
        begin = self.index(self.offset)
        end = begin + rows
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self._seen = slice(begin - self._cached(), end)
        self.offset += rows
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The entries that the last step's rows may see."""
        return self.keys[..., self._seen, :], self.values[..., self._seen, :]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The next step's mask, for the entries that :meth:`update_and_fetch` will return.

        In mlx-lm, a single row sees the kept first positions, but the mask for several rows hides
        them. Here, all rows see them.
        """
        span = min(window_size or self.max_size, self.max_size)
        if self.rows is None and self._cached() + N <= span:
            return create_attention_mask(N, self._cached(), return_array, None)
        if self.keep:
            self._make_room(N)  # now, since the mask covers only the entries that remain
        first = min(self.keep, self.offset)
        latest = self.offset - (self._cached() - first)
        cached = mx.concatenate([mx.arange(first), mx.arange(latest, self.offset)])
        depths = mx.arange(N) if self.rows is None else self.rows.depths
        related = mx.tri(N, dtype=mx.bool_) if self.rows is None else self.rows.ancestors
        return tree_mask(depths, related, cached, self.offset, span, self.keep)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions.

        Raises:
            ValueError: positions that the next row would see have been dropped.
        """
        length = self.offset - n
        if n > 0:
            if not self.reaches_back_to(length):
                raise ValueError(f"the window has moved too far to be cut to {length} positions")
            self.offset = length
        return n

    def reaches_back_to(self, length: int) -> bool:
        """Whether the cache, cut to ``length`` positions, still has all that the next row sees."""
        oldest_seen = length + 1 - (self.max_size - self.keep)
        return self._start <= max(self.keep, oldest_seen)

    @property
    def state(self) -> tuple[Any, Any]:
        """The keys and values, for ``mx.eval``."""
        return self.keys, self.values

    def index(self, position: int) -> int:
        """The index of a position's entry in the buffers."""
        return position if position < self.keep else self.keep + position - self._start

    def _cached(self) -> int:
        """The number of cached entries that the next rows may see."""
        entries = self.index(self.offset)
        # If the first positions are kept, the mask hides the entries between them and the window.
        return entries if self.keep else min(entries, self.max_size - 1)

    def _make_room(self, rows: int) -> None:
        """Make room for ``rows`` more entries; if the buffers are full, drop those that no row will
        see.
        """
        if self.keys is not None and self.index(self.offset) + rows > self.keys.shape[2]:
            self._drop_unseen(math.ceil(rows / _STEP) * _STEP)

    def compact(self) -> None:
        """Drop entries that no row will see, if there are many of them, as after a prefill."""
        if self.keys is not None and self.keys.shape[2] > self.max_size + _SLACK + _STEP:
            self._drop_unseen(0)

    def _drop_unseen(self, room: int) -> None:
        """Drop entries that no row will see, and add room for ``room`` entries."""
        end = self.index(self.offset)
        start = max(self._start, self.offset - self.max_size - _SLACK)
        first, latest = slice(0, self.keep), slice(self.keep + start - self._start, end)
        if end <= self.keep:
            first, latest = slice(0, end), slice(0, 0)

        def moved(old: mx.array) -> mx.array:
            empty = mx.zeros((*old.shape[:2], room, old.shape[3]), old.dtype)
            return mx.concatenate([old[..., first, :], old[..., latest, :], empty], axis=2)

        self.keys, self.values = moved(self.keys), moved(self.values)
        self._start = start


def whole_steps(positions: int) -> int:
    """The smallest size of buffers, in entries, that holds ``positions`` positions."""
    return -(-positions // _STEP) * _STEP


class Slots:
    """The keys and values of one layer for several sequences, (slots, heads, positions, head_dim).

    The slots in use come first. MLX writes into these arrays in place, unless something still
    refers to their earlier content.

    Args:
        like: a cache of the layer, whose shapes and data types the slots take. It stays outside.
    """

    def __init__(self, like: KVCache) -> None:
        keys, values = like.keys_and_values()
        self.keys = mx.zeros((0, keys.shape[1], 0, keys.shape[3]), keys.dtype)
        self.values = mx.zeros((0, values.shape[1], 0, values.shape[3]), values.dtype)

    def put(self, slot: int, cache: KVCache) -> None:
        """Copy a sequence's keys and values into a slot."""
        keys, values = cache.keys_and_values()
        self.make_room(slot + 1, cache.offset)
        self.keys[slot : slot + 1, :, : cache.offset] = keys
        self.values[slot : slot + 1, :, : cache.offset] = values

    def make_room(self, slots: int, positions: int) -> None:
        """Grow to at least this many slots and positions."""
        held, _, room, _ = self.keys.shape
        if slots <= held and positions <= room:
            return
        more_slots = max(slots - held, 0)
        more_positions = whole_steps(positions) - room if positions > room else 0

        def grown(array: mx.array) -> mx.array:
            return mx.pad(array, [(0, more_slots), (0, 0), (0, more_positions), (0, 0)])

        self.keys, self.values = grown(self.keys), grown(self.values)

    @property
    def capacity(self) -> int:
        """The number of positions in all slots together."""
        return self.keys.shape[0] * self.keys.shape[2]

    def cut(self, slots: int, positions: int) -> None:
        """Shrink to this many slots and positions; the latter are rounded up to a buffer's size."""
        positions = whole_steps(positions)
        self.keys = mx.contiguous(self.keys[:slots, :, :positions])
        self.values = mx.contiguous(self.values[:slots, :, :positions])
        mx.eval(self.keys, self.values)

    def write(self, places: mx.array, end: int, keys: mx.array, values: mx.array) -> None:
        """Write a step's rows into the first slots.

        Args:
            places: each row's index along the axis of positions, (slots, 1, rows, 1).
            end: the largest of these indices plus 1.
            keys, values: (slots, heads, rows, head_dim).
        """
        self.make_room(0, end)
        unused = len(self.keys) - len(places)
        if unused:
            rows = [(0, unused), (0, 0), (0, 0), (0, 0)]
            places, keys, values = (mx.pad(array, rows) for array in (places, keys, values))
        # One operation for all slots: separate writes take two for each sequence and layer.
        self.keys = mx.put_along_axis(self.keys, places, keys, axis=2)
        self.values = mx.put_along_axis(self.values, places, values, axis=2)


class SlotKVCache(TreeSteps, KVCache):
    """The cache of one sequence, kept in a slot.

    Args:
        slots: the layer's slots.
        slot: the index of the sequence's slot.
        offset: the number of positions that the cache holds.
    """

    def __init__(self, slots: Slots, slot: int, offset: int) -> None:
        self.slots = slots
        self.slot = slot
        self.offset = offset

    @property
    def place(self) -> slice:  # type: ignore[override]
        """The sequence's slice of the first axis of the layer's arrays."""
        return slice(self.slot, self.slot + 1)

    def move(self, slot: int) -> None:
        """Move to a free slot."""
        held = slice(self.offset)
        for array in (self.keys, self.values):
            array[slot, :, held] = array[self.slot, :, held]
        self.slot = slot

    @property
    def keys(self) -> mx.array:
        return self.slots.keys

    @property
    def values(self) -> mx.array:
        return self.slots.values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a step's rows; return all keys and values."""
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.slots.make_room(0, self.offset)
        self.slots.keys[self.place, :, start : self.offset] = keys
        self.slots.values[self.place, :, start : self.offset] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        place, held = self.place, slice(self.offset)
        return self.slots.keys[place, :, held], self.slots.values[place, :, held]

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys_and_values()


class TreeKVCache(TreeSteps, KVCache):
    """mlx-lm's plain cache with the mask of a tree step."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> TreeQuantizedKVCache:
        quantized = super().to_quantized(group_size=group_size, bits=bits)
        return TreeQuantizedKVCache.from_state(quantized.state)


class TreeQuantizedKVCache(TreeSteps, QuantizedKVCache):
    """mlx-lm's quantised cache with the mask of a tree step."""


def for_steps(cache: Any) -> Any:
    """Convert a cache to a kind that can be trimmed after a step, if there is such a kind.

    Args:
        cache: one of mlx-lm's, or of a class that the model defines. The result shares its arrays.
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
    """Copy recurrent states, which may be views into all rows of a prefill, to free those rows."""
    for cache in parts(caches):
        if isinstance(cache, ArraysCache):
            cache.cache = [
                state if state is None else mx.contiguous(state) for state in cache.cache
            ]


def drop_unseen(caches: Iterable[Any]) -> None:
    """In caches of windows and chunks, drop the positions that the next row does not see."""
    for cache in parts(caches):
        if isinstance(cache, WindowKVCache):
            cache.compact()
        elif isinstance(cache, ChunkedKVCache) and cache.keys is not None:
            cache.maybe_trim_front()
            cache.keys, cache.values = mx.contiguous(cache.keys), mx.contiguous(cache.values)


def parts(caches: Iterable[Any]) -> list[Any]:
    """All caches, with each ``CacheList`` of mlx-lm's replaced by its members."""
    flat = []
    for cache in caches:
        flat += parts(cache.caches) if isinstance(cache, CacheList) else [cache]
    return flat


def cached_length(caches: Iterable[Any]) -> int:
    """The number of positions that caches hold; 0 if they hold only recurrent states."""
    return max((getattr(cache, "offset", 0) for cache in parts(caches)), default=0)


def are_quantized(caches: Iterable[Any]) -> bool:
    """Whether any of these caches is quantised."""
    return any(isinstance(part, QuantizedKVCache) for part in parts(caches))


def smallest_window(caches: Iterable[Any], *, keeping: bool) -> int | None:
    """The size of the smallest window; None if there is none.

    Args:
        caches: mlx-lm's caches or a target's.
        keeping: consider only windows that keep the context's first positions.
    """
    windows = [part for part in parts(caches) if isinstance(part, RotatingKVCache | WindowKVCache)]
    return min((part.max_size for part in windows if part.keep or not keeping), default=None)


def held_arrays(caches: Iterable[Any]) -> list[mx.array]:
    """The arrays that caches hold. A ``CacheList`` is not searched: pass :func:`parts` instead."""
    # The caches of a layer that are in slots share their arrays.
    holders = {
        id(holder): holder for holder in (getattr(cache, "slots", cache) for cache in caches)
    }
    values: list[Any] = []
    for holder in holders.values():  # mlx's tree_flatten would take many times as long
        for value in vars(holder).values():
            values += value if isinstance(value, list | tuple) else [value]
    return [array for array in values if isinstance(array, mx.array)]


def is_trimmable(cache: Any) -> bool:
    """Whether a cache can drop its last positions at any length."""
    # A rotating cache says True as long as it has not wrapped.
    return cache.is_trimmable() and not isinstance(cache, RotatingKVCache)


def is_trimmable_anywhere(cache: Any) -> bool:
    """Whether a cache still holds all its positions and can drop the last ones."""
    return is_trimmable(cache) and not isinstance(cache, WindowKVCache | ChunkedKVCache)


@contextmanager
def masked_for(rows: TreeRows, caches: Sequence[Any]) -> Iterator[None]:
    """A ``with`` block in which the caches make the mask for the rows of a tree."""
    try:
        for cache in caches:
            cache.rows = rows
        yield
    finally:
        for cache in caches:
            cache.rows = None


def move_rows(accepted: Iterable[tuple[Sequence[Any], int, Sequence[int]]]) -> None:
    """Move each sequence's accepted rows to the start of its step's rows; wait once for all.

    Their RoPE positions are already right: positions follow the depth in the tree, and accepted
    rows have consecutive depths. The rows after them still have to be :func:`cut`.

    Args:
        accepted: for each sequence, its caches, all of which can be cut; the position of the step's
            first row; and the indices of the accepted rows, in order.
    """
    moved: list[tuple[mx.array, Any, mx.array]] = []
    changed: list[Any] = []
    for caches, start, rows in accepted:
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
    # MLX writes into an array in place only if no pending operation reads it. Without this wait,
    # each of these small writes would copy the whole cache.
    mx.eval([new for *_, new in moved])
    for array, place, new in moved:
        array[place] = new
    # Only this thread can evaluate lazy arrays, but another thread may run the next step.
    mx.async_eval(held_arrays(changed))


def cut(caches: Iterable[Any], length: int) -> None:
    """Drop everything after the first ``length`` positions.

    Each cache is cut by its own length, since an interrupted forward leaves some longer than
    others.

    Raises:
        ValueError: a window has dropped positions that the next row would see.
    """
    for cache in caches:
        if isinstance(cache, TreeSteps):
            cache.rows = None  # an interrupted tree step may have left them
        cache.trim(max(0, cache.offset - length))


def can_be_cut(cache: Any, length: int) -> bool:
    """Whether a cache, cut to ``length`` positions, still has all that the next row sees."""
    if isinstance(cache, WindowKVCache):
        return cache.reaches_back_to(length)
    return is_trimmable_anywhere(cache)


def first_positions(cache: Any, length: int, room: int) -> Any:
    """Copy the first ``length`` positions of a cache into a new cache of mlx-lm's class.

    Args:
        cache: holds exactly ``length`` positions, or can be cut to them (:func:`can_be_cut`). It
            may be in use.
        length: at least 1.
        room: the number of positions that a plain cache is allocated for. Up to there, later
            writes copy nothing.
    """
    if isinstance(cache, CacheList):
        return CacheList(*(first_positions(part, length, room) for part in cache.caches))
    if isinstance(cache, WindowKVCache):
        cut_back = copy.copy(cache)
        cut_back.offset = length
        return RotatingKVCache.from_state(cut_back.rotating_state())
    if isinstance(cache, KVCache | QuantizedKVCache):
        kind = QuantizedKVCache if isinstance(cache, QuantizedKVCache) else KVCache
        if cache.keys is None:  # a layer that has not run yet
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
    return copy.deepcopy(cache)


class Snapshot:
    """The content that caches which cannot be cut had at one moment.

    It costs little. Models replace the arrays of an ``ArraysCache`` and never write into them, so
    references are enough. Caches of other kinds may write into their arrays, so these are copied,
    but MLX really copies an array only when the cache or the snapshot is written to.

    Args:
        caches: the caches to restore.
        length: the length of the context at that moment.
    """

    def __init__(self, caches: Sequence[Any], length: int = 0) -> None:
        self.length = length
        self._held = [(cache, _copied(cache, vars(cache))) for cache in caches]

    def restore(self) -> None:
        """Restore the content of the caches; may be called more than once."""
        for cache, held in self._held:
            vars(cache).update(_copied(cache, held))

    def content_of(self, cache: Any) -> Any:
        """A new cache with the content that one of these caches had."""
        restored = copy.copy(cache)
        (held,) = (held for original, held in self._held if original is cache)
        vars(restored).update(_copied(cache, held))
        return restored

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that the caches held."""
        held = tree_flatten([held for _, held in self._held])
        return [value for _, value in held if isinstance(value, mx.array)]


def _copied(cache: Any, held: dict[str, Any]) -> dict[str, Any]:
    return {"cache": [*held["cache"]]} if type(cache) is ArraysCache else copy.deepcopy(held)
