"""The markers before and after a model's reasoning."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper

_MARKERS = (("[THINK]", "[/THINK]"),)
"""Pairs of tokens that mlx-lm does not know: Mistral's."""


def reasoning_markers(tokenizer: TokenizerWrapper) -> tuple[str, str] | None:
    """The markers before and after a model's reasoning; None if it has none."""
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    vocabulary = tokenizer.get_vocab()
    return next((pair for pair in _MARKERS if all(one in vocabulary for one in pair)), None)
