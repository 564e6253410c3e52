"""The cache of a sliding window from which rejected drafts can be cut."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache, create_attention_mask

from .tree_attention import TreeSteps

_STEP = 256  # entries that the buffers grow by
_SLACK = 16  # entries beyond the window that stay when others are dropped


class WindowKVCache(TreeSteps):
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
        keep: how many of them are the context's first ones, which are never dropped.
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
        """A cache with the content of mlx-lm's, wherever that one's rotation stands."""
        cache = cls(rotating.max_size, rotating.keep)
        if rotating.keys is not None:
            cache.keys = rotating._temporal_order(rotating.keys)
            cache.values = rotating._temporal_order(rotating.values)
            cache.offset = rotating.offset
            cache._start = rotating.offset - (cache.keys.shape[2] - rotating.keep)
        return cache

    def rotating_state(self) -> tuple[Any, ...]:
        """The state of mlx-lm's cache with the same content, in the order of the positions."""
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
        """Append a step's rows; return what they may see, in the order of :meth:`make_mask`."""
        rows = keys.shape[2]
        if self.keys is None:
            # Without a position yet; _make_room gives them their size.
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

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last ``n`` positions.

        Raises:
            ValueError: positions are gone that the next row would see.
        """
        length = self.offset - n
        if n > 0:
            if not self.reaches_back_to(length):
                raise ValueError(f"the window has moved on too far to be cut to {length} positions")
            self.offset = length
        return n

    def reaches_back_to(self, length: int) -> bool:
        """Whether all is still there that a row after the first ``length`` positions sees."""
        oldest_seen = length + 1 - (self.max_size - self.keep)
        return self._start <= max(self.keep, oldest_seen)

    @property
    def state(self) -> tuple[Any, Any]:
        """What has to be evaluated."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def index(self, position: int) -> int:
        """Where in the buffers the entry of a position stands."""
        return position if position < self.keep else self.keep + position - self._start

    def _cached(self) -> int:
        """How many entries in front of the next rows they may see."""
        entries = self.index(self.offset)
        # Where the first positions are kept the mask hides what lies between.
        return entries if self.keep else min(entries, self.max_size - 1)

    def _make_room(self, rows: int) -> None:
        """If the buffers are full, drop what no row will see and grow them for so many rows."""
        if self.keys is not None and self.index(self.offset) + rows > self.keys.shape[2]:
            self._drop_unseen(math.ceil(rows / _STEP) * _STEP)

    def compact(self) -> None:
        """Drop what no row will see, if that is much: a prefill leaves all its rows."""
        if self.keys is not None and self.keys.shape[2] > self.max_size + _SLACK + _STEP:
            self._drop_unseen(0)

    def _drop_unseen(self, room: int) -> None:
        """Drop what no row will see, and leave room for so many rows."""
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
