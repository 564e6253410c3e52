"""The target's choice after each row: argmax, or a sample keyed by its position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..errors import OptionError

_COLDEST = 1e-30  # what a logit difference is divided by without leaving float32


@dataclass(frozen=True)
class SamplingParams:
    """How the target picks a token; the names and meanings are mlx-lm's.

    Attributes:
        temp: temperature; 0 takes the most likely token.
        top_p: keep the smallest set of tokens with this much probability; 0 and 1 keep all.
        top_k: keep this many tokens; 0 keeps all.
        min_p: keep tokens with at least this share of the best one's probability; 0 keeps all.
        seed: with the position of a token, determines its random numbers.

    Raises:
        OptionError: a value is outside its range.
    """

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temp != 0 and not _COLDEST <= self.temp < float("inf"):
            raise OptionError(
                f"temp is {self.temp}: the temperature is 0 (greedy), or {_COLDEST} and above"
            )
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is {getattr(self, name)}: choose it between 0 and 1")
        if self.top_k < 0:
            raise OptionError(f"top_k is {self.top_k}: keep 1 token or more, or 0 for all")
        if not 0 <= self.seed < 2**64:
            raise OptionError(f"seed is {self.seed}: choose it between 0 and 2**64 - 1")


class Chooser:
    """Picks the target's token after each row of a forward.

    Above temperature 0 it samples by the Gumbel-max trick: the filtered logits divided by the
    temperature plus Gumbel noise have their maximum at token t with exactly t's probability.
    The noise of the token at position p is a function of (seed, p) alone, so a token is the
    same whether it was decoded alone, as a row of a draft, or in a branch of a tree.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        if params.temp > 0:
            self._seed_word = mx.random.split(mx.random.key(params.seed))[0, 0].item()

    def choose(self, logits: mx.array, positions: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Choose one token per row.

        Args:
            logits: (rows, vocabulary).
            positions: per row, the absolute position of the token to be chosen, counted from
                the prompt's first token; the row's own position plus one.

        Returns:
            the choices, (rows,), and the log-probabilities before filters and temperature,
            (rows, vocabulary). Both are lazy.
        """
        # mlx-lm takes the argmax of log-probabilities, where rounding can tie what the logits
        # tell apart. Equal output needs the same arithmetic.
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.params.temp == 0:
            return mx.argmax(logprobs, axis=-1), logprobs
        return mx.argmax(self.perturb(logprobs, positions), axis=-1), logprobs

    def perturb(self, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """The values whose argmax is the choice: log-probabilities filtered, tempered, noised.

        Shapes as in :meth:`choose`. At temperature 0 these are the log-probabilities.
        """
        if self.params.temp == 0:
            return logprobs
        filtered = self._filter(logprobs).astype(mx.float32)
        # Relative to the best token, so that a low temperature has the others overflow, not it.
        tempered = (filtered - filtered.max(axis=-1, keepdims=True)) * (1 / self.params.temp)
        return tempered + self._noise(positions, logprobs.shape[-1])

    def _filter(self, logprobs: mx.array) -> mx.array:
        """Set what the filters drop to minus infinity, in mlx-lm's order."""
        params = self.params
        if 0 < params.top_p < 1:
            logprobs = apply_top_p(logprobs, params.top_p)
        if params.min_p > 0:
            logprobs = apply_min_p(logprobs, params.min_p)
        if 0 < params.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, params.top_k)
        return logprobs

    def _noise(self, positions: Sequence[int], vocab_size: int) -> mx.array:
        """Gumbel noise, (rows, vocabulary); rows of one position share theirs."""
        distinct = sorted(set(positions))
        # A key of MLX's counter-based generator is two words: the seed's and the position.
        keys = mx.array([[self._seed_word, position] for position in distinct], dtype=mx.uint32)
        noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
        if distinct == list(positions):
            return noise
        rank = {position: index for index, position in enumerate(distinct)}
        return noise[mx.array([rank[position] for position in positions])]
