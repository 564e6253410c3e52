"""Trial tree steps: does a branching step give what its branches give in a row?"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, create_attention_mask, make_prompt_cache

from ..drafting import DraftTree
from .loading import context_length
from .lockstep import together
from .row_positions import RowPositions
from .step_caches import parts
from .tree_rows import TreeRows

_PREFIX = (3, 1, 4)
_BRANCHES = ((5, 2, 6), (7, 2, 1))
_ROOT = 1
_LONGEST_KNOWN = 2**15  # of a model whose configuration states no longest context


def failing_position(model: nn.Module) -> int | None:
    """The first position tried at which a branching step differs from its branches in a row.

    Tried are offset 0 and steps across every power of two up to the model's longest context,
    where positions that are scaled outside RoPE modules show. None if no step differs. The
    caches of the model have to be such that :mod:`mlxspec.models.step_caches` has one that
    verifies trees for each.
    """
    longest = context_length(model) or _LONGEST_KNOWN
    # Two below a power of two, so that the step's positions lie on both sides of it.
    crossings = [2**k - 2 - len(_PREFIX) for k in range(4, longest.bit_length())]
    noise = together(rounding_noise, model)
    bases = (0, *crossings)
    return next((base for base in bases if not together(tree_agrees, model, base, noise)), None)


def rounding_noise(model: nn.Module) -> float:
    """How far logits of rows computed together lie from those of the rows one by one."""
    tokens = (*_PREFIX, _ROOT, *_BRANCHES[0])
    together, one_by_one = _new_cache(model, 0), _new_cache(model, 0)
    rows = _forward(model, tokens, together)
    singles = mx.concatenate([_forward(model, (token,), one_by_one) for token in tokens])
    return cast(float, mx.max(mx.abs(rows - singles)).item())


def tree_agrees(model: nn.Module, base: int, noise: float) -> bool:
    """Whether a branching step at this offset equals its branches, each in a row."""
    tree = DraftTree.from_branches(_ROOT, _BRANCHES)
    cache = _new_cache(model, base)
    _forward(model, _PREFIX, cache)
    rows = TreeRows(tree)
    for part in parts(cache):
        part.rows = rows
    try:
        with RowPositions(model).follow(rows):
            logits = _forward(model, tree.tokens, cache)
    except (TypeError, ValueError):
        return False  # a RoPE that takes one integer offset only
    depth = len(_BRANCHES[0])
    for index, branch in enumerate(_BRANCHES):
        nodes = mx.array([0, *range(1 + index * depth, 1 + (index + 1) * depth)])
        tokens = (*_PREFIX, _ROOT, *branch)
        expected = _forward(model, tokens, _new_cache(model, base))[len(_PREFIX) :]
        spread = mx.max(expected) - mx.min(expected)
        error = mx.max(mx.abs(logits[nodes] - expected))
        if not (error <= 4 * noise + 1e-4 * spread).item():
            return False
    return True


def _forward(model: nn.Module, tokens: tuple[int, ...], cache: list[Any]) -> mx.array:
    """Logits in float32, (len(tokens), vocabulary)."""
    return model(mx.array(tokens)[None], cache=cache)[0].astype(mx.float32)


def _new_cache(model: nn.Module, base: int) -> list[Any]:
    def shifted(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(shifted, cache.caches))
        return _ShiftedCache(base)

    return [shifted(cache) for cache in make_prompt_cache(model)]


class _ShiftedCache:
    """A cache that claims to stand ``base`` positions further on than what it holds.

    It lets a model be tried at long contexts without the memory of one.
    """

    def __init__(self, base: int) -> None:
        self._base = base
        self._size = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.rows: TreeRows | None = None

    @property
    def offset(self) -> int:
        return self._base + self._size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values, self._size = keys, values, keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is not None:
            return self.rows.mask(self._size, window_size)
        return create_attention_mask(N, self._size, return_array, window_size)
