"""What followed in other texts where the end of a context stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

from ..draft.suffix_array import TOKEN_BITS
from ..draft.suffix_index import MAX_LENGTH, SEPARATOR, Excerpts, Occurrence

DEPTH = 48
"""Tokens of an excerpt: as deep as drafts go."""


class Source(NamedTuple):
    """Where an excerpt is from: the texts, and the position in them at which it begins."""

    texts: object
    position: int


class Tokens(Protocol):
    """What arrays and their memory views have in common."""

    def __getitem__(self, places: slice, /) -> Tokens: ...

    def tolist(self) -> list[int]: ...


class Searched(NamedTuple):
    """Texts that can be searched.

    Attributes:
        search: where a context's last tokens stand, best first, and up to how many at least.
        tokens: all of the texts, a SEPARATOR behind each.
        texts: what sources name.
    """

    search: Callable[[Sequence[int], int], list[Occurrence]]
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
        vocab_size: all ids are below it. In a file of which only the header was verified, another
            one shows damage.

    Raises:
        DamagedTexts: some of the texts are.
    """
    tail = tail[-MAX_LENGTH:]
    found: list[tuple[int, int, Searched]] = []
    for searched in everything:
        try:
            occurrences = searched.search(tail, limit)
        except IndexError as error:
            raise DamagedTexts(searched.texts) from error
        found += [(length, position, searched) for length, position in occurrences[:limit]]
    found.sort(key=itemgetter(0), reverse=True)  # stable: of equal ones the newer come first
    tokens: list[int] = []
    places, sources = [], []
    for length, position, searched in found[:limit]:
        excerpt = searched.tokens[position : position + depth].tolist()
        if SEPARATOR in excerpt:
            del excerpt[excerpt.index(SEPARATOR) :]
        if not excerpt:
            raise DamagedTexts(searched.texts)
        places.append(Occurrence(length, len(tokens)))
        sources.append(Source(searched.texts, position))
        tokens += excerpt
        tokens.append(SEPARATOR)
    if tokens and (min(tokens) < SEPARATOR or max(tokens) >= vocab_size):
        for (_, start), source in zip(places, sources, strict=True):
            excerpt = tokens[start : tokens.index(SEPARATOR, start)]
            if min(excerpt) < 0 or max(excerpt) >= vocab_size:
                raise DamagedTexts(source.texts)
    return Excerpts(tokens, places, sources)
