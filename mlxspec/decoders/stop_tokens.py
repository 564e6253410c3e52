"""Tokens that end the output."""

from __future__ import annotations

from collections.abc import Collection

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import OptionError


def stop_token_ids(
    tokenizer: TokenizerWrapper, extra: int | str | Collection[int | str], vocab_size: int
) -> set[int]:
    """The tokenizer's own end tokens, and further ones.

    Args:
        tokenizer: the model's.
        extra: token ids, or texts that are one token: as they stand in the vocabulary
            (``</s>``, ``▁river``), or in plain.
        vocab_size: the number of token ids that the model knows.

    Raises:
        OptionError: one of them is no token of the model.
    """
    ids = set(tokenizer.eos_token_ids)
    for token in [extra] if isinstance(extra, (int, str)) else extra:
        token_id = _id_of(tokenizer, token) if isinstance(token, str) else int(token)
        if token_id is None or not 0 <= token_id < vocab_size:
            raise OptionError(
                f"the stop token {token!r} is no token of the model: give an id from 0 to "
                f"{vocab_size - 1}, the text of one token, or use a stop string"
            )
        ids.add(token_id)
    return ids


def _id_of(tokenizer: TokenizerWrapper, text: str) -> int | None:
    """The id of the token that stands like this in the vocabulary, or that the text becomes."""
    token_id = tokenizer.get_vocab().get(text)
    if token_id is not None:
        return token_id
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None
