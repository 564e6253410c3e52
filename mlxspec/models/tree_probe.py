"""Trial tree steps: does a branching step give what its branches give in a row?"""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn

from ..drafting import DraftTree
from .lockstep import together
from .positions import crossings, sparse_crossing
from .row_positions import RowPositions
from .step_caches import parts
from .tree_rows import TreeRows
from .trials import PREFIX, filled, logits, rounding_noise, shift, trial_caches

_BRANCHES = ((5, 2, 6), (7, 2, 1))
_ROOT = 1


def failing_position(model: nn.Module, end: int | None) -> int | None:
    """The first position tried at which a branching step differs from its branches in a row.

    Tried are offset 0 and steps across all crossings, where positions that are scaled outside
    RoPE modules show. None if no step differs. The caches of the model have to be such that
    :mod:`mlxspec.models.step_caches` has one that verifies trees for each.

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
