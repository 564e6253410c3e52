"""Rows of several sequences in one forward.

The rows of all sequences stand side by side in the model's row dimension, so whatever a layer does
to each row by itself it does to all at once. Every row has its own position, and attention is
computed for each sequence with its own cache: :class:`_JointCache` stands in for the caches of one
layer and hands out keys and values that know their sequences, and mlx-lm's attention function,
which model modules import by name, is made to look for these.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import CacheList

from ..draft.drafter import DraftTree
from .caches import masked_for
from .target import Target
from .tree_attention import RowPositions, TreeRows


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
        self._positions = RowPositions(model)
        if mode is JointMode.SPLIT:
            _dispatch_attention(model)

    def forward(self, members: Sequence[JointRows]) -> list[mx.array]:
        """Run the rows of several sequences, without waiting for the result.

        Returns:
            per member, lazy logits, (rows, vocabulary), as of :meth:`Target.forward`.
        """
        starts = [target.length - len(target.pending) for target, *_ in members]
        rows = [target.begin_forward(tokens, tree) for target, tokens, tree in members]
        trees = [
            TreeRows(tree, target.mask)
            if self.mode is JointMode.BLOCK or not tree.is_chain
            else None
            for target, _, tree in members
        ]
        positions = [
            start + (mx.arange(len(tokens)) if tree is None else tree.depths)
            for start, tokens, tree in zip(starts, rows, trees, strict=True)
        ]
        with ExitStack() as masked:
            for (target, *_), tree in zip(members, trees, strict=True):
                if tree is not None:
                    masked.enter_context(masked_for(tree, target.trimmable))
            logits, spans = self.logits(rows, positions, [target.cache for target, *_ in members])
        return [
            logits[span][len(target.pending) :]
            for (target, *_), span in zip(members, spans, strict=True)
        ]

    def logits(
        self,
        tokens: Sequence[mx.array],
        positions: Sequence[mx.array],
        caches: Sequence[Sequence[Any]],
    ) -> tuple[mx.array, list[slice]]:
        """One forward, per sequence over tokens, their positions and the caches, one a layer.

        Returns:
            lazy logits, (rows of all, vocabulary), and per sequence its rows.
        """
        spans, start = [], 0
        for own in tokens:
            spans.append(slice(start, start + len(own)))
            start += len(own)
        layers = [_joint(members, spans, self.mode) for members in zip(*caches, strict=True)]
        with self._positions.follow(mx.concatenate(list(positions))):
            return self.model(mx.concatenate(list(tokens))[None], cache=layers)[0], spans


def _joint(members: Sequence[Any], spans: Sequence[slice], mode: JointMode) -> Any:
    if isinstance(members[0], CacheList):
        lists = zip(*(member.caches for member in members), strict=True)
        return CacheList(*(_joint(each, spans, mode) for each in lists))
    return _JointCache(members, spans, mode)


class _JointCache:
    """Stands in for the caches of one layer during a joint forward.

    Args:
        members: per sequence its cache.
        spans: per sequence its rows.
        mode: the model's.
    """

    offset = 0
    """Rows have absolute positions."""

    def __init__(self, members: Sequence[Any], spans: Sequence[slice], mode: JointMode) -> None:
        self._members = members
        self._spans = spans
        self._mode = mode
        self._entries: list[tuple[Any, Any]] = []
        if mode is JointMode.BLOCK and hasattr(members[0], "bits"):
            self.bits, self.group_size = members[0].bits, members[0].group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append each sequence's rows to its cache; the keys and values that rows may see."""
        self._entries = [
            member.update_and_fetch(keys[:, :, span], values[:, :, span])
            for member, span in zip(self._members, self._spans, strict=True)
        ]
        return self.state

    @property
    def state(self) -> tuple[Any, Any]:
        """What the last :meth:`update_and_fetch` returned; layers may share it."""
        if self._mode is JointMode.BLOCK:
            keys, values = zip(*self._entries, strict=True)
            return _concatenated(keys), _concatenated(values)
        entries = JointEntries(self._members, self._spans, self._entries)
        return entries, entries

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The masks of all sequences, or one that hides each from the others."""
        masks = [
            member.make_mask(span.stop - span.start, return_array, window_size)
            for member, span in zip(self._members, self._spans, strict=True)
        ]
        return _block(masks) if self._mode is JointMode.BLOCK else JointMask(masks)


class JointMask(NamedTuple):
    """Per sequence the mask of its rows, as its cache makes it."""

    masks: list[Any]


class JointEntries(NamedTuple):
    """In place of one layer's keys, and of its values: those of each sequence."""

    caches: Sequence[Any]
    spans: Sequence[slice]
    entries: list[tuple[Any, Any]]

    def parts(self, mask: Any) -> Iterator[tuple[slice, Any, Any, Any, Any]]:
        """Per sequence its rows, keys, values, cache and mask."""
        masks = mask.masks if isinstance(mask, JointMask) else [mask] * len(self.spans)
        for span, (keys, values), cache, own in zip(
            self.spans, self.entries, self.caches, masks, strict=True
        ):
            yield span, keys, values, cache, own


def _concatenated(parts: Sequence[Any]) -> Any:
    """Keys or values of all sequences; quantised ones are tuples of arrays."""
    if isinstance(parts[0], mx.array):
        return mx.concatenate(list(parts), axis=2)
    return tuple(map(_concatenated, zip(*parts, strict=True)))


def _block(masks: Sequence[mx.array]) -> mx.array:
    """One mask from those of all sequences, (rows of all, entries of all)."""
    width = sum(mask.shape[-1] for mask in masks)
    rows, start = [], 0
    for mask in masks:
        end = start + mask.shape[-1]
        rows.append(mx.pad(mask, [(0, 0), (start, width - end)]))
        start = end
    return mx.concatenate(rows)


_attention: Callable[..., mx.array] = base.scaled_dot_product_attention


def _attention_of_each(
    queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any
) -> mx.array:
    """mlx-lm's attention, or that of each sequence for keys of a joint forward."""
    if not isinstance(keys, JointEntries):
        return _attention(queries, keys, values, *args, **kwargs)
    # cache, scale, mask and sinks, by position or by name
    named = dict(zip(("cache", "scale", "mask", "sinks"), args, strict=False)) | kwargs
    outputs = []
    for span, own_keys, own_values, cache, mask in keys.parts(named.get("mask")):
        own = named | {"cache": cache, "mask": mask}
        outputs.append(_attention(queries[:, :, span], own_keys, own_values, **own))
    return mx.concatenate(outputs, axis=2)


def _dispatch_attention(model: nn.Module) -> None:
    """Let the modules that define a model's layers look for keys of joint forwards."""
    for module in {type(module).__module__ for module in model.modules()}:
        names = vars(sys.modules[module])
        if names.get("scaled_dot_product_attention") is _attention:
            names["scaled_dot_product_attention"] = _attention_of_each
