"""A joint forward: from the rows of several sequences to their logits.

The rows of all sequences are concatenated in the model's row dimension, so operations on single
rows run once for all sequences. The file follows a forward inwards:

1. :class:`Joint` concatenates the rows, with a position each, and runs the model.
2. Each layer gets one :class:`JointCache` or :class:`JointStates` in place of its caches. A
   JointCache computes attention for each sequence over its own cache. JointStates run a recurrent
   block once for each number of rows. (:mod:`mlxspec.engine.patches` makes attention and recurrent
   blocks call them.)
3. If caches of several sequences are in slots, attention over :class:`SlotRows` is one call for
   all plain steps.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from ..drafting.drafter import DraftTree
from .caches import (
    SlotKVCache,
    Slots,
    TreeKVCache,
    TreeRows,
    held_arrays,
    masked_for,
    parts,
    whole_steps,
)
from .patches import Tape, forward_at, install
from .target import Capability, Target

# Contexts in slots are padded to the longest one. Attention may read at most _MOST_PADDING times
# the positions that it needs, plus _SHORT.
_MOST_PADDING, _SHORT = 2, 4096

# The overhead of another call of attention, as rows times positions of a typical layer (32 heads of
# 128): some ten operations on a CPU, a launch on a GPU.
_CALL = 1024


class JointMode(enum.Enum):
    """How several sequences share one forward of a model, the cheapest first."""

    SPLIT = "joint"
    """Attention is computed separately for each sequence."""

    BLOCK = "joint with a block mask"
    """The model computes attention in its own way, over the concatenated keys of all sequences,
    with a mask that hides the sequences from each other."""

    ALONE = "one at a time"
    """Each sequence has forwards of its own."""


class JointRows(NamedTuple):
    """The rows of one sequence in a joint forward.

    Attributes:
        target: the sequence's.
        tokens: (len(tree),), as for :meth:`Target.forward`.
        tree: the tree whose nodes are the rows.
    """

    target: Target
    tokens: mx.array
    tree: DraftTree


class Joint:
    """Forwards of one model over the rows of several sequences.

    Args:
        model: an mlx-lm model.
        mode: the model's, from :func:`mlxspec.engine.capability.joint_mode`; not ``ALONE``.
        spare: the most positions in slots beside those that the contexts would take in caches of
            their own.
    """

    def __init__(self, model: nn.Module, mode: JointMode, spare: int | None = None) -> None:
        self.model = model
        self.mode = mode
        self._spare = math.inf if spare is None else spare
        self._slots: list[Slots] = []
        self._seated: list[Target] = []
        """The targets with caches in slots, in the order of the slots."""
        self._in_slots_only = False
        """Whether these targets have no other caches."""
        install(model)

    def takes(self, target: Target) -> bool:
        """Whether a target can share a forward with others."""
        # Concatenated keys must be of one kind, and models that compute attention in their own way
        # rarely take quantised ones.
        return self.mode is JointMode.SPLIT or not target.quantized

    def forward(self, members: Sequence[JointRows]) -> tuple[mx.array, list[slice]]:
        """Run the rows of several sequences, without waiting for the result.

        Returns:
            lazy logits, (rows of all, vocabulary), and per member the slice of its rows.
        """
        trees = {target: tree for target, _, tree in members}
        self._leave_long_ones()
        in_slots = SlotRows.of(
            [(target.length, trees.get(target)) for target in self._seated],
            all_in_slots=len(members) == len(self._seated) and self._in_slots_only,
        )
        seats = {self._seated[slot]: slot for slot in in_slots.slots} if in_slots else {}
        ordered = sorted(members, key=lambda member: seats.get(member.target, len(self._seated)))
        for target, _, tree in ordered:
            target.begin_forward(tree)
        rows = [tokens for _, tokens, _ in ordered]
        positions: list[int] = []
        with ExitStack() as masked:
            for target, _, tree in ordered:
                positions += [target.length + depth for depth in tree.depths]
                if self.mode is JointMode.BLOCK or not tree.is_chain:
                    mask = TreeRows(tree)
                    masked.enter_context(masked_for(mask, target.trimmable))
            tape = None
            for target, *_, tree in ordered:
                if target.capability is Capability.REPLAY and len(tree) > 1:
                    target.tape = tape = tape or Tape()
            caches = [target.cache for target, *_ in ordered]
            logits, spans = self.logits(rows, positions, caches, in_slots, tape)
        own = {target: span for (target, *_), span in zip(ordered, spans, strict=True)}
        for target, tokens, _ in members:
            if target.head:
                target.head.note(tokens, own[target].start)
        return logits, [own[target] for target, *_ in members]

    def logits(
        self,
        tokens: Sequence[mx.array],
        positions: Sequence[int],
        caches: Sequence[Sequence[Any]],
        in_slots: SlotRows | None = None,
        tape: Tape | None = None,
    ) -> tuple[mx.array, list[slice]]:
        """Run one forward.

        Args:
            tokens: per sequence, (rows,).
            positions: the positions of all rows.
            caches: per sequence, its caches, one per layer.
            in_slots: the rows of the first sequences, if their caches are in slots, in this order.
            tape: records the calls that lead to recurrent states.

        Returns:
            lazy logits, (rows of all, vocabulary), and per sequence the slice of its rows.
        """
        ends = list(itertools.accumulate(map(len, tokens)))
        spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        of_layer = functools.partial(
            _of_layer, spans=spans, mode=self.mode, in_slots=in_slots, tape=tape
        )
        layers = [*map(of_layer, zip(*caches, strict=True))]
        rows = mx.concatenate(list(tokens))
        batch = rows[:, None] if in_slots and in_slots.are_batch else rows[None]
        at = mx.array(list(positions), dtype=mx.int32)
        logits = forward_at(self.model, batch, layers, at, tape)
        return logits.reshape(len(rows), -1), spans

    def join(self, target: Target) -> None:
        """Move a target's caches into slots if that saves time.

        The target may take part in :meth:`forward` in any case.
        """
        layers = [cache for cache in target.cache if type(cache) is TreeKVCache]
        lengths = [target.length, *(other.length for other in self._seated)]
        if (
            self.mode is not JointMode.SPLIT
            or target.options.kv_bits is not None
            or not layers
            or any(cache.keys is None for cache in layers)
            or not self._fit(lengths)
        ):
            return
        slots = self._slots or [Slots() for _ in layers]
        numbers = itertools.count()

        def seated(cache: Any) -> Any:
            if type(cache) is not TreeKVCache:
                return cache
            of_layer = slots[next(numbers)]
            of_layer.put(len(self._seated), cache)
            return SlotKVCache(of_layer, len(self._seated), cache.offset)

        target.use([seated(cache) for cache in target.cache])
        self._slots, self._in_slots_only = slots, len(slots) == len(target.cache)
        self._seated.append(target)

    def leave(self, target: Target, keep: bool = True) -> None:
        """Remove a target.

        Args:
            keep: give it caches of its own again; otherwise it can no longer be used.
        """
        if target not in self._seated:
            return
        slot, last = self._seated.index(target), self._seated.pop()
        if last is not target:
            self._seated[slot] = last
        lengths, kept = [other.length for other in self._seated], []
        # One layer after the other, so that only one is in memory twice.
        for cache, moving in zip(target.cache, last.cache, strict=True):
            if keep:
                kept.append(_unseated(cache))
                mx.eval(held_arrays(parts(kept[-1:])))  # before the slot is reused
            if isinstance(moving, SlotKVCache):
                if last is not target:
                    moving.move(slot)
                if not lengths or moving.slots.capacity > self._most(lengths):
                    moving.slots.cut(len(lengths), max(lengths, default=0))
        target.use(kept)
        mx.eval(target.arrays)
        if not lengths:
            self._slots = []

    def _leave_long_ones(self) -> None:
        """Give caches of their own to the longest contexts, while the others' padding is too much.

        Contexts that share slots grow apart if some of them pause.
        """
        while not self._fit([target.length + 1 for target in self._seated]):
            self.leave(max(self._seated, key=lambda target: target.length))

    def _fit(self, lengths: Sequence[int]) -> bool:
        """Whether contexts of these lengths fit into slots, each padded to the longest."""
        return len(lengths) * whole_steps(max(lengths, default=0)) <= self._most(lengths)

    def _most(self, lengths: Sequence[int]) -> float:
        """The most positions in slots for contexts of these lengths."""
        own = sum(map(whole_steps, lengths))
        return min(_MOST_PADDING * own + _SHORT, own + self._spare)


def joint_for(model: nn.Module, mode: JointMode, spare: int | None = None) -> Joint:
    """A :class:`Joint` of a model, on all machines over which the model is split."""
    leader = getattr(model, "leader", None)
    make = leader.joint if leader else Joint
    return make(model, mode, spare)


def _unseated(cache: Any) -> Any:
    """A cache with the same content outside the slots."""
    if not isinstance(cache, SlotKVCache):
        return cache
    own = TreeKVCache()
    own.update_and_fetch(*cache.keys_and_values())
    return own


def _of_layer(
    members: Sequence[Any],
    spans: Sequence[slice],
    mode: JointMode,
    in_slots: SlotRows | None,
    tape: Tape | None,
) -> Any:
    """Make the stand-in for one layer's caches, from the arguments of :class:`JointCache`."""
    if isinstance(members[0], CacheList):
        lists = zip(*(member.caches for member in members), strict=True)
        return CacheList(*(_of_layer(each, spans, mode, in_slots, tape) for each in lists))
    if isinstance(members[0], ArraysCache):
        return JointStates(members, spans, tape)
    seated = isinstance(members[0], SlotKVCache)
    return JointCache(members, spans, mode, in_slots if seated else None)


class JointCache:
    """Stands in for the caches of one layer, and for their keys and values.

    Args:
        members: per sequence, its cache.
        spans: per sequence, the slice of its rows.
        mode: the model's.
        in_slots: the rows of the first sequences, if their caches are in slots.
    """

    offset = 0
    """0, since rows have absolute positions."""

    def __init__(
        self,
        members: Sequence[Any],
        spans: Sequence[slice],
        mode: JointMode,
        in_slots: SlotRows | None = None,
    ) -> None:
        pairs = list(zip(members, spans, strict=True))
        seated = len(in_slots.slots) if in_slots else 0
        self._seated, self._alone = pairs[:seated], pairs[seated:]
        self._mode = mode
        self._in_slots = in_slots
        self._entries: list[tuple[Any, Any]] = []
        """The keys and values of each sequence whose attention is computed alone."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The masks for :meth:`attend`; with BLOCK, one that hides sequences from each other."""
        masks = [
            cache.make_mask(
                span.stop - span.start, return_array=return_array, window_size=window_size
            )
            for cache, span in self._alone
        ]
        if self._mode is JointMode.BLOCK:
            return _block(masks)
        return [self._in_slots.mask(window_size), *masks] if self._in_slots else masks

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append each sequence's rows to its cache; return the visible keys and values."""
        if self._in_slots:
            self._in_slots.write(self._seated[0][0].slots, keys, values)
            for cache, span in self._seated:
                cache.offset += span.stop - span.start
        # All write before the first reads: with a view of a slot in use, the next write would copy
        # the whole array.
        for cache, span in self._alone:
            cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the sequences hold, for a layer that adds no rows."""
        self._entries = [cache.keys_and_values() for cache, _ in self._alone]
        return self.state

    @property
    def state(self) -> tuple[Any, Any]:
        """The result of the last :meth:`update_and_fetch`, which layers may share."""
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
        """Attention of each sequence over its own keys and values.

        Args:
            attention: mlx-lm's function; the other arguments are its own.
            queries: the queries of all rows, (1, heads, rows, head_dim).
            mask: from :meth:`make_mask`, or one mask for every sequence.

        Returns:
            what ``attention`` returns, for all rows.
        """
        own = functools.partial(attention, scale=scale, sinks=sinks)
        masks = [*mask] if isinstance(mask, list) else [mask] * (1 + len(self._alone))
        outputs = []
        if self._in_slots:
            keys_and_values = self._in_slots.held(self._seated[0][0].slots)
            rows = self._in_slots.spread(queries)
            rows = own(rows, *keys_and_values, cache=None, mask=masks.pop(0))
            outputs.append(self._in_slots.gathered(rows))
        for (member, span), held, own_mask in zip(self._alone, self._entries, masks, strict=False):
            outputs.append(own(queries[:, :, span], *held, cache=member, mask=own_mask))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _block(masks: Sequence[mx.array]) -> mx.array:
    """Combine the masks of all sequences into one, (rows of all, entries of all)."""
    width = sum(mask.shape[-1] for mask in masks)
    rows, start = [], 0
    for mask in masks:
        end = start + mask.shape[-1]
        rows.append(mx.pad(mask, [(0, 0), (start, width - end)]))
        start = end
    return mx.concatenate(rows)


_readers: set[Callable[..., Any]] = set()
"""The blocks that are known to read states themselves."""


class JointStates:
    """Stands in for the recurrent states of one layer.

    A state passes from row to row, so a block cannot run the rows of several sequences one after
    another. Sequences with the same number of rows form a batch.

    Args:
        members: per sequence, its cache.
        spans: per sequence, the slice of its rows; together all rows of the forward, in order.
        tape: the forward's, if it has one.
    """

    def __init__(
        self, members: Sequence[ArraysCache], spans: Sequence[slice], tape: Tape | None = None
    ) -> None:
        self._tape = tape
        batches: dict[Any, list[tuple[ArraysCache, range]]] = {}
        for member, span in zip(members, spans, strict=True):
            begun = tuple(array is not None for array in member.cache)
            own = range(span.start, span.stop)
            batches.setdefault((len(own), begun), []).append((member, own))
        self._batches = [
            ([member for member, _ in batch], mx.array([[*own] for _, own in batch]))
            for batch in batches.values()
        ]
        """Per batch, its caches, and the indices of their rows, (sequences, rows of each)."""
        self._n_rows = spans[-1].stop
        order = [row for batch in batches.values() for _, own in batch for row in own]
        self._places = mx.array(np.argsort(order))
        """Each row's index among the rows of all batches."""

    def make_mask(self, N: int) -> None:
        """None: a batch has no padding to hide."""

    def __getitem__(self, index: int) -> Any:
        raise TypeError("run this block on one batch of sequences at a time")

    def run_block(
        self, block: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        """Call a block: once per batch if it reads states itself, otherwise once.

        Args:
            block: returns one or more arrays.
            args, named: its arguments, one of which is this object. Arrays of all rows,
                (1, rows, …), are split into batches; other arguments are passed on.

        Returns:
            the block's result for all rows.
        """
        if block not in _readers:
            try:
                return block(*args, **named)
            except TypeError:
                _readers.add(block)
        outputs = []
        for members, rows in self._batches:
            states = _joined(members)
            own = functools.partial(self._of_batch, states, rows)
            outputs.append(block(*map(own, args), **{name: own(named[name]) for name in named}))
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
            states: the batch's.
            rows: the indices of its rows, (sequences, rows of each).
            argument: the block's argument for all rows.
        """
        if argument is self:
            return states
        if isinstance(argument, mx.array) and argument.shape[:2] == (1, self._n_rows):
            return argument[0, rows]
        return argument

    def _gathered(self, outputs: Sequence[mx.array]) -> mx.array:
        """Put the batches' outputs, (sequences, rows of each, …), in order, (1, rows, …)."""
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


class SlotRows:
    """The rows of plain steps with caches in slots: one row per slot.

    Args:
        lengths: per slot, the number of positions that its cache holds.
        slots: the slots that have a row. These are the forward's first rows, in this order.
        all_in_slots: whether all layers of all members of the forward are in slots.

    Attributes:
        longest: the number of positions of the longest context, including its row.
        are_batch: whether the rows, one per slot and no others, lie in the model's batch
            dimension. That saves moving them there and back in each layer.
    """

    def __init__(self, lengths: Sequence[int], slots: Sequence[int], all_in_slots: bool) -> None:
        self.slots = slots
        self.longest = max(lengths) + 1
        self._n_slots = len(lengths)
        self._all_used = len(slots) == len(lengths)
        self.are_batch = all_in_slots and self._all_used
        self._lengths = mx.array(list(lengths))[:, None]
        if not self._all_used:
            # A slot without a row gets any other row, and the result is dropped.
            rows = np.searchsorted(slots, range(len(lengths)))
            self._row_of_slot = mx.array(np.minimum(rows, len(slots) - 1))
            self._used = mx.array(list(slots))
        self._masks: dict[int | None, mx.array] = {}

    @classmethod
    def of(
        cls, seated: Sequence[tuple[int, DraftTree | None]], all_in_slots: bool
    ) -> SlotRows | None:
        """The rows to compute together; None if computing each sequence alone takes less time.

        Sequences with drafts are computed alone.

        Args:
            seated: per slot, the number of positions that its cache holds, and the tree of its
                rows, or None if it takes no part.
            all_in_slots: as for the class.
        """
        lengths = [length for length, _ in seated]
        slots = [slot for slot, (_, tree) in enumerate(seated) if tree and len(tree) == 1]
        alone = sum(lengths[slot] + 1 + _CALL for slot in slots)
        if not slots or alone <= len(lengths) * (max(lengths) + 1) + _CALL:
            return None
        return cls(lengths, slots, all_in_slots)

    def write(self, slots: Slots, keys: mx.array, values: mx.array) -> None:
        """Append all rows, (1, heads, rows, dim), to a layer's slots.

        A slot without a row gets an entry, too. Nothing reads it, and the slot's own next row
        overwrites it.
        """
        places = self._lengths[:, None, :, None]
        slots.write(places, self.longest, self.spread(keys), self.spread(values))

    def held(self, slots: Slots) -> tuple[mx.array, mx.array]:
        """A layer's keys and values, including the rows of this forward."""
        held = slice(self._n_slots), slice(None), slice(self.longest)
        return slots.keys[held], slots.values[held]

    def spread(self, rows: mx.array) -> mx.array:
        """All rows, (1, heads, rows, dim), as (slots, heads, 1, dim)."""
        if self.are_batch:
            return rows
        each = rows.transpose(2, 1, 0, 3)
        return each[: self._n_slots] if self._all_used else each[self._row_of_slot]

    def gathered(self, spread: mx.array) -> mx.array:
        """The inverse of :meth:`spread`, for the rows in ``slots`` only."""
        if self.are_batch:
            return spread
        each = spread if self._all_used else spread[self._used]
        return each.transpose(2, 1, 0, 3)

    def mask(self, window_size: int | None) -> mx.array:
        """The rows' mask, (slots, 1, 1, longest); made once for all layers.

        Args:
            window_size: the number of positions that a row sees, including its own; None for all.
        """
        if window_size not in self._masks:
            entries = mx.arange(self.longest)
            seen = entries <= self._lengths
            if window_size is not None:
                seen &= entries > self._lengths - window_size
            self._masks[window_size] = seen[:, None, None]
        return self._masks[window_size]
