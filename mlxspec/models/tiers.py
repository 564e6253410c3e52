"""Which drafts a model can verify, found out by trying and not by a list of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..drafting import DraftTree
from .chain_probe import draft_end
from .lockstep import target_for
from .step_caches import TREE_CACHES, can_be_cut, for_steps, parts
from .target import Target, vocabulary_size
from .tier import Tier
from .tree_probe import failing_position
from .trials import finite

_PREFIX = (3, 1, 4)
_DRAFT, _KEPT = (1, 5, 2, 6), 2  # the step's rows, and how many of them stay
_AFTER = (7, 2, 1)

# The mean difference that rounding can make, as a share of the logits' spread. In half precision
# it can send a row to other experts.
_ROUNDING_FLOAT32, _ROUNDING_HALF = 1e-3, 3e-2

_ROWS_DIFFER = "several rows in one forward give other logits than one by one"


@dataclass(frozen=True)
class Finding:
    """A model's tier, and what keeps it from a richer one.

    Attributes:
        tier: of drafts that stand before ``draft_end``.
        reason: in words.
        draft_end: the position from which on it verifies none; None if it does everywhere.
    """

    tier: Tier
    reason: str
    draft_end: int | None = None


def cache_tier(model: nn.Module) -> Tier:
    """What the model's caches allow, without running it; TREE means that trees may work."""
    caches = _caches(model)
    if not all(map(can_be_cut, caches)):
        return Tier.REPLAY
    return Tier.TREE if all(isinstance(cache, TREE_CACHES) for cache in caches) else Tier.CHAIN


def chain_tier(model: nn.Module) -> Tier:
    """What the model verifies of drafts that never branch, found out with a few forwards."""
    tier = Tier.REPLAY if cache_tier(model) is Tier.REPLAY else Tier.CHAIN
    return tier if _verifies_chains(model, tier) else Tier.PLAIN


def find_tier(model: nn.Module, end: int | None) -> Tier:
    """The richest drafts that the model verifies rightly before ``end``, its ``draft_end``."""
    return _find(model, end)[0]


def examine(model: nn.Module) -> Finding:
    """Find out what drafts the model verifies rightly, and what keeps it from richer ones.

    A step of several rows, of which some are rejected, is compared with its tokens one by one;
    a branching step with its branches in a row: at the beginning of a context and, with caches
    that only claim to be so long, wherever a rule for positions may change.
    """
    end = draft_end(model)
    tier, reason = _find(model, end)
    if tier is Tier.PLAIN or end is None:
        return Finding(tier, reason)
    return Finding(tier, f"{reason}; from position {end} on {_ROWS_DIFFER}: no drafts there", end)


def _find(model: nn.Module, end: int | None) -> tuple[Tier, str]:
    """The tier before ``end``, and why it is no richer one."""
    tier = chain_tier(model)
    if tier is Tier.PLAIN:
        return tier, _ROWS_DIFFER
    if tier is Tier.REPLAY:
        names = _names(model, lambda cache: not can_be_cut(cache))
        return tier, f"{names} cannot be cut back: restored after a rejection"
    if cache_tier(model) is Tier.CHAIN:
        names = _names(model, lambda cache: not isinstance(cache, TREE_CACHES))
        return tier, f"{names} can be cut back, but takes no tree's mask"
    position = failing_position(model, end)
    if position is not None:
        return tier, f"a branching step differs from its branches in a row at position {position}"
    return Tier.TREE, "branching steps equal their branches in a row"


def _caches(model: nn.Module) -> list[Any]:
    return parts(map(for_steps, make_prompt_cache(model)))


def _names(model: nn.Module, hinders: Callable[[Any], bool]) -> str:
    return ", ".join(sorted({type(cache).__name__ for cache in _caches(model) if hinders(cache)}))


def _verifies_chains(model: nn.Module, tier: Tier) -> bool:
    """Whether a partly rejected step, and the step after it, give what single tokens give."""
    target = target_for(model, tier, vocabulary_size(model))
    target.prefill(_PREFIX)
    drafted = _step(target, _DRAFT)[:_KEPT]
    target.keep(range(_KEPT))
    together = mx.concatenate([drafted, _step(target, _AFTER)])

    single = target_for(model, tier, vocabulary_size(model))
    single.prefill(_PREFIX)
    rows = []
    for token in (*_DRAFT[:_KEPT], *_AFTER):
        rows.append(_step(single, (token,)))
        single.keep((0,))
    one_by_one = mx.concatenate(rows)
    exact = one_by_one.dtype == mx.float32
    difference = mx.abs(together - one_by_one).astype(mx.float32)
    spread = mx.max(one_by_one) - mx.min(one_by_one)
    bound = (_ROUNDING_FLOAT32 if exact else _ROUNDING_HALF) * spread.astype(mx.float32)
    return cast(bool, (mx.mean(difference) <= bound).item())


def _step(target: Target, tokens: tuple[int, ...]) -> mx.array:
    return finite(target.forward(mx.array(tokens), DraftTree.chain(tokens[0], tokens[1:])))
