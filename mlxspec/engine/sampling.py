"""Random numbers that depend on seed and position alone, not on what was drawn before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from .params import SamplingParams


class KeyedRandom:
    """The random numbers of one generation.

    A key of MLX's counter-based generator is two words. The second is a position; the first
    stands for the seed, and differs between the purposes that draw at one position.

    Args:
        seed: None draws one from MLX's random state.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            high, low = cast(list[int], mx.random.randint(0, 2**31 - 1, (2,)).tolist())
            seed = high << 32 | low
        seed_word = mx.random.split(mx.random.key(seed))[0, 0].item()
        words = mx.random.split(mx.array([seed_word, 0], dtype=mx.uint32)).flatten()
        self._noise_word, self._coin_word, self._state_word, _ = cast(list[int], words.tolist())

    def gumbel(self, positions: Sequence[int], size: int) -> mx.array:
        """Standard Gumbel noise, (rows, size); rows of one position share theirs."""
        return _by_position(
            self._noise_word, positions, lambda key: mx.random.gumbel((size,), key=key)
        )

    def uniform(self, positions: Sequence[int]) -> mx.array:
        """One number between 0 and 1 for each row, (rows, 1), independent of the noise."""
        return _by_position(
            self._coin_word, positions, lambda key: mx.random.uniform(0, 1, (1,), key=key)
        )

    @contextmanager
    def mlx_state(self, position: int) -> Iterator[None]:
        """Key MLX's random state for what is drawn inside, and restore it."""
        with restored_mlx_state():
            mx.random.seed(self._state_word << 32 | position)
            yield


@contextmanager
def restored_mlx_state() -> Iterator[None]:
    """Leave MLX's random state as it is, whatever is drawn inside.

    A compiled function that draws would leave a state that waits for the function's inputs.
    """
    (key,) = cast(Sequence[mx.array], mx.random.state)
    high, low = cast(list[int], key.tolist())
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)


def _by_position(
    word: int, positions: Sequence[int], draw: Callable[[mx.array], mx.array]
) -> mx.array:
    """Stack ``draw(key)`` for each position, one draw for equal ones."""
    distinct = sorted(set(positions))
    keys = mx.array([[word, position] for position in distinct], dtype=mx.uint32)
    drawn = mx.vmap(draw)(keys)
    if distinct == list(positions):
        return drawn
    rank = {position: index for index, position in enumerate(distinct)}
    return drawn[mx.array([rank[position] for position in positions])]


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
