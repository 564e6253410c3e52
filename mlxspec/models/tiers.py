"""Which drafts a model can verify, found out by trying and not by a list of names."""

from __future__ import annotations

import enum
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, create_attention_mask, make_prompt_cache

from ..drafting import DraftTree
from .loading import context_length
from .tree_attention import RowPositions, TreeRows


class Tier(enum.Enum):
    """What a target can verify."""

    TREE = "tree"
    """Branching drafts: plain KV caches, and positions that come from RoPE modules alone."""

    CHAIN = "chain"
    """Drafts in a row: every cache can be cut back."""

    PLAIN = "plain"
    """No drafts: some state cannot be cut back (state-space and linear attention)."""


def cache_tier(model: nn.Module) -> Tier:
    """What the model's caches allow, without running it; TREE means that trees may work."""
    caches = make_prompt_cache(model)
    if not all(cache.is_trimmable() for cache in caches):
        return Tier.PLAIN
    return Tier.TREE if all(type(cache) is KVCache for cache in caches) else Tier.CHAIN


def chain_tier(model: nn.Module) -> Tier:
    """What the model can verify of drafts that never branch, which takes no probing."""
    return Tier.PLAIN if cache_tier(model) is Tier.PLAIN else Tier.CHAIN


def find_tier(model: nn.Module) -> Tier:
    """The richest drafts that the model verifies rightly.

    Runs small branching steps, at offset 0 and across every power of two up to the model's
    longest context (where positions scaled outside RoPE modules show), and compares them
    with the same tokens in a row. Costs a few forwards per power of two.
    """
    tier = cache_tier(model)
    if tier is Tier.TREE and not _verifies_trees(model):
        return Tier.CHAIN
    return tier


_PREFIX = (3, 1, 4)
_BRANCHES = ((5, 2, 6), (7, 2, 1))
_ROOT = 1


def _verifies_trees(model: nn.Module) -> bool:
    longest = context_length(model) or 2**15
    # Two below a power of two, so that the step's positions lie on both sides of it.
    crossings = [2**k - 2 - len(_PREFIX) for k in range(4, longest.bit_length())]
    noise = _rounding_noise(model)
    return all(_tree_agrees(model, base, noise) for base in (0, *crossings))


def _rounding_noise(model: nn.Module) -> float:
    """How far logits of rows computed together lie from those of the rows one by one."""
    tokens = (*_PREFIX, _ROOT, *_BRANCHES[0])
    together, one_by_one = _new_cache(model, 0), _new_cache(model, 0)
    rows = _forward(model, tokens, together)
    singles = mx.concatenate([_forward(model, (token,), one_by_one) for token in tokens])
    return cast(float, mx.max(mx.abs(rows - singles)).item())


def _tree_agrees(model: nn.Module, base: int, noise: float) -> bool:
    """Whether a branching step at this offset equals its branches, each in a row."""
    tree = DraftTree.from_branches(_ROOT, _BRANCHES)
    cache = _new_cache(model, base)
    _forward(model, _PREFIX, cache)
    rows = TreeRows(tree)
    for layer_cache in cache:
        layer_cache.rows = rows
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


def _new_cache(model: nn.Module, base: int) -> list[_ShiftedCache]:
    return [_ShiftedCache(base) for _ in make_prompt_cache(model)]


class _ShiftedCache:
    """A cache that claims to stand ``base`` positions further on than what it holds.

    It lets a model be tried at long contexts without the memory of one.
    """

    def __init__(self, base: int) -> None:
        self._base = base
        self._size = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None
        self.rows: TreeRows | None = None

    @property
    def offset(self) -> int:
        return self._base + self._size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._keys is not None and self._values is not None:
            keys = mx.concatenate([self._keys, keys], axis=2)
            values = mx.concatenate([self._values, values], axis=2)
        self._keys, self._values, self._size = keys, values, keys.shape[2]
        return keys, values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is not None:
            return self.rows.mask(self._size, window_size)
        return create_attention_mask(N, self._size, return_array, window_size)
