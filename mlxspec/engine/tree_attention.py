"""Masks and positions of a tree's rows, shared by all layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import create_attention_mask

from ..draft.drafter import DraftTree

_MASK_STEP = 1024  # positions that the kept mask grows by


class TreeRows:
    """The rows of a tree step.

    Args:
        tree: the tree whose nodes are the rows.
        open_mask: makes the masks over a whole context; shared by all steps of a generation.

    Attributes:
        depths: each row's position after the cache's end, (rows,).
        ancestors: which rows each row attends to, (rows, rows).
    """

    def __init__(self, tree: DraftTree, open_mask: OpenMask | None = None) -> None:
        self.depths = mx.array(tree.depths, dtype=mx.int32)
        self.ancestors = mx.array(tree.ancestors())
        self._open_mask = open_mask or OpenMask()
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def __len__(self) -> int:
        return self.depths.size

    def mask(self, cached: int, window_size: int | None) -> mx.array:
        """Each row attends to the cache and to its ancestors, within the window if there is one.

        Args:
            cached: how many positions stand in the cache in front of the rows.
            window_size: how many positions a row sees, its own included; None for all.

        Returns:
            bool array, (rows, cached + rows).
        """
        key = (cached, window_size)
        if key not in self._masks:
            if window_size is None:
                self._masks[key] = self._open_mask.over(cached, self.ancestors)
            else:
                self._masks[key] = self._window_mask(cached, window_size)
        return self._masks[key]

    def _window_mask(self, cached: int, window_size: int) -> mx.array:
        in_cache = mx.ones((len(self), cached), dtype=mx.bool_)
        mask = mx.concatenate([in_cache, self.ancestors], axis=1)
        # A window counts positions; siblings share one, so indices would miscount.
        seen_from = cached + self.depths[:, None] - window_size
        positions = mx.concatenate([mx.arange(cached), cached + self.depths])
        return mask & (positions[None] > seen_from)


class OpenMask:
    """Masks of the steps after one growing context, kept in one array.

    Between steps all of it is True. So a step's mask only costs writing its own rows' part,
    however long the context is.
    """

    def __init__(self) -> None:
        self._kept = mx.ones((0, 0), dtype=mx.bool_)
        self._written = slice(0, 0), slice(0, 0)

    def over(self, cached: int, ancestors: mx.array) -> mx.array:
        """True for what is in the cache, and ``ancestors`` behind it: (rows, cached + rows)."""
        rows, end = len(ancestors), cached + len(ancestors)
        height, width = self._kept.shape
        if rows > height or end > width:
            shape = max(rows, height), (end // _MASK_STEP + 1) * _MASK_STEP
            self._kept = mx.ones(shape, dtype=mx.bool_)
        else:
            self._kept[self._written] = True
        self._written = slice(0, rows), slice(cached, end)
        self._kept[self._written] = ancestors
        return self._kept[:rows, :end]


class TreeSteps:
    """What a tree step asks of a cache whose entries stand in the order of their positions."""

    offset: int
    rows: TreeRows | None = None
    """The rows of the tree step that is being run."""

    place = slice(None)
    """Where along the first axis of the arrays the sequence stands."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is None:
            return create_attention_mask(N, self.offset, return_array, window_size)
        return self.rows.mask(self.offset, window_size)

    def index(self, position: int) -> int:
        """Where in the arrays the entry of a position stands."""
        return position


class _RowRoPE:
    """Stands in for a RoPE module during a tree step: row i gets the position offset + depth_i.

    ``mx.fast.rope`` takes one offset per batch entry, so the rows move onto the batch axis.
    Other threads that run the model meanwhile are served by the module itself, and so is
    everybody once the step is over.
    """

    def __init__(self, rope: nn.Module, positions: RowPositions) -> None:
        self._rope = rope
        self._positions = positions

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **kwargs: Any) -> mx.array:
        depths = self._positions.depths_here()
        if depths is None:
            return self._rope(x, offset=offset, **kwargs)
        positions = depths if isinstance(offset, int) and offset == 0 else offset + depths
        if len(x) > 1:  # rows of several sequences that are a batch already
            return self._rope(x, offset=positions, **kwargs)
        # x: (1, heads, rows, head_dim) -> (rows, heads, 1, head_dim) and back
        rotated = self._rope(x.transpose(2, 1, 0, 3), offset=positions, **kwargs)
        return rotated.transpose(2, 1, 0, 3)


class RowPositions:
    """Gives rows their own positions in a model whose positions come from RoPE modules.

    Generations in several threads may share a model: one tree step at a time has its modules.
    """

    _exchange = threading.Lock()

    def __init__(self, model: nn.Module) -> None:
        self._step: tuple[int, mx.array] | None = None
        """The thread that runs a tree step, and the depths of its rows, (rows,)."""
        with self._exchange:
            self._ropes = [
                (parent, name, child)
                for _, parent in model.named_modules()
                for name, child in parent.children().items()
                if isinstance(child, nn.Module)
                and "rope" in f"{name} {type(child).__name__}".lower()
                and len(child.modules()) == 1  # none that only has one inside
            ]

    @contextmanager
    def follow(self, depths: mx.array) -> Iterator[None]:
        """While entered, the model's RoPE modules position each row by its depth, (rows,).

        The model computes as before afterwards, whatever happens in between.
        """
        with self._exchange:
            try:
                self._step = threading.get_ident(), depths
                for parent, name, rope in self._ropes:
                    parent[name] = _RowRoPE(rope, self)  # as setattr does, which takes longer
                yield
            finally:
                # First of all, since an interrupt of what follows leaves stand-ins in the model.
                self._step = None
                for parent, name, rope in self._ropes:
                    parent[name] = rope

    def depths_here(self) -> mx.array | None:
        """Of the rows of the tree step that this thread runs; None if it runs none."""
        step = self._step
        return step[1] if step and step[0] == threading.get_ident() else None
