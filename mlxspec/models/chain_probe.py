"""Trial steps all over a context: do several rows in one forward give what they give one by one?

A model whose RoPE takes its base from a step's last position (dynamic NTK) rotates all rows of a
wide step by it, from the end of its original context on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from .lockstep import together
from .positions import crossings, named_positions, sparse_crossing
from .trials import PREFIX, can_be_shifted, filled, logits, shift, trial_caches

_NEAR_NAMED, _ELSEWHERE = 8, 2  # rows of a trial step: a rule that changes little shows in many
_SAMPLES = 3  # of tokens: in half precision some rows come to other experts by rounding

# A difference of logits as a share of their spread that rounding may make where it made none of
# others; in half precision their spacing is wider.
_LEAST_ROUNDING = 1e-4


def draft_end(model: nn.Module) -> int | None:
    """The position from which on a model verifies no drafts; None if none has been found.

    Steps whose rows all stand before it give what their rows give one by one. It is found with
    three or four small forwards for each of the crossings.
    """
    if not can_be_shifted(model):
        return None
    begin = len(PREFIX)

    def errors(
        steps: Sequence[tuple[int, int]], sample: int = 0, fill: bool = False
    ) -> list[float]:
        return together(row_errors, model, steps, sample, fill)

    noise = [errors([(begin, _NEAR_NAMED)], sample)[0] for sample in range(_SAMPLES)]
    spacing = mx.finfo(model(mx.array([[0]]), cache=trial_caches(model)).dtype).eps
    bound = 4 * max(noise) + max(_LEAST_ROUNDING, spacing)

    def agrees(end: int) -> bool:
        return errors([(end - _NEAR_NAMED, _NEAR_NAMED)])[0] <= bound

    named = named_positions(model)
    widths = {place: _NEAR_NAMED if place in named else _ELSEWHERE for place in crossings(model)}
    steps = [(place - rows // 2, rows) for place, rows in widths.items()]
    if (sparse := sparse_crossing(model)) is not None:
        step = sparse - _NEAR_NAMED // 2, _NEAR_NAMED
        if not any(errors([step], sample, True)[0] <= bound for sample in range(_SAMPLES)):
            return 0
    for step, error in zip(steps, errors(steps), strict=True):
        again = (errors([step], sample)[0] for sample in range(1, _SAMPLES))
        if not error <= bound and not any(other <= bound for other in again):
            return _last_true(agrees, below=sum(step))
    return None


def _last_true(agrees: Callable[[int], bool], below: int) -> int:
    """The last end of a step before ``below`` with which it agrees; 0 if there is none."""
    wrong, distance = below, 1
    while (right := wrong - distance) > _NEAR_NAMED + len(PREFIX) and not agrees(right):
        wrong, distance = right, 2 * distance
    if right <= _NEAR_NAMED + len(PREFIX):
        return 0
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if agrees(middle) else (right, middle)
    return right


def row_errors(
    model: nn.Module, steps: Sequence[tuple[int, int]], sample: int, fill: bool
) -> list[float]:
    """How far the rows of steps lie from what they are if the first and the last come alone.

    Args:
        model: the target.
        steps: first position and number of rows of each.
        sample: which tokens to try.
        fill: let the caches hold all positions before a step, in place of claiming them.

    Returns:
        per step the greatest difference of two logits, as a share of the logits' spread.
    """
    before = trial_caches(model)
    logits(model, PREFIX, before)
    tokens = tuple((sample + 1) * (2 * row + 1) % 11 for row in range(_NEAR_NAMED))
    found = []
    for start, rows in steps:
        at_once = copy.deepcopy(before)
        if fill:
            filled(at_once, start)
        else:
            shift(at_once, start - len(PREFIX))
        apart = copy.deepcopy(at_once)
        wide = logits(model, tokens[:rows], at_once)
        pieces = tokens[:1], tokens[1 : rows - 1], tokens[rows - 1 : rows]
        split = mx.concatenate([logits(model, piece, apart) for piece in pieces if piece])
        spread = mx.maximum(mx.max(split) - mx.min(split), 1e-9)
        error = mx.max(mx.abs(wide - split)) / spread
        found.append(cast(float, error.item()))
    return found
