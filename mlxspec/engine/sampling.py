"""The target's choice after each row: processors, filters, then argmax or a sample.

A token's random numbers depend only on the seed and its position. So the token is the same whether
it is decoded alone, as a row of a draft, or in a branch of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
)

from ..drafting.tree import DraftTree
from .params import SamplingParams

if TYPE_CHECKING:
    from .grammar import Grammar
    from .target import Target

_COLDEST = 1e-30  # the least divisor: differences of logits divided by it stay within float32
_LONGEST = 2**31 - 1  # tokens; MLX's indices go no further

Perturb = Callable[[mx.array, Sequence[int]], mx.array]
"""The type of :meth:`Chooser.perturb`, the method of a generation's chooser."""


class Chooser:
    """Picks the target's token after each row of a forward, for one generation.

    Above temperature 0, it samples by the Gumbel-max trick: it divides the filtered
    log-probabilities by the temperature, adds Gumbel noise and takes the maximum. Each token is
    then taken with exactly its probability. The noise at position p depends only on seed and p: a
    key of MLX's counter-based generator has one word for the seed and the purpose, and one for p.

    Args:
        params: the sampling parameters.
        grammar: the constraint's state at the beginning of the output; None without a constraint.

    Attributes:
        greedy: whether the choice is the most likely token.
        takes_argmax: whether the choice is the argmax of the unprocessed logits.
        looks_ahead: whether to choose one token beyond the last emitted one, as mlx-lm's plain
            decoding does. A processor or sampler that counts its calls would see a difference.
    """

    def __init__(self, params: SamplingParams, grammar: Grammar | None = None) -> None:
        self.params = params
        self.grammar = grammar
        self._processors = [
            *make_logits_processors(
                dict(params.logit_bias) if params.logit_bias else None,
                params.repetition_penalty,
                min(params.repetition_context_size, _LONGEST),
                params.presence_penalty,
                min(params.presence_context_size, _LONGEST),
                params.frequency_penalty,
                min(params.frequency_context_size, _LONGEST),
            ),
            *(params.logits_processors or ()),
        ]
        self.greedy = params.temp == 0 and params.sampler is None
        self.takes_argmax = self.greedy and not self._processors and not grammar
        self.looks_ahead = not params.allows_drafts
        if not self.greedy:
            self._noise_word, self._coin_word, self._state_word = _words(params.seed)

    # Processors get contexts of mlx-lm's data types: int32 for the prompt alone, and int64 once
    # generated tokens, which are uint32, have been appended.

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a generation whose context is ``prompt``."""
        if self._processors:
            self._context = np.array(prompt, dtype=np.int32)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens to the context."""
        if self._processors:
            self._context = self._with(tokens)

    def contexts(self, tree: DraftTree, unknown: mx.array | None = None) -> list[mx.array] | None:
        """The context before each node's choice, for :meth:`choose`; None without processors.

        Args:
            tree: the draft; its root is the context's last token.
            unknown: the token after the context, (1,), if it has not been read yet. The only choice
                is then the one after it, whatever the tree.
        """
        if not self._processors:
            return None
        if unknown is not None:
            return [mx.concatenate([mx.array(self._context), unknown.astype(mx.uint32)])]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return [mx.array(self._with(path) if path else self._context) for path in paths]

    def _with(self, tokens: Sequence[int]) -> np.ndarray:
        return np.concatenate([self._context, np.array(tokens, dtype=np.uint32)])

    def choose(
        self,
        logits: mx.array,
        positions: Sequence[int],
        contexts: Sequence[mx.array] | None = None,
        allowed: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Choose one token per row.

        Args:
            logits: (rows, vocabulary).
            positions: for each row, the position of the token to choose, counted from the prompt's
                first token: the row's own position plus one.
            contexts: for each row, the tokens up to its own, from :meth:`contexts`.
            allowed: bool, (rows, vocabulary): the tokens that a constraint allows; None allows all.

        Returns:
            the choices, (rows,), and the log-probabilities after processors and constraint but
            before filters and temperature, (rows, vocabulary). Both are lazy.
        """
        if self._processors:
            assert contexts is not None
            rows = [logits[row : row + 1] for row in range(len(contexts))]
            for processor in self._processors:
                rows = [processor(*pair) for pair in zip(contexts, rows, strict=True)]
            logits = rows[0] if len(rows) == 1 else mx.concatenate(rows)
        if allowed is not None:
            # Leave a choice even if a bias forbids all tokens that the constraint allows.
            least = mx.finfo(logits.dtype).min
            logits = mx.where(allowed, mx.maximum(logits, least), -mx.inf)
        # mlx-lm takes the argmax of log-probabilities, in which rounding can make different logits
        # equal. To give the same output, the arithmetic must be the same.
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.greedy:
            return mx.argmax(logprobs, axis=-1), logprobs
        if self.params.sampler is None:
            return mx.argmax(self.perturb(logprobs, positions), axis=-1), logprobs
        choices = []
        for row, position in enumerate(positions):
            with restored_mlx_state():
                mx.random.seed(self._state_word << 32 | position)
                choices.append(mx.array(self.params.sampler(logprobs[row : row + 1])).reshape(1))
        return mx.concatenate(choices), logprobs

    def perturb(self, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """The values whose argmax is the choice: filtered, divided by the temperature, plus noise.

        Shapes are as in :meth:`choose`. At temperature 0, the values are the log-probabilities. A
        caller's sampler does not affect them.
        """
        if self.params.temp == 0:
            return logprobs
        kept = self._filtered(logprobs, positions).astype(mx.float32)
        # The best token gets 0, so that at low temperatures only other tokens can overflow.
        tempered = (kept - kept.max(axis=-1, keepdims=True)) / max(self.params.temp, _COLDEST)
        size = logprobs.shape[-1]
        return tempered + _by_position(
            self._noise_word, positions, lambda key: mx.random.gumbel((size,), key=key)
        )

    def _filtered(self, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """Log-probabilities with minus infinity for the tokens that a filter drops."""
        params, size = self.params, logprobs.shape[-1]
        if 0 < params.top_p < 1:
            logprobs = apply_top_p(logprobs, params.top_p)
        if params.min_p > 0:
            logprobs = apply_min_p(logprobs, params.min_p, min(params.min_tokens_to_keep, size))
        if params.xtc_probability > 0:
            # mlx-lm's function draws one random number for all rows, from MLX's random state, to
            # decide whether to drop tokens. Here it always drops them, and each position decides
            # with its own number.
            with restored_mlx_state():
                special = list(params.xtc_special_tokens)
                dropped = apply_xtc(logprobs, 1.0, params.xtc_threshold, special)
            coins = _by_position(
                self._coin_word, positions, lambda key: mx.random.uniform(0, 1, (1,), key=key)
            )
            logprobs = mx.where(coins > params.xtc_probability, logprobs, dropped)
        if 0 < params.top_k < size:
            logprobs = apply_top_k(logprobs, params.top_k)
        return logprobs


def draft_values(logits: mx.array, place: int, target: Target, perturb: Perturb) -> mx.array:
    """The values whose argmax is a draft's next token, with the output's noise at its position.

    With the same noise, the drafting model and the target choose the same token with a probability
    of at least (1 - d) / (1 + d), where d is the total variation distance of their distributions
    (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding", 2024, arXiv 2408.07978).

    Args:
        logits: the drafting model's, for the target's vocabulary, (1, vocabulary).
        place: the number of tokens that have been drafted.
        target: the sequence's target, with no forward dispatched ahead.
        perturb: the method of the sequence's chooser.

    Returns:
        the values, (1, vocabulary), lazy.
    """
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    # The target has not yet run the current token, whose position is the target's length.
    return perturb(logprobs, [target.length + 1 + place])


def _words(seed: int | None) -> list[int]:
    """The first words of a generation's keys: one each for noise, XTC, and a caller's sampler."""
    if seed is None:
        high, low = cast(list[int], mx.random.randint(0, 2**31 - 1, (2,)).tolist())
        seed = high << 32 | low
    word = mx.random.split(mx.random.key(seed))[0, 0].item()
    words = mx.random.split(mx.array([word, 0], dtype=mx.uint32)).flatten()
    return cast(list[int], words.tolist())[:3]


@contextmanager
def restored_mlx_state() -> Iterator[None]:
    """A ``with`` block after which MLX's random state is as before.

    Otherwise, a compiled function that draws random numbers would leave a state that depends on its
    inputs.
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
    """``draw(key)`` for each position, stacked. Rows with the same position share a draw."""
    distinct = sorted(set(positions))
    keys = mx.array([[word, position] for position in distinct], dtype=mx.uint32)
    drawn = mx.vmap(draw)(keys)
    if distinct == list(positions):
        return drawn
    rank = {position: index for index, position in enumerate(distinct)}
    return drawn[mx.array([rank[position] for position in positions])]
