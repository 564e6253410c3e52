"""Shaping: bias, penalties and logits processors, which see the context of each row."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors

from ..draft.tree import DraftTree
from .params import LogitsProcessor, Sampler, SamplingParams
from .sampling import KeyedRandom, filtered

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
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._processors = processors_of(params)
        self.greedy = params.temp == 0 and params.sampler is None
        """Whether the choice is the most likely token."""
        self.looks_ahead = not params.allows_drafts
        """Whether it is to be asked for one token more than there will be: mlx-lm's plain
        decoding does so, and processor or sampler may count."""
        if not self.greedy:
            self._random = KeyedRandom(params.seed)

    def history(self, prompt: Sequence[int]) -> History | None:
        """What gives :meth:`choose` the contexts in a generation; None without processors."""
        return History(prompt, reach_of(self.params)) if self._processors else None

    def choose(
        self,
        logits: mx.array,
        positions: Sequence[int],
        contexts: Sequence[mx.array] | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Choose one token per row.

        Args:
            logits: (rows, vocabulary).
            positions: per row, the absolute position of the token to be chosen, counted from
                the prompt's first token; the row's own position plus one.
            contexts: per row, the tokens up to the row's own, from :meth:`history`; needed
                where there are processors.

        Returns:
            the choices, (rows,), and the log-probabilities after the processors and before
            filters and temperature, (rows, vocabulary). Both are lazy.
        """
        if self._processors:
            assert contexts is not None
            logits = shaped(logits, contexts, self._processors)
        # mlx-lm takes the argmax of log-probabilities, where rounding can tie what the logits
        # tell apart. Equal output needs the same arithmetic.
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.greedy:
            return mx.argmax(logprobs, axis=-1), logprobs
        if self.params.sampler is not None:
            return self._sampled(self.params.sampler, logprobs, positions), logprobs
        return mx.argmax(self.perturb(logprobs, positions), axis=-1), logprobs

    def perturb(self, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """The values whose argmax is the choice: log-probabilities filtered, tempered, noised.

        Shapes as in :meth:`choose`. At temperature 0 these are the log-probabilities, with a
        sampler of the caller's too, for want of knowledge.
        """
        params = self.params
        if params.temp == 0:
            return logprobs
        kept = filtered(logprobs, positions, params, self._random).astype(mx.float32)
        # Relative to the best token, so that a low temperature has the others overflow, not it.
        tempered = (kept - kept.max(axis=-1, keepdims=True)) * (1 / params.temp)
        return tempered + self._random.gumbel(positions, logprobs.shape[-1])

    def _sampled(self, sampler: Sampler, logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        """Call the caller's sampler row by row, (rows,)."""
        choices = []
        for row, position in enumerate(positions):
            with self._random.mlx_state(position):
                choices.append(mx.array(sampler(logprobs[row : row + 1])).reshape(1))
        return mx.concatenate(choices)
