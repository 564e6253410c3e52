"""What drafts a model can verify, found out by trying."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
)

from ..draft.drafter import DraftTree
from .caches import TREE_CACHES, for_steps, is_trimmable, parts
from .positions import crossings, named_positions, sparse_crossing
from .target import Capability, Target, target_for, together, vocabulary_size
from .tree_attention import RowPositions, TreeRows

PREFIX = (3, 1, 4)
"""Tokens in front of a trial step."""

_WITH_POSITIONS = (KVCache, RotatingKVCache, ChunkedKVCache)


def can_be_shifted(model: nn.Module) -> bool:
    """Whether a model has positions, and all its caches can claim others than they hold."""
    caches = parts(make_prompt_cache(model))
    return any(isinstance(cache, _WITH_POSITIONS) for cache in caches) and all(
        isinstance(cache, (*_WITH_POSITIONS, ArraysCache)) for cache in caches
    )


def trial_caches(model: nn.Module) -> list[Any]:
    """New caches of a model; :func:`shift` moves them."""

    def on_trial(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(on_trial, cache.caches))
        return ShiftedCache() if isinstance(cache, KVCache | RotatingKVCache) else cache

    return [on_trial(cache) for cache in make_prompt_cache(model)]


def shift(caches: list[Any], positions: int) -> list[Any]:
    """Let trial caches claim to stand so many positions further on; returns them."""
    for part in parts(caches):
        if isinstance(part, ShiftedCache):
            part.base += positions
        elif isinstance(part, ChunkedKVCache):
            part.offset += positions
            part.start_position += positions
    return caches


def filled(caches: list[Any], length: int) -> list[Any]:
    """Trial caches that hold random entries in front of their own, so many in all."""
    key = mx.random.key(0)
    for part in parts(caches):
        if isinstance(part, ShiftedCache) and part.keys is not None:
            for name in ("keys", "values"):
                own = getattr(part, name)
                shape = (*own.shape[:2], length - own.shape[2], own.shape[3])
                noise = mx.random.normal(shape, own.dtype, key=key)
                setattr(part, name, mx.concatenate([noise, own], axis=2))
            part.size = length
    return caches


def logits(model: nn.Module, tokens: tuple[int, ...], caches: list[Any]) -> mx.array:
    """In float32, (len(tokens), vocabulary)."""
    return finite(model(mx.array(tokens)[None], cache=caches)[0].astype(mx.float32))


def finite(logits: mx.array) -> mx.array:
    """Logits that can be subtracted: 0 for tokens that a model rules out."""
    return mx.where(mx.isinf(logits), 0, logits)


def rounding_noise(model: nn.Module) -> float:
    """How far logits of rows computed together lie from those of the rows one by one."""
    tokens = (*PREFIX, 1, 5, 2, 6)
    together, one_by_one = trial_caches(model), trial_caches(model)
    rows = logits(model, tokens, together)
    singles = mx.concatenate([logits(model, (token,), one_by_one) for token in tokens])
    return cast(float, mx.max(mx.abs(rows - singles)).item())


class ShiftedCache:
    """A cache that claims to stand ``base`` positions further on than what it holds.

    It lets a model be tried at long contexts without the memory of one.
    """

    def __init__(self) -> None:
        self.base = 0
        self.size = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.rows: TreeRows | None = None

    @property
    def offset(self) -> int:
        return self.base + self.size

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values, self.size = keys, values, keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        if self.rows is not None:
            return self.rows.mask(self.size, window_size)
        return create_attention_mask(N, self.size, return_array, window_size)


_BRANCHES = ((5, 2, 6), (7, 2, 1))
_ROOT = 1


def failing_position(model: nn.Module, end: int | None) -> int | None:
    """The first position tried at which a branching step differs from its branches in a row.

    Tried are offset 0 and steps across all crossings, where positions that are scaled outside
    RoPE modules show. None if no step differs. The caches of the model have to be such that
    :mod:`mlxspec.engine.caches` has one that verifies trees for each.

    Args:
        model: the target.
        end: the first position that no step has a row at; None if there are drafts everywhere.
    """
    noise = together(rounding_noise, model)
    # Two below each, so that the step's positions lie on both sides of it.
    bases = [0, *(position - 2 - len(PREFIX) for position in crossings(model))]
    if end is not None:
        bases = [base for base in bases if base + len(PREFIX) + 1 + len(_BRANCHES[0]) <= end]
    if (sparse := sparse_crossing(model)) is not None and (end is None or sparse < end):
        held = sparse - 1 - len(_BRANCHES[0])  # so that the second branch stands behind it
        if not together(tree_agrees, model, 0, noise, held):
            return held
    return next((base for base in bases if not together(tree_agrees, model, base, noise)), None)


def tree_agrees(model: nn.Module, base: int, noise: float, held: int = len(PREFIX)) -> bool:
    """Whether a branching step at this offset equals its branches, each in a row.

    Args:
        model: the target.
        base: the position of the first entry in the cache.
        noise: from :func:`rounding_noise`.
        held: how many entries there are.
    """
    tree = DraftTree.from_branches(_ROOT, _BRANCHES)
    before = shift(trial_caches(model), base)
    logits(model, PREFIX, before)
    if held > len(PREFIX):
        filled(before, held)
    caches = copy.deepcopy(before)
    rows = TreeRows(tree)
    for part in parts(caches):
        part.rows = rows
    try:
        with RowPositions(model).follow(rows):
            found = logits(model, tree.tokens, caches)
    except (TypeError, ValueError):
        return False  # a RoPE that takes one integer offset only
    depth = len(_BRANCHES[0])
    for index, branch in enumerate(_BRANCHES):
        nodes = mx.array([0, *range(1 + index * depth, 1 + (index + 1) * depth)])
        expected = logits(model, (_ROOT, *branch), copy.deepcopy(before))
        spread = mx.max(expected) - mx.min(expected)
        error = mx.max(mx.abs(found[nodes] - expected))
        if not (error <= 4 * noise + 1e-4 * spread).item():
            return False
    return True


_ROWS = 8  # of a trial step: a rule that changes little shows in many
_SAMPLES = 3  # of tokens: in half precision some rows come to other experts by rounding

# A difference of logits as a share of their spread that rounding may make where it made none of
# others; in half precision their spacing is wider.
_LEAST_ROUNDING = 1e-4


def draft_end(model: nn.Module) -> int | None:
    """The position from which on a model verifies no drafts; None if none has been found.

    Steps whose rows all stand before it give what their rows give one by one. Tried are steps
    that lie on both sides of the positions that the model's configuration names, with three or
    four small forwards each.
    """
    if not can_be_shifted(model):
        return None

    def error(step: tuple[int, int], sample: int = 0, fill: bool = False) -> float:
        return together(row_error, model, step, sample, fill)

    spacing = mx.finfo(model(mx.array([[0]]), cache=trial_caches(model)).dtype).eps

    @cache
    def bound(sample: int) -> float:
        """What rounding alone does to these tokens, with room."""
        return 4 * error((len(PREFIX), _ROWS), sample) + max(_LEAST_ROUNDING, spacing)

    def differs(middle: int, fill: bool = False) -> bool:
        step = middle - _ROWS // 2, _ROWS
        return not any(error(step, n, fill) <= bound(n) for n in range(_SAMPLES))

    if (sparse := sparse_crossing(model)) is not None and differs(sparse, fill=True):
        return 0
    for position in sorted(named_positions(model) - _learned_positions(model)):
        if differs(position):
            return _last_true(
                lambda end: error((end - _ROWS, _ROWS)) <= bound(0), below=position + _ROWS // 2
            )
    return None


def _learned_positions(model: nn.Module) -> set[int]:
    """Where tables of learned positions end (GPT-2's): what is read behind them is no position."""
    return {
        module.weight.shape[0]
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
        and any(word in name for word in ("wpe", "pos"))
    }


def first_crossing(model: nn.Module) -> int:
    """The first position that :func:`draft_end` tries; no step before it has to be tried."""
    return min([*named_positions(model), sparse_crossing(model) or sys.maxsize, sys.maxsize])


def _last_true(agrees: Callable[[int], bool], below: int) -> int:
    """The last end of a step before ``below`` with which it agrees; 0 if there is none."""
    wrong, distance, least = below, 1, _ROWS + len(PREFIX)
    while (right := wrong - distance) > least and not agrees(right):
        wrong, distance = right, 2 * distance
    if right <= least:
        return 0
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if agrees(middle) else (right, middle)
    return right


def row_error(model: nn.Module, step: tuple[int, int], sample: int, fill: bool) -> float:
    """How far the rows of a step lie from what they are if the first and the last come alone.

    Args:
        model: the target.
        step: its first position and its number of rows.
        sample: which tokens to try.
        fill: let the caches hold all positions before the step, in place of claiming them.

    Returns:
        the greatest difference of two logits, as a share of the logits' spread.
    """
    start, rows = step
    at_once = trial_caches(model)
    logits(model, PREFIX, at_once)
    if fill:
        filled(at_once, start)
    else:
        shift(at_once, start - len(PREFIX))
    apart = copy.deepcopy(at_once)
    tokens = tuple((sample + 1) * (2 * row + 1) % 11 for row in range(rows))
    wide = logits(model, tokens, at_once)
    pieces = tokens[:1], tokens[1:-1], tokens[-1:]
    split = mx.concatenate([logits(model, piece, apart) for piece in pieces])
    spread = mx.maximum(mx.max(split) - mx.min(split), 1e-9)
    return cast(float, (mx.max(mx.abs(wide - split)) / spread).item())


_PREFIX = (3, 1, 4)
_DRAFT, _KEPT = (1, 5, 2, 6), 2  # the step's rows, and how many of them stay
_AFTER = (7, 2, 1)

# The mean difference that rounding can make, as a share of the logits' spread. In half precision
# it can send a row to other experts.
_ROUNDING_FLOAT32, _ROUNDING_HALF = 1e-3, 3e-2

_ROWS_DIFFER = "several rows in one forward give other logits than one by one"


@dataclass(frozen=True)
class Finding:
    """A model's capability, and what keeps it from a richer one.

    Attributes:
        capability: of drafts that stand before ``draft_end``.
        reason: in words.
        draft_end: the position from which on it verifies none; None if it does everywhere.
    """

    capability: Capability
    reason: str
    draft_end: int | None = None


def cache_capability(model: nn.Module) -> Capability:
    """What the model's caches allow, without running it; TREE means that trees may work."""
    caches = _caches(model)
    if not all(map(is_trimmable, caches)):
        return Capability.REPLAY
    return (
        Capability.TREE
        if all(isinstance(cache, TREE_CACHES) for cache in caches)
        else Capability.CHAIN
    )


def chain_capability(model: nn.Module) -> Capability:
    """What the model verifies of drafts that never branch, found out with a few forwards."""
    capability = (
        Capability.REPLAY if cache_capability(model) is Capability.REPLAY else Capability.CHAIN
    )
    return capability if _verifies_chains(model, capability) else Capability.PLAIN


def find_capability(model: nn.Module, end: int | None) -> Capability:
    """The richest drafts that the model verifies rightly before ``end``, its ``draft_end``."""
    return _find(model, end)[0]


def examine(model: nn.Module) -> Finding:
    """Find out what drafts the model verifies rightly, and what keeps it from richer ones.

    A step of several rows, of which some are rejected, is compared with its tokens one by one;
    a branching step with its branches in a row: at the beginning of a context and, with caches
    that only claim to be so long, wherever a rule for positions may change.
    """
    end = draft_end(model)
    capability, reason = _find(model, end)
    if capability is Capability.PLAIN or end is None:
        return Finding(capability, reason)
    return Finding(
        capability, f"{reason}; from position {end} on {_ROWS_DIFFER}: no drafts there", end
    )


def _find(model: nn.Module, end: int | None) -> tuple[Capability, str]:
    """The capability before ``end``, and why it is no richer one."""
    capability = chain_capability(model)
    if capability is Capability.PLAIN:
        return capability, _ROWS_DIFFER
    if capability is Capability.REPLAY:
        names = _names(model, lambda cache: not is_trimmable(cache))
        return capability, f"{names} cannot be cut back: restored after a rejection"
    if cache_capability(model) is Capability.CHAIN:
        names = _names(model, lambda cache: not isinstance(cache, TREE_CACHES))
        return capability, f"{names} can be cut back, but takes no tree's mask"
    position = failing_position(model, end)
    if position is not None:
        return (
            capability,
            f"a branching step differs from its branches in a row at position {position}",
        )
    return Capability.TREE, "branching steps equal their branches in a row"


def _caches(model: nn.Module) -> list[Any]:
    return parts(map(for_steps, make_prompt_cache(model)))


def _names(model: nn.Module, hinders: Callable[[Any], bool]) -> str:
    return ", ".join(sorted({type(cache).__name__ for cache in _caches(model) if hinders(cache)}))


def _verifies_chains(model: nn.Module, capability: Capability) -> bool:
    """Whether a partly rejected step, and the step after it, give what single tokens give."""
    target = target_for(model, capability, vocabulary_size(model))
    target.prefill(_PREFIX)
    drafted = _step(target, _DRAFT)[:_KEPT]
    target.commit(range(_KEPT))
    together = mx.concatenate([drafted, _step(target, _AFTER)])

    single = target_for(model, capability, vocabulary_size(model))
    single.prefill(_PREFIX)
    rows = []
    for token in (*_DRAFT[:_KEPT], *_AFTER):
        rows.append(_step(single, (token,)))
        single.commit((0,))
    one_by_one = mx.concatenate(rows)
    exact = one_by_one.dtype == mx.float32
    difference = mx.abs(together - one_by_one).astype(mx.float32)
    spread = mx.max(one_by_one) - mx.min(one_by_one)
    bound = (_ROUNDING_FLOAT32 if exact else _ROUNDING_HALF) * spread.astype(mx.float32)
    return cast(bool, (mx.mean(difference) <= bound).item())


def _step(target: Target, tokens: tuple[int, ...]) -> mx.array:
    return finite(target.forward(mx.array(tokens), DraftTree.chain(tokens[0], tokens[1:])))
