"""Joint forwards: the rows of several sequences in one forward of the model.

The rows of all sequences are concatenated in the model's row dimension, so operations that treat
each row separately run once for all sequences. The file follows a forward from the outside in:

1. :class:`Joint` concatenates the rows, each with its position, and runs the model.
2. Each layer gets one :class:`JointCache` or :class:`JointStates` in place of its caches. A
   JointCache computes the attention of each sequence over its own cache. A JointStates runs a
   recurrent block once for all sequences with the same number of rows. (The wrappers in
   :mod:`mlxspec.engine.patches` make attention and recurrent blocks call these two.)
3. In a plain step of sequences whose caches are all in slots, the rows are in the model's batch
   dimension, and each layer gets one :class:`SlotCaches`. This saves several calls per layer.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from ..drafting.tree import DraftTree
from .caches import (
    SlotKVCache,
    Slots,
    TreeKVCache,
    TreeRows,
    masked_for,
    whole_steps,
)
from .patches import Tape, forward_at, install
from .target import Capability, Target

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

# Contexts in slots are padded to the longest one. Attention may read at most _MOST_PADDING times
# the positions that it needs, plus _SHORT.
_MOST_PADDING, _SHORT = 2, 4096


class JointMode(enum.StrEnum):
    """How several sequences can share one forward of a model; the cheapest mode comes first."""

    SPLIT = "joint"
    """Attention is computed separately for each sequence."""

    BLOCK = "joint with a block mask"
    """The model's own attention runs over the concatenated keys of all sequences, with a mask that
    hides the sequences from each other."""

    ALONE = "one at a time"
    """Sequences share no forward."""


JointRows = tuple[Target, mx.array, DraftTree]
"""The rows of one sequence in a joint forward: its target, and the tokens and the tree as for
:meth:`Target.forward`.
"""


class Joint:
    """Runs forwards of one model over the rows of several sequences.

    Args:
        mode: the model's mode, :attr:`.LoadedModel.joint_mode`; not ``ALONE``.
        spare: the most positions that the slots may hold beyond what separate caches would.
    """

    def __init__(self, loaded: LoadedModel, mode: JointMode, spare: int | None = None) -> None:
        self.loaded, self.model = loaded, loaded.model
        self.mode = mode
        self._spare = math.inf if spare is None else spare
        self._slots: list[Slots] = []
        self._seated: list[Target] = []
        """The targets whose caches are in slots, in the order of the slots."""
        install(self.model)

    def takes(self, target: Target) -> bool:
        """Whether a target can share a forward with others."""
        # Only keys of one kind can be concatenated, and models with their own attention rarely
        # support quantised keys.
        return self.mode is JointMode.SPLIT or not target.quantized

    def forward(self, members: Sequence[JointRows]) -> tuple[mx.array, list[slice]]:
        """Run the rows of several sequences, without waiting for the result.

        Returns:
            lazy logits, (all rows, vocabulary), and for each member the slice of its rows.
        """
        self._leave_long_ones()
        plain = all(len(tree) == 1 for *_, tree in members)
        batch = plain and {target for target, *_ in members} == {*self._seated}
        ordered = [*members]
        if batch:
            ordered.sort(key=lambda member: self._seated.index(member[0]))
        ends = [*itertools.accumulate(len(tree) for *_, tree in ordered)]
        spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        span_of = {target: span for (target, *_), span in zip(ordered, spans, strict=True)}
        positions: list[int] = []
        tape = None
        with ExitStack() as masked:
            for target, _, tree in ordered:
                target.begin_forward(tree)
                positions += [target.length + depth for depth in tree.depths]
                if self.mode is JointMode.BLOCK or not tree.is_chain:
                    masked.enter_context(masked_for(TreeRows(tree), target.trimmable))
                if target.capability is Capability.REPLAY and len(tree) > 1:
                    target.tape = tape = tape or Tape()
            at = mx.array(positions, dtype=mx.int32)
            places, longest = at[:, None, None, None], max(positions) + 1
            layers = [
                SlotCaches(caches, places, longest)
                if batch
                else _of_layer(caches, spans, self.mode, tape)
                for caches in zip(*(target.cache for target, *_ in ordered), strict=True)
            ]
            rows = mx.concatenate([tokens for _, tokens, _ in ordered])
            rows = rows[:, None] if batch else rows[None]
            logits = forward_at(self.model, rows, layers, at, tape, self.loaded.split_from)
        for target, tokens, _ in members:
            if target.head:
                target.head.note(tokens, span_of[target].start)
        return logits.reshape(len(positions), -1), [span_of[target] for target, *_ in members]

    def join(self, target: Target) -> None:
        """Move a target's caches into slots if all of them are plain and the padding stays small.

        Even if they are not moved, the target can take part in :meth:`forward`.
        """
        lengths = [target.length, *(other.length for other in self._seated)]
        plain = all(type(cache) is TreeKVCache and cache.keys is not None for cache in target.cache)
        if (
            self.mode is not JointMode.SPLIT
            or target.options.kv_bits is not None
            or not plain
            or not self._fit(lengths)
        ):
            return
        self._slots = self._slots or [Slots(cache) for cache in target.cache]
        number, seated = len(self._seated), []
        for slots, cache in zip(self._slots, target.cache, strict=True):
            slots.put(number, cache)
            seated.append(SlotKVCache(slots, number, cache.offset))
        target.use(seated)
        self._seated.append(target)

    def leave(self, target: Target) -> None:
        """Remove a target; if its caches are in slots, move them back to separate caches."""
        if target not in self._seated:
            return
        slot, last = self._seated.index(target), self._seated.pop()
        if last is not target:
            self._seated[slot] = last
        lengths, kept = [other.length for other in self._seated], []
        # Layer by layer, so that only one layer is in memory twice.
        for cache, moving in zip(target.cache, last.cache, strict=True):
            new_cache = TreeKVCache()
            new_cache.update_and_fetch(*cache.keys_and_values())
            mx.eval(new_cache.state)  # before the slot is reused
            kept.append(new_cache)
            if last is not target:
                moving.move(slot)
            if not lengths or moving.slots.capacity > self._most(lengths):
                moving.slots.cut(len(lengths), max(lengths, default=0))
        target.use(kept)
        mx.eval(target.arrays)
        if not lengths:
            self._slots = []

    def _leave_long_ones(self) -> None:
        """Move the longest contexts to separate caches until the others need little padding.

        The lengths can drift apart while some sequences pause.
        """
        while not self._fit([target.length + 1 for target in self._seated]):
            self.leave(max(self._seated, key=lambda target: target.length))

    def _fit(self, lengths: Sequence[int]) -> bool:
        """Whether contexts of these lengths fit into slots, each padded to the longest."""
        return len(lengths) * whole_steps(max(lengths, default=0)) <= self._most(lengths)

    def _most(self, lengths: Sequence[int]) -> float:
        """The most positions that the slots may hold for contexts of these lengths."""
        needed = sum(map(whole_steps, lengths))
        return min(_MOST_PADDING * needed + _SHORT, needed + self._spare)


def joint_for(loaded: LoadedModel, mode: JointMode, spare: int | None = None) -> Joint:
    """A :class:`Joint` of a model, on all machines that the model is split over."""
    make = loaded.leader.joint if loaded.leader else Joint
    return make(loaded, mode, spare)


def _of_layer(
    members: Sequence[Any], spans: Sequence[slice], mode: JointMode, tape: Tape | None
) -> Any:
    """The stand-in for one layer's caches. The arguments are as for :class:`JointCache`."""
    if isinstance(members[0], CacheList):
        lists = zip(*(member.caches for member in members), strict=True)
        return CacheList(*(_of_layer(caches, spans, mode, tape) for caches in lists))
    if isinstance(members[0], ArraysCache):
        return JointStates(members, spans, tape)
    return JointCache(members, spans, mode)


class JointCache:
    """Stands in for the caches of one layer, and for their keys and values.

    Args:
        members: the cache of each sequence.
        spans: the slice of each sequence's rows in the forward.
        mode: the model's mode.
    """

    offset = 0
    """0, since the rows' own positions are absolute."""

    def __init__(self, members: Sequence[Any], spans: Sequence[slice], mode: JointMode) -> None:
        self._members = list(zip(members, spans, strict=True))
        self._mode = mode
        self._entries: list[tuple[Any, Any]] = []
        """The keys and values of each sequence whose attention is computed separately."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The sequences' masks, for :meth:`attend`; with BLOCK, one mask for the whole forward."""
        masks = [
            cache.make_mask(
                span.stop - span.start, return_array=return_array, window_size=window_size
            )
            for cache, span in self._members
        ]
        return _block(masks) if self._mode is JointMode.BLOCK else masks

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append each sequence's rows to its cache; return the visible keys and values."""
        # All sequences write before the first one reads, since a write would copy the whole array
        # while a view of some slot is in use.
        for cache, span in self._members:
            cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """The sequences' keys and values, for layers that read them without adding rows."""
        self._entries = [cache.keys_and_values() for cache, _ in self._members]
        return self.state

    @property
    def state(self) -> tuple[Any, Any]:
        """The result of the last :meth:`update_and_fetch`, which other layers may read, too."""
        if self._mode is JointMode.SPLIT:
            return self, self
        keys, values = zip(*self._entries, strict=True)
        return mx.concatenate([*keys], axis=2), mx.concatenate([*values], axis=2)

    def attend(
        self,
        attention: Callable[..., mx.array],
        queries: mx.array,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute the attention of each sequence over its own keys and values.

        Args:
            attention: mlx-lm's function; the other arguments are what it is called with.
            queries: the queries of all rows, (1, heads, rows, head_dim).
            mask: from :meth:`make_mask`, or one mask that applies to each sequence.

        Returns:
            the result of ``attention``, for all rows.
        """
        scaled_attention = functools.partial(attention, scale=scale, sinks=sinks)
        masks = mask if isinstance(mask, list) else [mask] * len(self._members)
        outputs = [
            scaled_attention(queries[:, :, span], *held, cache=member, mask=own_mask)
            for (member, span), held, own_mask in zip(
                self._members, self._entries, masks, strict=True
            )
        ]
        return mx.concatenate(outputs, axis=2)


def _block(masks: Sequence[mx.array]) -> mx.array:
    """Combine the sequences' masks into one that hides them from each other.

    Args:
        masks: for each sequence, (rows, entries).

    Returns:
        (rows of all, entries of all).
    """
    width = sum(mask.shape[-1] for mask in masks)
    rows, start = [], 0
    for mask in masks:
        end = start + mask.shape[-1]
        rows.append(mx.pad(mask, [(0, 0), (start, width - end)]))
        start = end
    return mx.concatenate(rows)


_readers: set[Callable[..., Any]] = set()
"""The blocks that have been found to read recurrent states themselves."""


class JointStates:
    """Stands in for the recurrent states of one layer.

    A block passes its state from row to row, so the rows of several sequences cannot follow each
    other in one call. Instead, sequences with the same number of rows form a batch.

    Args:
        members: the cache of each sequence.
        spans: the slice of each sequence's rows. Together they are all rows of the forward, in
            order.
        tape: the forward's tape, if it has one.
    """

    def __init__(
        self, members: Sequence[ArraysCache], spans: Sequence[slice], tape: Tape | None = None
    ) -> None:
        self._tape = tape
        batches: dict[Any, list[tuple[ArraysCache, range]]] = {}
        for member, span in zip(members, spans, strict=True):
            begun = tuple(array is not None for array in member.cache)
            rows = range(span.start, span.stop)
            batches.setdefault((len(rows), begun), []).append((member, rows))
        self._batches = [
            ([member for member, _ in batch], mx.array([[*rows] for _, rows in batch]))
            for batch in batches.values()
        ]
        """For each batch, its caches, and the indices of its rows, (sequences, rows of each)."""
        self._n_rows = spans[-1].stop
        order = [row for batch in batches.values() for _, rows in batch for row in rows]
        self._places = mx.array(np.argsort(order))
        """For each row of the forward, its index when the rows of all batches are concatenated."""

    def make_mask(self, N: int) -> None:
        """Return None: a batch has no padding to hide."""

    def __getitem__(self, index: int) -> Any:
        raise TypeError("run this block on one batch of sequences at a time")

    def run_block(
        self, block: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call a block: once per batch if it reads states itself, otherwise once.

        Args:
            block: returns one or more arrays.
            args, kwargs: its arguments, one of which is this object. Arrays with all rows,
                (1, rows, …), are split into batches; other arguments are passed on unchanged.

        Returns:
            the block's result for all rows.
        """
        if block not in _readers:
            try:
                return block(*args, **kwargs)
            except TypeError:
                _readers.add(block)
        outputs = []
        for members, rows in self._batches:
            states = _joined(members)
            pick = functools.partial(self._of_batch, states, rows)
            outputs.append(block(*map(pick, args), **{name: pick(kwargs[name]) for name in kwargs}))
            if self._tape:
                self._tape.assign(states.cache, members, rows.shape[1])
            for place, member in enumerate(members):
                member.cache = [
                    None if array is None else array[place : place + 1] for array in states.cache
                ]
        if isinstance(outputs[0], mx.array):
            return self._gathered(outputs)
        return tuple(map(self._gathered, zip(*outputs, strict=True)))

    def _of_batch(self, states: ArraysCache, rows: mx.array, argument: Any) -> Any:
        """A block's argument for one batch.

        Args:
            states: the batch's states.
            rows: the indices of the batch's rows, (sequences, rows of each).
            argument: the block's argument for all rows.
        """
        if argument is self:
            return states
        if isinstance(argument, mx.array) and argument.shape[:2] == (1, self._n_rows):
            return argument[0, rows]
        return argument

    def _gathered(self, outputs: Sequence[mx.array]) -> mx.array:
        """Arrange the batches' outputs, (sequences, rows of each, …), in the order of the rows,
        (1, rows, …).
        """
        rows = [output.reshape(-1, *output.shape[2:]) for output in outputs]
        return mx.concatenate(rows)[self._places][None]


def _joined(members: Sequence[ArraysCache]) -> ArraysCache:
    """The states of a batch, concatenated along the first axis."""
    joined = ArraysCache(len(members[0].cache))
    joined.cache = [
        None if arrays[0] is None else mx.concatenate(list(arrays))
        for arrays in zip(*(member.cache for member in members), strict=True)
    ]
    return joined


class SlotCaches:
    """One layer's caches of all slots, as a single cache for a step with one row per slot.

    Args:
        members: the cache of each slot.
        places: the position of each slot's row, (slots, 1, 1, 1).
        longest: the largest of these positions plus 1.
    """

    offset = 0
    """0, since the rows' own positions are absolute."""

    def __init__(self, members: Sequence[SlotKVCache], places: mx.array, longest: int) -> None:
        self._members = members
        self._places, self._longest = places, longest

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The rows' mask, (slots, 1, 1, longest)."""
        entries = mx.arange(self._longest)
        seen = entries <= self._places
        if window_size is not None:
            seen &= entries > self._places - window_size
        return seen

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one row per slot, (slots, heads, 1, head_dim); return all keys and values."""
        slots = self._members[0].slots
        slots.write(self._places, self._longest, keys, values)
        for member in self._members:
            member.offset += 1
        held = slice(len(self._members)), slice(None), slice(self._longest)
        return slots.keys[held], slots.values[held]
