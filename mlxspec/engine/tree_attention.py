"""Masks of a tree's rows, shared by all layers."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from ..drafting.drafter import DraftTree

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
