"""What followed in other texts where the end of a context stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from ..draft.suffix_array import TOKEN_BITS
from ..draft.suffix_index import MAX_LENGTH, SEPARATOR, Excerpts, Occurrence

DEPTH = 48
"""Tokens of an excerpt: as deep as drafts go."""


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
        unverified: the tokens, where a file holds them of which only the header was verified.
    """

    search: Callable[[Sequence[int], int], Sequence[tuple[int, int]]]
    tokens: Tokens
    texts: object
    unverified: np.ndarray | None = None


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
        vocab_size: all ids are below it. Another one shows that unverified texts are damaged.

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
    del found[limit:]
    _check(found, depth, vocab_size)
    tokens: list[int] = []
    occurrences, sources = [], []
    for length, position, (_, text, texts, _) in found:
        occurrences.append(Occurrence(length, len(tokens)))
        sources.append((texts, position))
        excerpt = text[position : position + depth].tolist()
        if SEPARATOR in excerpt:
            del excerpt[excerpt.index(SEPARATOR) :]
        tokens += excerpt
        tokens.append(SEPARATOR)
    return Excerpts(tokens, occurrences, sources)


_LENGTH = itemgetter(0)


def _check(chosen: list[tuple[int, int, Searched]], depth: int, vocab_size: int) -> None:
    """Refuse excerpts of unverified texts that hold what is no token.

    Raises:
        DamagedTexts: they do.
    """
    pieces = [
        (searched.unverified[position : position + depth], searched)
        for _, position, searched in chosen
        if searched.unverified is not None
    ]
    # Read without sign and one greater, a SEPARATOR is 0, and all below it is very large.
    if pieces and _largest(np.concatenate([piece for piece, _ in pieces])) > vocab_size:
        for piece, searched in pieces:
            if _largest(piece) > vocab_size:
                raise DamagedTexts(searched.texts)


def _largest(tokens: np.ndarray) -> int:
    return int((tokens.view(np.uint32) + np.uint32(1)).max(initial=0))
