"""A joint forward: from the rows of several sequences to their logits.

The rows of all sequences stand side by side in the model's row dimension, so a layer computes what
it does to each row by itself for all at once. The file follows a forward from the outside to the
inside:

1. :class:`Joint` concatenates the rows, with a position each, and runs the model.
2. The model finds one :class:`JointCache` or :class:`JointStates` a layer instead of the caches.
   With a JointCache, attention is computed for each sequence over its own cache. With
   JointStates, a recurrent block runs once for each number of rows.
   (:mod:`mlxspec.engine.patches` makes attention and blocks ask these.)
3. Where caches of several sequences stand in slots, attention over :class:`SlotRows` is one call
   for all plain steps.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList

from ..drafting.drafter import DraftTree
from .caches import SlotKVCache, Slots, TreeKVCache, TreeRows, masked_for
from .patches import forward_at, install
from .tape import Tape
from .target import Capability, Target

# Contexts in slots are padded to the longest. Attention may then read at most _MOST_PADDING times
# what it needs, plus _SHORT positions.
_MOST_PADDING, _SHORT = 2, 4096

# The overhead of one more call of attention, as rows times positions of a usual layer
# (32 heads of 128): some ten operations on a CPU, a launch on a GPU.
_CALL = 1024


class JointMode(enum.Enum):
    """How several sequences share one forward of a model, the cheapest first."""

    SPLIT = "joint"
    """Attention is computed for each sequence by itself."""

    BLOCK = "joint with a block mask"
    """The model computes attention in its own way: over the keys of all sequences, which are
    copied together, with a mask that hides the other sequences'."""

    ALONE = "one at a time"
    """A forward takes the rows of one sequence."""


class JointRows(NamedTuple):
    """The rows of one sequence in a joint forward.

    Attributes:
        target: of the sequence.
        tokens: (len(tree),), as for :meth:`Target.forward`.
        tree: the rows.
    """

    target: Target
    tokens: mx.array
    tree: DraftTree


class Joint:
    """Forwards of one model over the rows of several sequences.

    Args:
        model: an mlx-lm model, which is not split over machines.
        mode: the model's, from :func:`mlxspec.engine.capability.joint_mode`; not ``ALONE``.
    """

    def __init__(self, model: nn.Module, mode: JointMode) -> None:
        self.model = model
        self.mode = mode
        self._slots: list[Slots] = []
        self._seated: list[Target] = []
        """The targets whose caches stand in slots, in the order of these."""
        self._in_slots_only = False
        """Whether these have no other caches."""
        install(model)

    def takes(self, target: Target) -> bool:
        """Whether a target's rows can be in a forward with those of others."""
        # Keys that are copied together have to be of one kind; and models that compute attention
        # in their own way hardly ever take quantised ones.
        return self.mode is JointMode.SPLIT or not target.quantized

    def prefill(self, prompts: Sequence[tuple[Target, Sequence[int]]]) -> None:
        """Put prompt tokens of several sequences into their caches in one forward.

        Args:
            prompts: per sequence its target, with ``prefills_jointly``, and the tokens.
        """
        positions = [target.length + n for target, tokens in prompts for n in range(len(tokens))]
        rows = [mx.array(list(tokens)) for _, tokens in prompts]
        self.logits(rows, positions, [target.cache for target, _ in prompts])
        for target, tokens in prompts:
            target.prefilled(len(tokens))

    def forward(self, members: Sequence[JointRows]) -> tuple[mx.array, list[slice]]:
        """Run the rows of several sequences, without waiting for the result.

        Returns:
            lazy logits, (rows of all, vocabulary), and per member its rows, without those of
            pending tokens.
        """
        trees = {target: _with_pending(target, tree) for target, _, tree in members}
        in_slots = SlotRows.of(
            [(_held(target), trees.get(target)) for target in self._seated],
            all_in_slots=len(members) == len(self._seated) and self._in_slots_only,
        )
        seats = {self._seated[slot]: slot for slot in in_slots.slots} if in_slots else {}
        ordered = sorted(members, key=lambda member: seats.get(member.target, len(self._seated)))
        rows = [target.begin_forward(tokens, tree) for target, tokens, tree in ordered]
        positions: list[int] = []
        with ExitStack() as masked:
            for target, *_ in ordered:
                tree = trees[target]
                positions += [_held(target) + depth for depth in tree.depths]
                if self.mode is JointMode.BLOCK or not tree.is_chain:
                    mask = TreeRows(tree)
                    masked.enter_context(masked_for(mask, target.trimmable))
            tape = None
            for target, *_, tree in ordered:
                if target.capability is Capability.TAPE and len(tree) > 1:
                    target.tape = tape = tape or Tape()
            caches = [target.cache for target, *_ in ordered]
            logits, spans = self.logits(rows, positions, caches, in_slots, tape)
        own = {
            target: slice(span.start + len(target.pending), span.stop)
            for (target, *_), span in zip(ordered, spans, strict=True)
        }
        return logits, [own[target] for target, *_ in members]

    def logits(
        self,
        tokens: Sequence[mx.array],
        positions: Sequence[int],
        caches: Sequence[Sequence[Any]],
        in_slots: SlotRows | None = None,
        tape: Tape | None = None,
    ) -> tuple[mx.array, list[slice]]:
        """One forward.

        Args:
            tokens: per sequence, (rows,).
            positions: of all rows.
            caches: per sequence its caches, one a layer.
            in_slots: the rows of the first sequences, whose caches stand in slots in this order.
            tape: notes the calls that lead to states.

        Returns:
            lazy logits, (rows of all, vocabulary), and per sequence its rows.
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
        """Move a target's caches into slots next to the others' if that saves time.

        It may take part in :meth:`forward` in any case.
        """
        layers = [cache for cache in target.cache if type(cache) is TreeKVCache]
        lengths = [target.length, *(other.length for other in self._seated)]
        if (
            self.mode is not JointMode.SPLIT
            or target.options.kv_bits is not None
            or not layers
            or any(cache.keys is None for cache in layers)
            or len(lengths) * max(lengths) > _MOST_PADDING * sum(lengths) + _SHORT
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
            keep: whether it gets caches of its own again; otherwise it cannot be used any more.
        """
        if target not in self._seated:
            return
        target.use([_unseated(cache) for cache in target.cache] if keep else [])
        mx.eval(target.arrays)  # before the slot is reused
        slot, last = self._seated.index(target), self._seated.pop()
        if last is not target:
            self._seated[slot] = last
            for cache in last.cache:
                if isinstance(cache, SlotKVCache):
                    cache.move(slot)
        self._cut_slots()

    def _cut_slots(self) -> None:
        """Free the memory of sequences that have left, if it is much."""
        held = [
            cache.offset
            for target in self._seated
            for cache in target.cache
            if isinstance(cache, SlotKVCache)
        ]
        if not held:
            self._slots = []
        needed = _MOST_PADDING * _MOST_PADDING * sum(target.length for target in self._seated)
        for slots in self._slots:
            if slots.capacity > needed + _SHORT:
                slots.cut(len(self._seated), max(held))


def _held(target: Target) -> int:
    """How many positions a target's caches hold."""
    return target.length - len(target.pending)


def _with_pending(target: Target, tree: DraftTree) -> DraftTree:
    """The rows of a forward over a tree, pending ones included."""
    if not target.pending:
        return tree
    tokens = (*target.pending, *tree.tokens)  # no draft branches where tokens are pending
    return DraftTree.chain(tokens[0], tokens[1:])


def _unseated(cache: Any) -> Any:
    """A cache of its own with the same content."""
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
    """The stand-in for the caches of one layer; the arguments are those of JointCache."""
    if isinstance(members[0], CacheList):
        lists = zip(*(member.caches for member in members), strict=True)
        return CacheList(*(_of_layer(each, spans, mode, in_slots, tape) for each in lists))
    if isinstance(members[0], ArraysCache):
        return JointStates(members, spans, tape)
    seated = isinstance(members[0], SlotKVCache)
    return JointCache(members, spans, mode, in_slots if seated else None)


class JointCache:
    """Stands in for the caches of one layer, and for the keys and values in them.

    Args:
        members: per sequence its cache.
        spans: per sequence its rows.
        mode: the model's.
        in_slots: the rows of the first sequences, whose caches stand in slots.
    """

    offset = 0
    """Rows have absolute positions."""

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
        """Keys and values of each sequence that is served by itself."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The masks for :meth:`attend`, or one that hides the sequences from each other."""
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
        """Append each sequence's rows to its cache; the keys and values that rows may see."""
        if self._in_slots:
            self._in_slots.write(self._seated[0][0].slots, keys, values)
            for cache, span in self._seated:
                cache.offset += span.stop - span.start
        # All write before the first one reads: a view of a slot in use would make the next write
        # copy the whole array.
        for cache, span in self._alone:
            cache.update_and_fetch(keys[:, :, span], values[:, :, span])
        self._entries = [cache.keys_and_values() for cache, _ in self._alone]
        return self.state

    @property
    def state(self) -> tuple[Any, Any]:
        """What the last :meth:`update_and_fetch` returned; layers may share it."""
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
            attention: mlx-lm's function; its other arguments follow.
            queries: of all rows, (1, heads, rows, head_dim).
            mask: from :meth:`make_mask`, or one for each sequence.

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
    """One mask from those of all sequences, (rows of all, entries of all)."""
    width = sum(mask.shape[-1] for mask in masks)
    rows, start = [], 0
    for mask in masks:
        end = start + mask.shape[-1]
        rows.append(mx.pad(mask, [(0, 0), (start, width - end)]))
        start = end
    return mx.concatenate(rows)


class StateRead(TypeError):
    """A block has read the states of several sequences, and has to run on a batch of them."""


_readers: set[Callable[..., Any]] = set()
"""The blocks that have turned out to read states themselves."""


class JointStates:
    """Stands in for the recurrent states of one layer.

    A state goes from row to row, so the rows of several sequences cannot follow each other in a
    block. Those of sequences with equally many rows become a batch.

    Args:
        members: per sequence its cache.
        spans: per sequence its rows; together they are all rows of the forward, in order.
        tape: of the forward, if it has one.
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
        """The caches of each, and their rows, (sequences, rows of each), among those of all."""
        self._n_rows = spans[-1].stop
        order = [row for batch in batches.values() for _, own in batch for row in own]
        self._places = mx.array(np.argsort(order))
        """Where each row stands among those of the batches, one batch after another."""

    def make_mask(self, N: int) -> None:
        """A batch has no padding to be hidden."""

    def __getitem__(self, index: int) -> Any:
        raise StateRead("the states of several sequences must be read one by one")

    def run_block(
        self, block: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        """Call a block: for each batch, if it reads states itself, and does not just pass them on.

        Args:
            block: returns an array, or several.
            args, named: its arguments. One is this object; arrays of all rows, (1, rows, …), are
                divided, and others passed on.

        Returns:
            as the block, for all rows.
        """
        if block not in _readers:
            try:
                return block(*args, **named)
            except StateRead:
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
            states: of the batch.
            rows: (sequences, rows of each), among the rows of all.
            argument: as the block got it.
        """
        if argument is self:
            return states
        if isinstance(argument, mx.array) and argument.shape[:2] == (1, self._n_rows):
            return argument[0, rows]
        return argument

    def _gathered(self, outputs: Sequence[mx.array]) -> mx.array:
        """The rows of all, (1, rows, …), from the batches' (sequences, rows of each, …)."""
        rows = [output.reshape(-1, *output.shape[2:]) for output in outputs]
        return mx.concatenate(rows)[self._places][None]


def _joined(members: Sequence[ArraysCache]) -> ArraysCache:
    """The states of a batch, one after another along the first axis."""
    joined = ArraysCache(len(members[0].cache))
    joined.cache = [
        None if arrays[0] is None else mx.concatenate(list(arrays))
        for arrays in zip(*(member.cache for member in members), strict=True)
    ]
    return joined


class SlotRows:
    """The rows of plain steps whose caches stand in slots: one row in each slot.

    Args:
        lengths: per slot, how many positions its cache holds.
        slots: those that have a row. These are the first rows of the forward, in this order.
        all_in_slots: whether all members of the forward stand in slots, and all their layers.

    Attributes:
        longest: how many positions the longest context has with its row.
        are_batch: whether the rows stand in the model's batch dimension: one of each slot, and no
            others. That saves moving them there and back in each layer.
    """

    def __init__(self, lengths: Sequence[int], slots: Sequence[int], all_in_slots: bool) -> None:
        self.slots = slots
        self.longest = max(lengths) + 1
        self._n_slots = len(lengths)
        self._all_used = len(slots) == len(lengths)
        self.are_batch = all_in_slots and self._all_used
        self._lengths = mx.array(list(lengths))[:, None]
        if not self._all_used:
            # A slot without a row gets any other's; the result is dropped.
            rows = np.searchsorted(slots, range(len(lengths)))
            self._row_of_slot = mx.array(np.minimum(rows, len(slots) - 1))
            self._used = mx.array(list(slots))
        self._masks: dict[int | None, mx.array] = {}

    @classmethod
    def of(
        cls, seated: Sequence[tuple[int, DraftTree | None]], all_in_slots: bool
    ) -> SlotRows | None:
        """The rows to serve together; None if serving each sequence by itself takes less time.

        Sequences with drafts are served by themselves.

        Args:
            seated: per slot how many positions its cache holds, and the tree of its rows, or None
                if it takes no part.
            all_in_slots: as for the class.
        """
        lengths = [length for length, _ in seated]
        slots = [slot for slot, (_, tree) in enumerate(seated) if tree and len(tree) == 1]
        alone = sum(lengths[slot] + 1 + _CALL for slot in slots)
        if not slots or alone <= len(lengths) * (max(lengths) + 1) + _CALL:
            return None
        return cls(lengths, slots, all_in_slots)

    def write(self, slots: Slots, keys: mx.array, values: mx.array) -> None:
        """Append rows of all, (1, heads, rows, dim), to a layer's slots.

        A slot without a row gets an entry, too: it is never read, and the slot's own next row
        overwrites it.
        """
        places = self._lengths[:, None, :, None]
        slots.write(places, self.longest, self.spread(keys), self.spread(values))

    def held(self, slots: Slots) -> tuple[mx.array, mx.array]:
        """A layer's keys and values, with the rows of this forward."""
        held = slice(self._n_slots), slice(None), slice(self.longest)
        return slots.keys[held], slots.values[held]

    def spread(self, rows: mx.array) -> mx.array:
        """Rows of all, (1, heads, rows, dim), as (slots, heads, 1, dim)."""
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
        """What rows attend to, (slots, 1, 1, longest); made once for all layers.

        Args:
            window_size: how many positions a row sees, its own included; None for all.
        """
        if window_size not in self._masks:
            entries = mx.arange(self.longest)
            seen = entries <= self._lengths
            if window_size is not None:
                seen &= entries > self._lengths - window_size
            self._masks[window_size] = seen[:, None, None]
        return self._masks[window_size]
