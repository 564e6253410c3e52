"""Tree attention over mlx-lm's models as they are.

mlx-lm asks the cache for the attention mask and passes ``cache.offset`` to the RoPE module.
So a tree step needs two things only: a cache that answers with the tree's mask, and, while
the forward is built, RoPE modules that give each row the position of its depth.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..drafting import DraftTree


class TreeRows:
    """Positions and mask of one tree step, shared by all layers.

    Args:
        tree: the tree whose nodes are the rows.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.depths = mx.array(tree.depths, dtype=mx.int32)
        self._ancestors = mx.array(tree.ancestors())
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def __len__(self) -> int:
        return self.depths.size

    def mask(self, offset: int, window_size: int | None) -> mx.array:
        """Each row attends to the cache and to its ancestors, within the window if there is one.

        Args:
            offset: positions in the cache before this step.
            window_size: how many positions a row sees, its own included; None for all.

        Returns:
            bool array, (rows, offset + rows).
        """
        key = (offset, window_size)
        if key not in self._masks:
            cached = mx.ones((len(self), offset), dtype=mx.bool_)
            mask = mx.concatenate([cached, self._ancestors], axis=1)
            if window_size is not None:
                # A window counts positions; siblings share one, so indices would miscount.
                seen_from = offset + self.depths[:, None] - window_size
                positions = mx.concatenate([mx.arange(offset), offset + self.depths])
                mask = mask & (positions[None] > seen_from)
            self._masks[key] = mask
        return self._masks[key]


class TreeKVCache(KVCache):
    """mlx-lm's plain cache, which during a tree step answers with the tree's mask."""

    rows: TreeRows | None = None

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is None:
            return super().make_mask(N, return_array=return_array, window_size=window_size)
        return self.rows.mask(self.offset, window_size)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep some of the rows that were written from ``start`` on, together and in order.

        Their RoPE positions are right already: a row's position is its depth, and kept rows
        have consecutive depths.
        """
        if rows and rows[-1] != len(rows) - 1:
            kept = mx.array(list(rows)) + start
            end = start + len(rows)
            self.keys[..., start:end, :] = self.keys[..., kept, :]
            self.values[..., start:end, :] = self.values[..., kept, :]
        self.offset = start + len(rows)


class _RowRoPE(nn.Module):
    """Stands in for a RoPE module during a tree step: row i gets the position offset + depth_i.

    ``mx.fast.rope`` takes one offset per batch entry, so the rows move onto the batch axis.
    Other threads that run the model meanwhile get what they ask of the module itself.
    """

    def __init__(self, rope: nn.Module, depths: mx.array) -> None:
        super().__init__()
        self._rope = rope
        self._depths = depths
        self._thread = threading.get_ident()

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **kwargs: Any) -> mx.array:
        if threading.get_ident() != self._thread:
            return self._rope(x, offset=offset, **kwargs)
        # x: (1, heads, rows, head_dim) -> (rows, heads, 1, head_dim) and back
        rotated = self._rope(x.transpose(2, 1, 0, 3), offset=offset + self._depths, **kwargs)
        return rotated.transpose(2, 1, 0, 3)


class RowPositions:
    """Gives rows their own positions in a model whose positions come from RoPE modules.

    Generations in several threads may share a model: one tree step at a time has its modules.
    """

    _exchange = threading.Lock()

    def __init__(self, model: nn.Module) -> None:
        with self._exchange:
            self._ropes = [
                (parent, name, child)
                for _, parent in model.named_modules()
                for name, child in parent.children().items()
                if isinstance(child, nn.Module) and "rope" in type(child).__name__.lower()
            ]

    @contextmanager
    def follow(self, rows: TreeRows) -> Iterator[None]:
        """While entered, the model's RoPE modules position each row by its depth.

        The model is as before afterwards, whatever happens in between.
        """
        with self._exchange:
            try:
                for parent, name, rope in self._ropes:
                    setattr(parent, name, _RowRoPE(rope, rows.depths))
                yield
            finally:
                for parent, name, rope in self._ropes:
                    setattr(parent, name, rope)
