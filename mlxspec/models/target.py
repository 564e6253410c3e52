"""The target: an mlx-lm model with the KV cache of one generation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from ..drafting import DraftTree
from .tiers import Tier
from .tree_attention import RowPositions, TreeKVCache, TreeRows

Progress = Callable[[int, int], None]
"""Called with the number of prompt tokens processed so far and the number in all."""


def vocabulary_size(model: nn.Module) -> int:
    """The number of token ids that a model knows, tokens that pad its output layer included."""
    # The graph is built for its shape and never evaluated.
    return model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]


class Target:
    """Runs forwards over rows and keeps the cache at exactly what was accepted.

    Args:
        model: an mlx-lm model.
        tier: what drafts the model can verify, from :func:`mlxspec.models.tiers.find_tier`.
        vocab_size: from :func:`vocabulary_size`.
    """

    def __init__(self, model: nn.Module, tier: Tier, vocab_size: int) -> None:
        self.model = model
        self.tier = tier
        self.vocab_size = vocab_size
        self.cache: list[Any] = make_prompt_cache(model)
        self.length = 0
        """Positions of the context in the cache."""
        if tier is Tier.TREE:
            self.cache = [TreeKVCache() for _ in self.cache]
            self._positions = RowPositions(model)

    @property
    def max_rows(self) -> int:
        """The most rows that a step may have so that the cache can still be cut after it."""
        if self.tier is Tier.PLAIN:
            return 1
        # A rotating cache overwrites its oldest entries from max_size on.
        sizes = [c.max_size for c in self.cache if isinstance(c, RotatingKVCache)]
        return max(1, min(sizes, default=sys.maxsize) - 1 - self.length)

    def prefill(
        self, tokens: Sequence[int], on_progress: Progress | None = None, chunk: int = 2048
    ) -> None:
        """Put prompt tokens into the cache, ``chunk`` at a time (the size bounds the memory)."""
        for start in range(0, len(tokens), chunk):
            if on_progress:
                on_progress(start, len(tokens))
            part = mx.array(list(tokens[start : start + chunk]))
            self.model(part[None], cache=self.cache)
            mx.eval([cache.state for cache in self.cache])
            self.length += part.size
            mx.clear_cache()
        if on_progress:
            on_progress(len(tokens), len(tokens))

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """Run the rows of a tree, without waiting for the result.

        The cache then holds all rows until :meth:`keep` says which of them stay.

        Args:
            tokens: (rows,), the tree's tokens; an array, since a pipelined token is not yet known.
            tree: says how the rows hang together.

        Returns:
            lazy logits, (rows, vocabulary).
        """
        if tree.is_chain:
            return self.model(tokens[None], cache=self.cache)[0]
        rows = TreeRows(tree)
        try:
            for cache in self.cache:
                cache.rows = rows
            with self._positions.follow(rows):
                return self.model(tokens[None], cache=self.cache)[0]
        finally:
            for cache in self.cache:
                cache.rows = None

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, by node index, and forget the others."""
        if rows and rows[-1] != len(rows) - 1:
            for cache in self.cache:
                cache.keep(self.length, rows)
        self.truncate(self.length + len(rows))

    def truncate(self, length: int) -> None:
        """Cut the cache behind the first ``length`` positions.

        Each layer is cut by itself: an interrupted forward leaves some longer than others.
        State that cannot be cut (tier PLAIN) keeps the one token that was dispatched ahead.
        """
        self.length = length
        for cache in self.cache:
            if cache.is_trimmable():
                cache.trim(max(0, cache.offset - length))
