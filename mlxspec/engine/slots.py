"""One layer's keys and values of several sequences, side by side in one pair of arrays.

Attention over many short contexts is a few large operations then, and not a few small ones for
each sequence. A sequence's cache stays a cache of its own: it can be read, written and cut alone.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .tree_attention import TreeSteps

_STEP = 256  # positions that the arrays grow by, as mlx-lm's caches do


class Slots:
    """The keys and values of one layer, (slots, heads, positions, head_dim).

    The slots in use are the first ones. MLX writes into these arrays in place, as long as nobody
    keeps a reference to a former state.
    """

    keys: mx.array
    values: mx.array

    def __init__(self) -> None:
        self._shape = 0, 0  # slots, positions

    def put(self, slot: int, cache: KVCache) -> None:
        """Copy a sequence's keys and values into a slot."""
        keys, values = cache.keys_and_values()
        if self._shape == (0, 0):
            self.keys = mx.zeros((0, keys.shape[1], 0, keys.shape[3]), keys.dtype)
            self.values = mx.zeros((0, values.shape[1], 0, values.shape[3]), values.dtype)
        self.make_room(slot + 1, cache.offset)
        self.keys[slot : slot + 1, :, : cache.offset] = keys
        self.values[slot : slot + 1, :, : cache.offset] = values

    def make_room(self, slots: int, positions: int) -> None:
        """Grow to at least so many slots and positions."""
        before = self._shape
        if slots <= before[0] and positions <= before[1]:
            return
        slots = max(slots, before[0])
        positions = before[1] if positions <= before[1] else -(-positions // _STEP) * _STEP

        def grown(array: mx.array) -> mx.array:
            more = [(0, slots - before[0]), (0, 0), (0, positions - before[1]), (0, 0)]
            return mx.pad(array, more)

        self.keys, self.values = grown(self.keys), grown(self.values)
        self._shape = slots, positions

    @property
    def capacity(self) -> int:
        """How many positions there are in all slots."""
        return self._shape[0] * self._shape[1]

    def cut(self, slots: int, positions: int) -> None:
        """Shrink to so many slots, and about so many positions."""
        positions = min(self._shape[1], -(-positions // _STEP) * _STEP)
        self.keys = mx.contiguous(self.keys[:slots, :, :positions])
        self.values = mx.contiguous(self.values[:slots, :, :positions])
        mx.eval(self.keys, self.values)
        self._shape = slots, positions

    def write(self, places: mx.array, end: int, keys: mx.array, values: mx.array) -> None:
        """Write a step's rows into the first slots.

        Args:
            places: where along the positions, (slots, 1, rows, 1).
            end: behind the last of them.
            keys, values: (slots, heads, rows, head_dim).
        """
        self.make_room(0, end)
        unused = self._shape[0] - len(places)
        if unused:
            rows = [(0, unused), (0, 0), (0, 0), (0, 0)]
            places, keys, values = (mx.pad(array, rows) for array in (places, keys, values))
        # In one operation each: writing slot by slot takes two for each sequence and layer.
        self.keys = mx.put_along_axis(self.keys, places, keys, axis=2)
        self.values = mx.put_along_axis(self.values, places, values, axis=2)


class SlotKVCache(TreeSteps):
    """The cache of one sequence, kept in a slot.

    Args:
        slots: of the layer.
        slot: the sequence's.
        offset: how many positions it holds.
    """

    def __init__(self, slots: Slots, slot: int, offset: int) -> None:
        self.slots = slots
        self.slot = slot
        self.offset = offset

    @property
    def place(self) -> slice:  # type: ignore[override]
        """Where along the first axis of the layer's arrays the sequence stands."""
        return slice(self.slot, self.slot + 1)

    def move(self, slot: int) -> None:
        """Move to another slot, which nobody uses."""
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
        """Append a step's rows; returns all keys and values."""
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.slots.make_room(0, self.offset)
        self.slots.keys[self.place, :, start : self.offset] = keys
        self.slots.values[self.place, :, start : self.offset] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        place, held = self.place, slice(self.offset)
        return self.slots.keys[place, :, held], self.slots.values[place, :, held]

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        self.offset -= n
        return n

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        return self.keys_and_values()

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes // len(array) for array in (self.keys, self.values))
