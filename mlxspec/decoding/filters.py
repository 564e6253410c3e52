"""Filters of the tokens that may be sampled, in mlx-lm's order."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from .keyed_random import KeyedRandom, restored_mlx_state
from .sampling import SamplingParams


def filtered(
    logprobs: mx.array, positions: Sequence[int], params: SamplingParams, random: KeyedRandom
) -> mx.array:
    """Set what the filters drop to minus infinity.

    Args:
        logprobs: (rows, vocabulary).
        positions: per row, the position of the token to be chosen.
        params: which filters there are.
        random: says at which positions XTC drops tokens.
    """
    if 0 < params.top_p < 1:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p > 0:
        least = min(params.min_tokens_to_keep, logprobs.shape[-1])
        logprobs = apply_min_p(logprobs, params.min_p, least)
    if params.xtc_probability > 0:
        logprobs = _without_top_choices(logprobs, positions, params, random)
    if 0 < params.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, params.top_k)
    return logprobs


def _without_top_choices(
    logprobs: mx.array, positions: Sequence[int], params: SamplingParams, random: KeyedRandom
) -> mx.array:
    """Apply XTC, one coin for each position.

    mlx-lm's function tosses one coin for all rows, from MLX's random state. So it is asked to
    drop tokens always, and the coins are ours.
    """
    with restored_mlx_state():
        dropped = apply_xtc(logprobs, 1.0, params.xtc_threshold, list(params.xtc_special_tokens))
    return mx.where(random.uniform(positions) > params.xtc_probability, logprobs, dropped)
