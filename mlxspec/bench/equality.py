"""Are two outputs the same, and if not, was it a near tie?

A forward over several rows may sum in another order than a forward over one, so logits can
differ in their last bits. That changes a token only where two of them are as good as equal.
A difference at a near tie is rounding; any other difference is a bug.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..drafting.drafter import DraftTree
from ..engine.params import SamplingParams
from ..engine.sampling import Chooser

NEAR_TIE_FLOAT32 = 1e-4
"""Gap between the two best perturbed logits below which a difference in float32 is rounding."""

NEAR_TIE_SPACINGS = 4
"""The same gap for half precision, in spacings of the data type at the logits' size.

Rounding every operation to half precision moved the gap of the two best logits by up to 2.5
(bfloat16) and 3.3 spacings (float16) against the same weights in float32: 800 positions of the
demo model. Two ways to sum can differ by as much.
"""


@dataclass(frozen=True)
class Difference:
    """Where two outputs part.

    Attributes:
        index: the first token that differs, counted from the output's beginning.
        margin: how far the worse of the two tokens is below the target's best, in perturbed
            logits (see :meth:`mlxspec.engine.sampling.Chooser.perturb`). Infinite where one
            output is a proper prefix of the other: ending early is no rounding.
        bound: the margin below which rounding can have made the difference.
    """

    index: int
    margin: float
    bound: float = NEAR_TIE_FLOAT32

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin < self.bound


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
        return Difference(common, math.inf)
    context = [*prompt, *expected[:index]]
    logits = model(mx.array(context)[None], cache=make_prompt_cache(model))[0, -1:]
    chooser = Chooser(params)
    chooser.begin(context)
    contexts = chooser.contexts(DraftTree.chain(context[-1]))
    _, logprobs = chooser.choose(logits, [len(context)], contexts)
    values = chooser.perturb(logprobs, [len(context)])[0].astype(mx.float32)
    worse = mx.minimum(values[expected[index]], values[actual[index]])
    margin = cast(float, (mx.max(values) - worse).item())
    return Difference(index, margin, near_tie_bound(logits, params))


def near_tie_bound(logits: mx.array, params: SamplingParams) -> float:
    """The margin below which a difference is rounding, for logits of this type and size.

    Args:
        logits: (..., vocabulary), as the model returned them.
        params: a temperature divides the logits, and so multiplies their rounding errors; the
            bound for float32 leaves room for that.
    """
    if logits.dtype == mx.float32:
        return NEAR_TIE_FLOAT32
    size = cast(float, mx.max(mx.abs(logits)).item())
    spacing = 2.0 ** math.floor(math.log2(size)) * mx.finfo(logits.dtype).eps if size else 0.0
    return NEAR_TIE_SPACINGS * spacing / (params.temp or 1.0)
