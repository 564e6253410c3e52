"""The markers before and after a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

_MARKERS = (("[THINK]", "[/THINK]"),)
"""Pairs of tokens that mlx-lm does not know: Mistral's."""


def reasoning_markers(tokenizer: TokenizerWrapper) -> tuple[str, str] | None:
    """The markers before and after a model's reasoning; None if it has none."""
    if tokenizer.has_thinking:
        return tokenizer.think_start, tokenizer.think_end
    return next((pair for pair in _MARKERS if has_tokens(tokenizer, pair)), None)


def token_of(tokenizer: TokenizerWrapper, marker: str) -> int | None:
    """The token of a marker; None if it is not a single token."""
    token: int | None = tokenizer.get_vocab().get(marker)
    return token


def has_tokens(tokenizer: TokenizerWrapper, names: Sequence[str]) -> bool:
    """Whether a tokenizer has tokens with these names. This does not copy its vocabulary."""
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    return None not in ids and tokenizer.convert_ids_to_tokens(ids) == [*names]
