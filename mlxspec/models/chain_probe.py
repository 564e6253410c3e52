"""Trial steps all over a context: do several rows in one forward give what they give one by one?

A model whose RoPE takes its base from a step's last position (dynamic NTK) rotates all rows of a
wide step by it, from the end of its original context on.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from .lockstep import together
from .positions import named_positions, sparse_crossing
from .trials import PREFIX, can_be_shifted, filled, logits, shift, trial_caches

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
