"""Shaping: bias, penalties and logits processors, which see the context of each row."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors

from ..drafting.drafter import DraftTree
from .params import LogitsProcessor, SamplingParams

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
