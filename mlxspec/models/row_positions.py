"""A position for each row of a tree step, in mlx-lm's models as they are.

mlx-lm asks the cache for the attention mask and passes ``cache.offset`` to the RoPE module.
So a tree step needs two things only: a cache that answers with the tree's mask, and, while
the forward is built, RoPE modules that give each row the position of its depth.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .tree_rows import TreeRows


class _TreeStep:
    """The tree step that all stand-ins of a model are there for.

    Attributes:
        depths: of its rows, (rows,); None when it is over.
        thread: runs it.
    """

    def __init__(self, depths: mx.array) -> None:
        self.depths: mx.array | None = depths
        self.thread = threading.get_ident()


class _RowRoPE(nn.Module):
    """Stands in for a RoPE module during a tree step: row i gets the position offset + depth_i.

    ``mx.fast.rope`` takes one offset per batch entry, so the rows move onto the batch axis.
    Other threads that run the model meanwhile get what they ask of the module itself, and so
    does everybody when the step is over.
    """

    def __init__(self, rope: nn.Module, step: _TreeStep) -> None:
        super().__init__()
        self._rope = rope
        self._step = step

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **kwargs: Any) -> mx.array:
        depths = self._step.depths
        if depths is None or threading.get_ident() != self._step.thread:
            return self._rope(x, offset=offset, **kwargs)
        # x: (1, heads, rows, head_dim) -> (rows, heads, 1, head_dim) and back
        rotated = self._rope(x.transpose(2, 1, 0, 3), offset=offset + depths, **kwargs)
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
                if isinstance(child, nn.Module)
                and "rope" in f"{name} {type(child).__name__}".lower()
                and len(child.modules()) == 1  # none that only has one inside
            ]

    @contextmanager
    def follow(self, rows: TreeRows) -> Iterator[None]:
        """While entered, the model's RoPE modules position each row by its depth.

        The model computes as before afterwards, whatever happens in between.
        """
        step = _TreeStep(rows.depths)
        with self._exchange:
            try:
                for parent, name, rope in self._ropes:
                    setattr(parent, name, _RowRoPE(rope, step))
                yield
            finally:
                # First of all: an interrupt of what follows leaves stand-ins in the model.
                step.depths = None
                for parent, name, rope in self._ropes:
                    setattr(parent, name, rope)
