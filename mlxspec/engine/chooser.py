"""The target's choice after each row: argmax, or a sample keyed by its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .params import Sampler, SamplingParams
from .sampling import KeyedRandom, filtered
from .shaping import History, processors_of, reach_of, shaped

if TYPE_CHECKING:
    from .grammar import GrammarState


class Chooser:
    """Picks the target's token after each row of a forward.

    Above temperature 0 it samples by the Gumbel-max trick: the filtered log-probabilities
    divided by the temperature plus Gumbel noise have their maximum at token t with exactly t's
    probability. The noise of the token at position p is a function of (seed, p) alone, so a
    token is the same whether it was decoded alone, as a row of a draft, or in a branch of a tree.

    Args:
        params: how to pick.
        grammar: what constrains the output, at its beginning; None without a constraint.
    """

    def __init__(self, params: SamplingParams, grammar: GrammarState | None = None) -> None:
        self.params = params
        self.grammar = grammar
        self._processors = processors_of(params)
        self.greedy = params.temp == 0 and params.sampler is None
        """Whether the choice is the most likely token."""
        self.takes_argmax = self.greedy and not self._processors and not grammar
        """Whether it is of the logits as they are: wherever the row stands, whatever it follows."""
        self.looks_ahead = not params.allows_drafts
        """Whether it is asked for one token more than is emitted, as mlx-lm's plain decoding
        does; a processor or sampler may count its calls."""
        if not self.greedy:
            self._random = KeyedRandom(params.seed)

    def history(self, prompt: Sequence[int]) -> History | None:
        """The source of :meth:`choose`'s contexts in a generation; None without processors."""
        return History(prompt, reach_of(self.params)) if self._processors else None

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
            positions: per row, the absolute position of the token to be chosen, counted from
                the prompt's first token; the row's own position plus one.
            contexts: per row, the tokens up to the row's own, from :meth:`history`; needed
                where there are processors.
            allowed: bool, (rows, vocabulary), the tokens that a constraint allows; None for all.

        Returns:
            the choices, (rows,), and the log-probabilities after processors and constraint, before
            filters and temperature, (rows, vocabulary). Both are lazy.
        """
        if self._processors:
            assert contexts is not None
            logits = shaped(logits, contexts, self._processors)
        if allowed is not None:
            # Some token is left, even where a bias forbids all that the constraint allows.
            least = mx.finfo(logits.dtype).min
            logits = mx.where(allowed, mx.maximum(logits, least), -mx.inf)
        # mlx-lm takes the argmax of log-probabilities, in which rounding can make equal what
        # differs in the logits. Equal output needs the same arithmetic.
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.greedy:
            return mx.argmax(logprobs, axis=-1), logprobs
        if self.params.sampler is not None:
            return self._sampled(self.params.sampler, logprobs, positions), logprobs
        return mx.argmax(self.perturb(logprobs, positions), axis=-1), logprobs

    def perturb(self, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """The values whose argmax is the choice: log-probabilities filtered, tempered, noised.

        Shapes as in :meth:`choose`. At temperature 0 these are the log-probabilities, even with
        a sampler of the caller's, since nothing is known of it.
        """
        params = self.params
        if params.temp == 0:
            return logprobs
        kept = filtered(logprobs, positions, params, self._random).astype(mx.float32)
        # Relative to the best token, so that a low temperature makes the others overflow, not it.
        tempered = (kept - kept.max(axis=-1, keepdims=True)) * (1 / params.temp)
        return tempered + self._random.gumbel(positions, logprobs.shape[-1])

    def _sampled(self, sampler: Sampler, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """Call the caller's sampler row by row, (rows,)."""
        choices = []
        for row, position in enumerate(positions):
            with self._random.mlx_state(position):
                choices.append(mx.array(sampler(logprobs[row : row + 1])).reshape(1))
        return mx.concatenate(choices)
