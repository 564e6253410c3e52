"""Texts as tokens: taken apart, counted and put together for a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..drafting.suffix_index import SEPARATOR
from .place_order import sorted_places
from .store_file import EMPTY, Part

_WORD = 4  # bytes of a token
_SEPARATOR_BYTES = np.int32(SEPARATOR).tobytes()


def as_texts(tokens: Sequence[int], vocab_size: int) -> list[bytes]:
    """Token ids as the bytes of int32, fit to be compared and kept in a dictionary.

    Ids beyond the vocabulary, which a model with spare rows may emit, divide a text. A text of
    one token is left out: nothing can be looked up in it.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    known = (ids >= 0) & (ids < vocab_size)
    return divided(np.where(known, ids, SEPARATOR).astype(np.int32))


def divided(tokens: np.ndarray) -> list[bytes]:
    """The texts between the separators, the empty ones and those of one token left out."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    texts = (text[text != SEPARATOR].tobytes() for text in np.split(tokens, ends))
    return [text for text in texts if len(text) > _WORD]


def joined(texts: Iterable[bytes]) -> Part:
    """The texts with separators behind them, and their places in order."""
    data = b"".join(text + _SEPARATOR_BYTES for text in texts)
    if not data:
        return EMPTY
    tokens = np.frombuffer(data, dtype=np.int32)
    return Part(tokens, sorted_places(tokens))


def newest(texts: dict[bytes, None], max_tokens: int) -> list[bytes]:
    """The last texts that hold no more than ``max_tokens``; of one that is too long, its end."""
    kept: list[bytes] = []
    room = max_tokens * _WORD
    for text in reversed(texts):
        if len(text) > room:
            if not kept:
                kept.append(text[-room:])
            break
        kept.append(text)
        room -= len(text)
    return kept[::-1]


def oldest(texts: Iterable[bytes], max_tokens: int) -> Iterator[bytes]:
    """The first texts, up to ``max_tokens`` tokens; the last one may be cut."""
    room = max_tokens * _WORD
    for text in texts:
        if room <= _WORD:
            return
        yield text[:room]
        room -= len(text)
