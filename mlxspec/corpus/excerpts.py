"""What followed in other texts where the end of a context stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from .suffix_array import TOKEN_BITS
from .suffix_index import MAX_LENGTH, SEPARATOR, Excerpts, Occurrence

Source = tuple[object, int]
"""Where an excerpt is from: some texts, and the position in them at which it begins."""


class Tokens(Protocol):
    """What arrays and their memory views have in common."""

    def __getitem__(self, places: slice, /) -> Tokens: ...

    def tolist(self) -> list[int]: ...


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
    tokens: list[int] = []
    occurrences, sources = [], []
    for length, position, searched in found[:limit]:
        piece = searched.tokens[position : position + depth].tolist()
        if SEPARATOR in piece:
            del piece[piece.index(SEPARATOR) :]
        if piece and not 0 <= min(piece) <= max(piece) < vocab_size:
            raise DamagedTexts(searched.texts)
        occurrences.append(Occurrence(length, len(tokens)))
        sources.append((searched.texts, position))
        tokens += piece
        tokens.append(SEPARATOR)
    return Excerpts(tokens, occurrences, sources)


_LENGTH = itemgetter(0)
