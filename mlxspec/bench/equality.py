"""Are two outputs the same, and if not, was it a near tie?

A forward over several rows may sum in another order than a forward over one, so logits can
differ in their last bits. That changes a token only where two of them are as good as equal.
A difference at a near tie is rounding; any other difference is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..decoding import Chooser, SamplingParams

NEAR_TIE_FLOAT32 = 1e-4
"""Gap between the two best perturbed logits below which a difference in float32 is rounding."""


@dataclass(frozen=True)
class Difference:
    """Where two outputs part.

    Attributes:
        index: the first token that differs, counted from the output's beginning.
        margin: gap between the target's two best perturbed logits there; see
            :meth:`mlxspec.decoding.Chooser.perturb`. Infinite where one output is a proper
            prefix of the other: ending early is no rounding.
    """

    index: int
    margin: float


def first_difference(
    model: nn.Module,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
    params: SamplingParams,
) -> Difference | None:
    """Compare two outputs of one prompt.

    Args:
        model: the target, run once over the common part where the outputs differ.
        prompt: token ids.
        expected: the output of plain decoding.
        actual: the output to be checked.
        params: the sampling of both.

    Returns:
        None if the outputs are equal.
    """
    if list(expected) == list(actual):
        return None
    common = min(len(expected), len(actual))
    index = next((i for i in range(common) if expected[i] != actual[i]), None)
    if index is None:
        return Difference(common, float("inf"))
    context = [*prompt, *expected[:index]]
    logits = model(mx.array(context)[None], cache=make_prompt_cache(model))[0, -1:]
    chooser = Chooser(params)
    _, logprobs = chooser.choose(logits, [len(context)])
    best = mx.topk(chooser.perturb(logprobs, [len(context)])[0], 2)
    return Difference(index, cast(float, mx.abs(best[0] - best[1]).item()))
