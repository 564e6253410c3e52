"""mlx-lm's KV caches, made to verify trees and to be cut back to any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .tree_rows import TreeRows


class _TreeSteps:
    """What a tree step asks of a cache whose entries stand in the order of their positions."""

    keys: Any
    values: Any
    offset: int
    rows: TreeRows | None = None
    """The rows of the tree step that is being run."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is None:
            return super().make_mask(N, return_array=return_array, window_size=window_size)  # type: ignore[misc]
        return self.rows.mask(self.offset, window_size)

    def read_rows(self, start: int, rows: Sequence[int]) -> list[mx.array]:
        """Lazy copies of some of the rows that were written from ``start`` on."""
        taken = mx.array(list(rows)) + start
        return [array[..., taken, :] for array in self._arrays()]

    def write_rows(self, start: int, rows: list[mx.array]) -> None:
        """Put rows of :meth:`read_rows` in a row, from ``start`` on."""
        for array, new in zip(self._arrays(), rows, strict=True):
            array[..., start : start + new.shape[-2], :] = new

    def cut(self, length: int) -> None:
        """Forget what stands behind the first ``length`` positions."""
        self.offset = min(self.offset, length)

    def _arrays(self) -> list[mx.array]:
        return [array for _, array in tree_flatten((self.keys, self.values))]


class TreeKVCache(_TreeSteps, KVCache):
    """mlx-lm's plain cache, which during a tree step answers with the tree's mask."""

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> TreeQuantizedKVCache:
        quantized = super().to_quantized(group_size=group_size, bits=bits)
        return TreeQuantizedKVCache.from_state(quantized.state)


class TreeQuantizedKVCache(_TreeSteps, QuantizedKVCache):
    """The same for mlx-lm's quantised cache, whose keys and values are three arrays each."""
