"""The token ids of a prompt, as users pass it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import PromptError
from ..models.loading import encode_prompt

Prompt = str | Sequence[int] | mx.array
"""A text, or token ids that are taken as they are."""


def prompt_ids(
    prompt: Prompt, tokenizer: TokenizerWrapper, vocab_size: int, longest: int | None
) -> list[int]:
    """Turn a prompt into token ids.

    Args:
        prompt: text, or token ids.
        tokenizer: the model's.
        vocab_size: the number of token ids that the model knows.
        longest: the model's context in tokens, where it is known.

    Raises:
        PromptError: it is neither text nor token ids, is empty, longer than the context, or
            holds an id that is no token.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty: write a text, or pass the BOS id alone")
        tokens = encode_prompt(tokenizer, prompt)
    else:
        ids: Any = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        try:
            tokens = [operator.index(token) for token in ids]
        except TypeError as error:
            raise PromptError(
                f"the prompt is no row of token ids ({error}): pass a text, or a list of integers"
            ) from error
    if not tokens:
        raise PromptError("the prompt holds no token: pass at least the BOS id")
    if not all(0 <= token < vocab_size for token in tokens):
        unknown = next(token for token in tokens if not 0 <= token < vocab_size)
        raise PromptError(
            f"the prompt holds the id {unknown}: the model's are 0 to {vocab_size - 1}"
        )
    if longest is not None and len(tokens) > longest:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens and the model's context {longest}: "
            "shorten the prompt"
        )
    return tokens
