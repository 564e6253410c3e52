"""What followed in other texts where the end of a context stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from ..draft.suffix_array import TOKEN_BITS, TOKEN_BYTES
from ..draft.suffix_index import MAX_LENGTH, SEPARATOR, Excerpts, Occurrence

Source = tuple[object, int]
"""Where an excerpt is from: some texts, and the position in them at which it begins."""


class Tokens(Protocol):
    """What arrays and their memory views have in common."""

    def __getitem__(self, places: slice, /) -> Tokens: ...

    def tobytes(self) -> bytes: ...


class Searched(NamedTuple):
    """Texts that can be searched.

    Attributes:
        search: where a context's last tokens stand, up to how many at least: pairs of length and
            position, best first.
        tokens: all of the texts, a SEPARATOR behind each.
        texts: what sources name.
    """

    search: Callable[[Sequence[int], int], Sequence[tuple[int, int]]]
    tokens: Tokens
    texts: object


class DamagedTexts(Exception):
    """Texts hold numbers that make no sense.

    Attributes:
        texts: those.
    """

    def __init__(self, texts: object) -> None:
        super().__init__("texts are damaged")
        self.texts = texts


def excerpts(
    everything: Iterable[Searched],
    tail: Sequence[int],
    limit: int,
    depth: int,
    vocab_size: int = 1 << TOKEN_BITS,
) -> Excerpts:
    """Look a context up in several texts.

    Args:
        everything: the texts, the newest first.
        tail: the context, of which the last tokens count.
        limit: how many excerpts to return at most.
        depth: how many tokens an excerpt has at most.
        vocab_size: all ids are below it. Another one shows that texts are damaged.

    Raises:
        DamagedTexts: some of the texts are.
    """
    tail = tail[-MAX_LENGTH:]
    found: list[tuple[int, int, Searched]] = []
    for searched in everything:
        try:
            matches = searched.search(tail, limit)
        except IndexError as error:
            raise DamagedTexts(searched.texts) from error
        found += [(length, position, searched) for length, position in matches[:limit]]
    found.sort(key=_LENGTH, reverse=True)  # stable: of equal ones the newer come first
    pieces, occurrences, sources = [], [], []
    end = 0
    for length, position, searched in found[:limit]:
        piece = searched.tokens[position : position + depth].tobytes()
        # Bytes are cut and joined faster than lists. A token's highest byte is 0, so that only
        # damaged ones seem to have a SEPARATOR between them.
        piece = piece.partition(_SEPARATOR)[0]
        if len(piece) % TOKEN_BYTES:
            raise DamagedTexts(searched.texts)
        pieces.append(piece + _SEPARATOR)
        occurrences.append(Occurrence(length, end))
        sources.append((searched.texts, position))
        end += len(piece) // TOKEN_BYTES + 1
    tokens = np.frombuffer(b"".join(pieces), np.int32)
    if _largest(tokens) > vocab_size:
        for piece, (texts, _) in zip(pieces, sources, strict=True):
            if _largest(np.frombuffer(piece, np.int32)) > vocab_size:
                raise DamagedTexts(texts)
    return Excerpts(tokens.tolist(), occurrences, sources)


def _largest(tokens: np.ndarray) -> int:
    """One more than the largest id. Without its sign, what is less than a SEPARATOR is huge."""
    return int((tokens.view(np.uint32) + np.uint32(1)).max(initial=0))


_SEPARATOR = np.int32(SEPARATOR).tobytes()
_LENGTH = itemgetter(0)
