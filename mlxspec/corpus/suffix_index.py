"""The suffix index of a growing text: where its end occurred before, and what followed."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

SEPARATOR = -1
"""Separates the texts of an index. It is not a token id, so no draft crosses it."""

MAX_LENGTH = 64
"""Matches are measured up to this many tokens."""

MOST_BYTES = 84
"""The most bytes that an index takes for each of many tokens."""

# Where these come from: notes/planner.md, "Constants".
_SIZES = (8, 4, 2, 1)  # the n-grams under which positions are filed, longest first
_MAX_OCCURRENCES = 8  # looked up per n-gram
_MAX_LINKS = 32  # followed per n-gram, including those of other n-grams in its bucket
_MIN_BITS = 12  # 4096 buckets

# The hash of an n-gram is a polynomial in _BASE over its tokens, the newest times _BASE itself,
# modulo 2**28, which keeps Python's products small. Its high bits are the bucket's number.
_HASH_BITS = 28
_WORD = (1 << _HASH_BITS) - 1
_BASE = 0x9E3779B


class Occurrence(NamedTuple):
    """An earlier occurrence of the text's last tokens.

    Attributes:
        length: how many tokens before ``position`` equal the text's last ones.
        position: the index of the token that followed.
    """

    length: int
    position: int


class SuffixIndex:
    """Finds the earlier occurrences of a text's end, the longest matches first.

    Every position is filed under the 8-, 4-, 2- and 1-gram before it in hash chains as in
    Deflate (RFC 1951, section 4). For each n-gram size, a table holds the newest position of each
    bucket, and each position has a link to the next older one. This takes 36 to MOST_BYTES
    bytes a token for any text, and the time to file a token does not depend on the text's length.

    Args:
        tokens: the initial text.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i", tokens)
        self._file_all()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """The memory of the text and its tables."""
        arrays = [self.tokens, *(array for _, _, *both in self._tables for array in both)]
        return sum(len(array) * array.itemsize for array in arrays)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, shift, start = self.tokens, self._shift, len(self.tokens)
        text.extend(tokens)
        if start < _SIZES[0] or len(text) > 1 << _HASH_BITS - shift:
            self._file_all()
            return
        added = text[start:]
        for size, leaving, heads, links in self._tables:
            value, end, append = self._hashes[size], start, links.append
            for token in added:
                value = (value + token) * _BASE - text[end - size] * leaving & _WORD
                bucket = value >> shift
                append(heads[bucket])
                end += 1
                heads[bucket] = end
            self._hashes[size] = value

    def occurrences(self) -> list[Occurrence]:
        """Where the text's last tokens occurred before, as :meth:`matches` of another text."""
        return self.matches(self.tokens[-MAX_LENGTH:], sys.maxsize)

    def matches(self, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """Find where the last tokens of this text or another occur.

        The newest eight places are looked up for each n-gram size, but for single tokens only if
        longer n-grams have fewer than eight. Another thread may extend the index meanwhile. Its
        additions may or may not be found.

        Args:
            tail: the text's last tokens. At most MAX_LENGTH count, and only those after a
                SEPARATOR.
            limit: the most occurrences to return.

        Returns:
            the occurrences that a token follows, the longest matches first, then the newest.
        """
        text, recent = self.tokens, tail[-MAX_LENGTH:][::-1]
        if SEPARATOR in recent:
            recent = recent[: recent.index(SEPARATOR)]
        end, whole = len(text), len(recent)
        lengths: dict[int, int] = {}
        for size, _, heads, links in self._tables:
            if size > whole or (size == 1 and len(lengths) >= _MAX_OCCURRENCES):
                continue
            value = 0
            for token in recent[size - 1 :: -1]:
                value = (value + token) * _BASE & _WORD
            # Another thread may change the table: its own size says how many bits to use.
            position, found = heads[value >> _HASH_BITS + 1 - len(heads).bit_length()], 0
            for _ in range(_MAX_LINKS):
                if position == 0 or found == _MAX_OCCURRENCES:
                    break
                if position < end and text[position] != SEPARATOR:
                    length = lengths.get(position, 0)
                    if not length:
                        longest = min(position, whole)
                        while length < longest and text[position - 1 - length] == recent[length]:
                            length += 1
                    if length >= size:
                        lengths[position] = length
                        found += 1
                position = links[position]
        return sorted((Occurrence(lengths[p], p) for p in lengths), reverse=True)[:limit]

    def _file_all(self) -> None:
        """File the whole text at once, in tables with room for twice as much."""
        bits = max(_MIN_BITS, (2 * len(self.tokens)).bit_length())
        self._shift = _HASH_BITS - bits
        self._tables: list[tuple[int, int, array[int], array[int]]] = []
        self._hashes: dict[int, int] = {}
        tokens = np.frombuffer(self.tokens, dtype=np.int32).astype(np.uint64)
        for size in _SIZES:
            hashes = _ngram_hashes(tokens, size)
            heads, links = _hash_chains(hashes >> self._shift, bits)
            self._tables.append((size, pow(_BASE, size + 1, 1 << _HASH_BITS), heads, links))
            self._hashes[size] = int(hashes[-1]) if len(hashes) else 0


def _ngram_hashes(tokens: np.ndarray, size: int) -> np.ndarray:
    """The hash of the ``size``-gram that ends with each token, (tokens,) of int64.

    Zeros stand before the text. ``size`` is a power of two: a hash combines the hashes of its two
    halves.
    """
    # Arithmetic modulo 2**64 is also right modulo 2**28.
    hashes = tokens * np.uint64(_BASE)
    half = 1
    while half < size:
        longer = hashes.copy()
        longer[half:] += hashes[:-half] * np.uint64(pow(_BASE, half, 1 << _HASH_BITS))
        hashes = longer
        half *= 2
    return (hashes & np.uint64(_WORD)).astype(np.int64)


def _hash_chains(buckets: np.ndarray, bits: int) -> tuple[array[int], array[int]]:
    """The last position of each bucket, and the previous one of each position; 0 if none."""
    order = np.argsort(buckets, kind="stable")
    same = np.diff(buckets[order]) == 0
    links = np.zeros(len(buckets) + 1, dtype=np.int32)
    links[order[1:][same] + 1] = order[:-1][same] + 1
    last = np.append(~same, True) if len(order) else same
    heads = np.zeros(1 << bits, dtype=np.int32)
    heads[buckets[order[last]]] = order[last] + 1
    return array("i", heads.tobytes()), array("i", links.tobytes())


EXCERPT_TOKENS = 48
"""The most tokens of an excerpt: drafts go no deeper."""

_LENGTH, _POSITION = itemgetter(0), itemgetter(1)

Excerpts = tuple[list[int], list[Occurrence]]
"""What followed occurrences of a text's end in other texts: tokens, with a SEPARATOR after each
excerpt, and the occurrences, the longest match first, whose ``position`` is where their excerpt
begins among the tokens."""


def excerpts(
    indexes: Iterable[Any], tail: Sequence[int], limit: int, depth: int, vocab_size: int
) -> Excerpts:
    """Look up a context in several indexes; positions and tokens out of range are skipped.

    Args:
        indexes: suffix indexes and suffix arrays, the newest first.
        tail: the context's last tokens.
        limit: the most excerpts to return.
        depth: the most tokens of an excerpt.
        vocab_size: all ids must be below it.
    """
    found: list[tuple[int, int, Any]] = []
    for one in indexes:
        with suppress(IndexError):  # a damaged file
            found += [(length, position, one) for length, position in one.matches(tail, limit)]
    found.sort(key=_LENGTH, reverse=True)  # stable: newer ones come before equal older ones
    tokens: list[int] = []
    occurrences: list[Occurrence] = []
    for length, position, one in found[:limit]:
        piece = one.tokens[position : position + depth].tolist()
        if SEPARATOR in piece:
            del piece[piece.index(SEPARATOR) :]
        if not piece or 0 <= min(piece) <= max(piece) < vocab_size:
            occurrences.append(Occurrence(length, len(tokens)))
            tokens += [*piece, SEPARATOR]
    return tokens, occurrences


class Continuation(NamedTuple):
    """A token that followed one or more of the occurrences.

    Attributes:
        token: its id.
        length: the longest match among its occurrences, in tokens before the draft.
        newest: the last position among its occurrences.
        occurrences: the occurrences that it follows, the longest match first.
    """

    token: int
    length: int
    newest: int
    occurrences: list[Occurrence]


def continuations(
    text: Sequence[int],
    occurrences: list[Occurrence],
    path: Sequence[int],
) -> list[Continuation]:
    """Group occurrences by the token that follows a path drafted from them.

    Args:
        text: the indexed text.
        occurrences: the occurrences that ``path`` follows, the longest match first.
        path: draft tokens after the text's end.

    Returns:
        the different next tokens, best first: by longest match, then number of occurrences,
        then recency. An occurrence that reaches the text's end continues with the path itself, so
        loops can be drafted to any length.
    """
    depth, end = len(path), len(text)
    groups: dict[int, list[Occurrence]] = {}
    for occurrence in occurrences:
        at = occurrence.position + depth
        groups.setdefault(text[at] if at < end else path[at - end], []).append(occurrence)
    groups.pop(SEPARATOR, None)
    found = [
        Continuation(token, group[0].length, max(map(_POSITION, group)), group)
        for token, group in groups.items()
    ]
    found.sort(key=lambda one: (one.length, len(one.occurrences), one.newest), reverse=True)
    return found


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences of one type."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # by slices, which compare faster than single tokens
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
