"""Random numbers that depend on seed and position alone, not on what was drawn before."""

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

from ..drafting.drafter import DraftTree
from .params import LogitsProcessor, Sampler, SamplingParams

if TYPE_CHECKING:
    from .grammar import GrammarState


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


_LONGEST = 2**31 - 1  # that MLX can count back; no context is as long


def processors_of(params: SamplingParams) -> list[LogitsProcessor]:
    """Logit bias and penalties as mlx-lm makes them, then the caller's own processors."""
    return [
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


def reach_of(params: SamplingParams) -> int | None:
    """How many of the context's last tokens the processors look at; None where it may be all."""
    penalties = (
        (params.repetition_penalty, params.repetition_context_size),
        (params.presence_penalty, params.presence_context_size),
        (params.frequency_penalty, params.frequency_context_size),
    )
    sizes = [size for penalty, size in penalties if penalty]
    if params.logits_processors or 0 in sizes:
        return None
    return max(sizes, default=1)


def shaped(
    logits: mx.array, contexts: Sequence[mx.array], processors: Sequence[LogitsProcessor]
) -> mx.array:
    """Run each row through the processors.

    Args:
        logits: (rows, vocabulary).
        contexts: per row, the tokens up to the row's own, (length,).
        processors: called in order with a row's context and logits, (1, vocabulary).
    """
    rows = []
    for index, tokens in enumerate(contexts):
        row = logits[index : index + 1]
        for processor in processors:
            row = processor(tokens, row)
        rows.append(row)
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)


class History:
    """The tokens of the context, and of the paths that a draft tree adds to it.

    Their data type is what mlx-lm's processors see: of the prompt's alone int32, and int64 once
    it is joined with generated ones, which are uint32.

    Args:
        prompt: the tokens that the context begins with.
        reach: how many of the context's last tokens matter, so that a long context costs no
            more than a short one; None for all.
    """

    def __init__(self, prompt: Sequence[int], reach: int | None = None) -> None:
        self._first_kept = -reach if reach else 0
        self._tokens = np.array(prompt, dtype=np.int32)[self._first_kept :]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""
        self._tokens = self._with(tokens)[self._first_kept :]

    def contexts(self, tree: DraftTree, unknown: mx.array | None = None) -> list[mx.array]:
        """What each node's choice follows: the context, and the path from the root to the node.

        Args:
            tree: below the context's last token.
            unknown: the single token, (1,), that follows the context where it is not known yet;
                in place of the tree.
        """
        if unknown is not None:
            return [mx.concatenate([mx.array(self._tokens), unknown.astype(mx.uint32)])]
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return [mx.array(self._with(path) if path else self._tokens) for path in paths]

    def _with(self, tokens: Sequence[int]) -> np.ndarray:
        return np.concatenate([self._tokens, np.array(tokens, dtype=np.uint32)])


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
