"""Suffix indexes: find earlier occurrences of a context's end, and the tokens after them.

A :class:`SuffixIndex` grows with its text. A :class:`SuffixArray` holds sorted texts, in memory or
in a file.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..jsonl import load_json

SEPARATOR = -1
"""Separates the texts of an index. It is not a token id, so drafts never cross it."""

MAX_LENGTH = 64
"""The greatest length of a match: longer ones count as this long."""

MOST_BYTES = 84
"""The most bytes per token that a large index takes."""

# Where these come from: notes/planner.md, "Constants".
_SIZES = (8, 4, 2, 1)  # of the n-grams by which positions are indexed, longest first
_MAX_OCCURRENCES = 8  # looked up per n-gram
_MAX_LINKS = 32  # followed per n-gram, including those of other n-grams in its bucket
_MIN_BITS = 12  # 4096 buckets

# The hash of an n-gram is a polynomial in _BASE, modulo 2**28, which keeps Python's products small.
# Its coefficients are the tokens; the newest is that of _BASE itself. The hash's high bits are the
# number of its bucket.
_HASH_BITS = 28
_WORD = (1 << _HASH_BITS) - 1
_BASE = 0x9E3779B


class Occurrence(NamedTuple):
    """An earlier occurrence of the text's last tokens.

    Attributes:
        length: how many tokens before ``position`` equal the text's last tokens.
        position: the index of the token that followed.
    """

    length: int
    position: int


class SuffixIndex:
    """Finds earlier occurrences of a text's end, the longest matches first.

    Every position is indexed by the 8-, 4-, 2- and 1-gram before it, in hash chains as in Deflate
    (RFC 1951, section 4). For each n-gram size, a table holds the newest position of each bucket,
    and each position has a link to the next older one in its bucket. This takes 36 to MOST_BYTES
    bytes per token for any text. The time to add a token does not depend on the text's length.
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
        """Earlier occurrences of the text's last tokens, as :meth:`matches` returns them."""
        return self.matches(self.tokens[-MAX_LENGTH:], sys.maxsize)

    def matches(self, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """Find where in this text some tokens occur: the last ones of this text, or of another.

        For each n-gram size, the newest eight places are looked up; for single tokens, only if the
        longer n-grams have fewer than eight. Another thread may extend the index at the same time;
        its additions may or may not be found.

        Args:
            tail: the tokens to find. At most the last MAX_LENGTH are compared, and only those after
                the last SEPARATOR.

        Returns:
            the occurrences that are followed by a token. The longest matches come first; of equally
            long ones, the newest.
        """
        text, recent = self.tokens, _backwards(tail)
        end, whole = len(text), len(recent)
        lengths: dict[int, int] = {}
        for size, _, heads, links in self._tables:
            if size > whole or (size == 1 and len(lengths) >= _MAX_OCCURRENCES):
                continue
            value = 0
            for token in recent[size - 1 :: -1]:
                value = (value + token) * _BASE & _WORD
            # Another thread may replace the table, so its own size decides how many bits to use.
            position, n_found = heads[value >> _HASH_BITS + 1 - len(heads).bit_length()], 0
            for _ in range(_MAX_LINKS):
                if position == 0 or n_found == _MAX_OCCURRENCES:
                    break
                if position < end and text[position] != SEPARATOR:
                    length = lengths.get(position) or _matched(text, position, recent)
                    if length >= size:
                        lengths[position] = length
                        n_found += 1
                position = links[position]
        return sorted((Occurrence(lengths[p], p) for p in lengths), reverse=True)[:limit]

    def _file_all(self) -> None:
        """Index the whole text at once, in tables with room for twice as much."""
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


def _backwards(tail: Sequence[int]) -> list[int]:
    """The last MAX_LENGTH tokens after any SEPARATOR, the newest first."""
    recent = list(tail[-MAX_LENGTH:])[::-1]
    return recent[: recent.index(SEPARATOR)] if SEPARATOR in recent else recent


def _matched(text: Sequence[int], place: int, recent: list[int]) -> int:
    """How many tokens before a place in a text match the most recent tokens."""
    length, longest = 0, min(place, len(recent))
    while length < longest and text[place - 1 - length] == recent[length]:
        length += 1
    return length


def _ngram_hashes(tokens: np.ndarray, size: int) -> np.ndarray:
    """The hash of the ``size``-gram that ends with each token, (tokens,) of int64.

    Before the text, zeros are assumed. ``size`` must be a power of two, since an n-gram's hash is
    computed from those of its two halves.
    """
    # Arithmetic modulo 2**64 is also correct modulo 2**28.
    hashes = tokens * np.uint64(_BASE)
    half = 1
    while half < size:
        longer = hashes.copy()
        longer[half:] += hashes[:-half] * np.uint64(pow(_BASE, half, 1 << _HASH_BITS))
        hashes = longer
        half *= 2
    return (hashes & np.uint64(_WORD)).astype(np.int64)


def _hash_chains(buckets: np.ndarray, bits: int) -> tuple[array[int], array[int]]:
    """The last position in each bucket, and for each position the one before it in its bucket.

    Either is 0 if there is none.
    """
    order = np.argsort(buckets, kind="stable")
    same = np.diff(buckets[order]) == 0
    links = np.zeros(len(buckets) + 1, dtype=np.int32)
    links[order[1:][same] + 1] = order[:-1][same] + 1
    last = np.append(~same, True) if len(order) else same
    heads = np.zeros(1 << bits, dtype=np.int32)
    heads[buckets[order[last]]] = order[last] + 1
    return array("i", heads.tobytes()), array("i", links.tobytes())


MAX_VOCABULARY = (1 << 31) - 1
"""All token ids are below it."""
TOKEN_BYTES = 4

_SHORT = 8  # tokens compared first; in the few places where all match, more are compared
_CHUNK = 1 << 16  # places merged at a time
_HEADER = 1 << 12  # bytes of a file before its arrays
_SEPARATOR_BYTES = np.int32(SEPARATOR).tobytes()


class SuffixArray:
    """Texts, and their places in sorted order.

    A place is between two tokens of a text. Its number is the position of the token after it.
    Places are sorted by the tokens before them, read backwards, so this is the suffix array of the
    reversed texts. A file need not be loaded: a look-up reads a few dozen numbers of each array.

    A file begins with a line of JSON that has the lengths of both arrays. The arrays follow as
    little-endian int32, and then the CRC-32 of all this.

    Args:
        tokens: (n,) of int32, with a SEPARATOR after each text.
        order: (places,) of int32, from 1 to n - 1, sorted by :func:`sorted_places`. If the order is
            wrong, matches are missed, or places are found that do not match.

    Attributes:
        header: the JSON, if the array is in a file.
        file: the whole file, (words,) of int32; None if the array is in memory.
    """

    header: Mapping[str, Any] = {}
    file: np.ndarray | None = None

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        self.tokens = tokens
        self.order = order
        # Memory views return Python integers four times faster than arrays.
        self._tokens = tokens.data
        self._order = order.data

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> SuffixArray:
        """Sort texts, given as the bytes of their tokens."""
        data = b"".join(text + _SEPARATOR_BYTES for text in texts)
        tokens = np.ndarray(len(data) // TOKEN_BYTES, np.int32, data)
        return cls(tokens, sorted_places(tokens))

    @classmethod
    def open(cls, path: Path, format_name: str) -> SuffixArray:
        """Map a file, checking its header and length without reading the rest.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged or has another format.
        """
        size = path.stat().st_size
        if size <= _HEADER or path.is_dir():
            raise ValueError(f"is not an {format_name}")
        whole = np.asarray(np.memmap(path, "<i4", "r", shape=size // TOKEN_BYTES))
        with suppress(ValueError, RecursionError):
            header = load_json(whole[: _HEADER // TOKEN_BYTES].tobytes())
            match header:
                case {"format": name, "lengths": [int(n), int(places)]} if name == format_name:
                    start, end = _HEADER // TOKEN_BYTES, len(whole) - 1
                    if min(n, places) >= 0 and start + n + places == end:
                        opened = cls(whole[start : start + n], whole[start + n : end])
                        opened.header, opened.file = header, whole
                        return opened
        raise ValueError(f"is not an {format_name}, or is damaged")

    def is_intact(self) -> bool:
        """Whether the file, if there is one, is as originally written."""
        if self.file is None:
            return True
        return zlib.crc32(self.file[:-1].data) == int(self.file[-1:].view(np.uint32)[0])

    @property
    def nbytes(self) -> int:
        """The bytes of texts and order in memory; a file is only mapped, and not counted."""
        return self.tokens.nbytes + self.order.nbytes if self.file is None else 0

    def matches(self, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Find up to ``limit`` places, the longest matches first; of equal ones, the newest.

        They are the neighbours of the slot in ``order`` where a place with this context would be.
        If more than ``limit`` places match equally well, it is arbitrary which of them are found.

        Args:
            tail: the context's last tokens. At most MAX_LENGTH are compared, and only those after
                the last SEPARATOR.

        Returns:
            the length of each match, and the position of the token that follows it.

        Raises:
            IndexError: ``order`` holds places that are not in ``tokens``.
        """
        recent = _backwards(tail)
        tokens, first, last = self._tokens, 0, len(self._order)
        for depth in (_SHORT, MAX_LENGTH):

            def before(place: int, depth: int = depth) -> list[int]:
                return tokens[max(place - depth, 0) : place].tolist()[::-1]

            first = bisect_left(self._order, recent[:depth], first, last, key=before)
            last = bisect_right(self._order, recent[:depth], first, last, key=before)
        low, high = first - 1, first
        below, above = self._length(low, recent), self._length(high, recent)
        matches: list[tuple[int, int]] = []
        while len(matches) < limit and (below or above):
            if below > above:
                matches.append((below, self._order[low]))
                low -= 1
                below = self._length(low, recent)
            else:
                matches.append((above, self._order[high]))
                high += 1
                above = self._length(high, recent)
        return sorted(matches, reverse=True)

    def _length(self, slot: int, recent: list[int]) -> int:
        """How many tokens before the place in a slot of ``order`` match; 0 if there is no slot."""
        inside = 0 <= slot < len(self._order)
        return _matched(self._tokens, self._order[slot], recent) if inside else 0


def merged_order(old: SuffixArray, new: SuffixArray) -> Iterator[np.ndarray]:
    """Merge the orders of two arrays into that of their joined tokens, the old ones first.

    Binary search finds where the new places belong in the old order, many at a time. So the time is
    proportional to the new length times the logarithm of the old one, plus one pass over the old
    order. This takes little memory.

    Yields:
        the next places of the order, (n,) of int32. New places come after equal old ones.
    """
    slots, first = np.empty(len(new.order), np.int64), 0
    for start in range(0, len(new.order), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        slots[chunk] = _slots_among(old, new.tokens, new.order[chunk], first)
        first = slots[chunk][-1]
    places = new.order + np.int32(len(old.tokens))
    for start in range(0, len(old.order) + 1, _CHUNK):
        here = slice(*np.searchsorted(slots, [start, start + _CHUNK]))
        yield np.insert(old.order[start : start + _CHUNK], slots[here] - start, places[here])


def _slots_among(
    array: SuffixArray, tokens: np.ndarray, places: np.ndarray, least: int
) -> np.ndarray:
    """The slots of ``array`` before which to insert ``places`` of other tokens.

    Args:
        places: their places, sorted.
        least: the first slot that is possible for any of them.
    """
    low = np.full(len(places), least, np.int64)
    high = np.full(len(places), len(array.order), np.int64)
    while len(open_ := np.flatnonzero(low < high)):
        middle = (low[open_] + high[open_]) // 2
        there, here = array.order[middle], places[open_]
        before = np.zeros(len(open_), bool)
        equal = np.arange(len(open_))
        for depth in range(1, MAX_LENGTH + 1):
            # Before the first text, the index -1 finds the last SEPARATOR.
            that, this = array.tokens[there[equal] - depth], tokens[here[equal] - depth]
            before[equal] = this < that
            equal = equal[(this == that) & (this != SEPARATOR)]
            if not len(equal):
                break
        high[open_[before]] = middle[before]
        low[open_[~before]] = middle[~before] + 1
    return np.maximum.accumulate(low)  # ascending even in a damaged order


def encode_texts(tokens: Sequence[int], vocab_size: int) -> list[bytes]:
    """Turn token ids into texts, each given as the bytes of its ids as int32.

    Ids beyond the vocabulary, which a model with a padded output layer may emit, split a text.
    Texts of one token are dropped, since look-ups cannot use them.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    known = (ids >= 0) & (ids < vocab_size)
    return split_texts(np.where(known, ids, SEPARATOR).astype(np.int32))


def split_texts(tokens: np.ndarray) -> list[bytes]:
    """The texts of two or more tokens between separators."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    texts = (text[text != SEPARATOR].tobytes() for text in np.split(tokens, ends))
    return [text for text in texts if len(text) > TOKEN_BYTES]


def sorted_places(tokens: np.ndarray) -> np.ndarray:
    """Sort all places between two tokens by the tokens before them.

    Tokens are compared backwards from the place, at least MAX_LENGTH of them. So places where
    similar contexts end are neighbours: the closer they are, the longer they match. Equal places
    keep the order of the text.

    The result is a suffix array of the reversed text (Manber and Myers, 1990). Each pass doubles
    the number of tokens compared, among places that are still equal (Larsson and Sadakane, 1999).

    Args:
        tokens: (n,) of int32, ids below MAX_VOCABULARY, and SEPARATOR between texts.

    Returns:
        (places,) of int32: the position of the token after each place.
    """
    n = len(tokens)
    # The token before each place 0 … n; 0 means a separator or the beginning of the text.
    rank = np.concatenate([np.zeros(1, np.int32), tokens + np.int32(1)])
    order = np.argsort(rank, kind="stable").astype(np.int32)  # slot s holds the place order[s]
    starts = _starts(rank[order])
    # From here on, a place's rank is the first slot of all places equal to it.
    rank[order] = np.maximum.accumulate(np.where(starts, np.arange(n + 1, dtype=np.int32), 0))
    depth = 1
    while depth < MAX_LENGTH:
        shared = ~starts
        shared[:-1] |= shared[1:]
        slots = np.flatnonzero(shared)
        places = order[slots]
        before = np.maximum(places - depth, 0)
        keys = rank[places].astype(np.int64) << 32 | rank[before]
        sorting = np.argsort(keys, kind="stable")
        places, keys = places[sorting], keys[sorting]
        order[slots] = places
        starts[slots] = _starts(keys)
        rank[places] = np.maximum.accumulate(np.where(starts[slots], slots, 0))
        depth *= 2
    inner = np.zeros(n + 1, bool)
    inner[1:n] = (tokens[:-1] >= 0) & (tokens[1:] >= 0)
    return order[inner[order]]


def _starts(keys: np.ndarray) -> np.ndarray:
    """Mark the first of each run of equal keys."""
    starts = np.ones(len(keys), bool)
    starts[1:] = keys[1:] != keys[:-1]
    return starts


def write_index(
    file: BinaryIO,
    header: Mapping[str, Any],
    lengths: tuple[int, int],
    pieces: Iterable[np.ndarray],
) -> None:
    """Write a file that :meth:`SuffixArray.open` maps.

    Args:
        header: the other entries of the JSON, with a "format".
        lengths: the lengths of the tokens and of the order.
        pieces: the tokens, then the order, in pieces.
    """
    line = json.dumps({**header, "lengths": lengths}).encode().ljust(_HEADER - 1) + b"\n"
    checksum = 0
    for data in chain([np.frombuffer(line, np.uint8)], pieces):
        file.write(data.data)
        checksum = zlib.crc32(data.data, checksum)
    file.write(checksum.to_bytes(TOKEN_BYTES, "little"))


EXCERPT_TOKENS = 48
"""The most tokens of an excerpt, and so of a draft from it."""

_LENGTH, _POSITION = itemgetter(0), itemgetter(1)

Excerpts = tuple[list[int], list[Occurrence]]
"""What followed a context's last tokens in other texts: the tokens of all excerpts, with a
SEPARATOR after each, and an :class:`Occurrence` per excerpt, the longest match first. Its
``position`` is where the excerpt begins among these tokens.
"""


def excerpts(
    indexes: Iterable[Any], tail: Sequence[int], limit: int, depth: int, vocab_size: int
) -> Excerpts:
    """Look up a context in several indexes. Excerpts with tokens out of range are skipped.

    Args:
        indexes: suffix indexes and suffix arrays, the newest first.
        depth: the most tokens of an excerpt.
    """
    places: list[tuple[int, int, Any]] = []
    for index in indexes:
        with suppress(IndexError):  # the file is damaged
            places += [(length, position, index) for length, position in index.matches(tail, limit)]
    places.sort(key=_LENGTH, reverse=True)  # stable: newer ones come before equal older ones
    tokens: list[int] = []
    occurrences: list[Occurrence] = []
    for length, position, index in places[:limit]:
        piece = index.tokens[position : position + depth].tolist()
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
        newest: the latest position among its occurrences.
        occurrences: the occurrences that it follows, the longest match first.
    """

    token: int
    length: int
    newest: int
    occurrences: list[Occurrence]


def continuations(
    text: Sequence[int],
    occurrences: list[Occurrence],
    depth: int,
    path: Callable[[], Sequence[int]],
) -> list[Continuation]:
    """Group occurrences by the token that comes after a drafted path in each of them.

    Args:
        occurrences: the occurrences that the path follows, the longest match first.
        depth: the length of the path.
        path: returns the path, the draft tokens after the text's end; seldom called.

    Returns:
        the distinct next tokens, best first: by longest match, then number of occurrences, then
        recency. An occurrence that reaches the text's end continues with the path itself, so that
        repetitions can be drafted to any length.
    """
    end = len(text) - depth  # the positions before it are followed by a token of the text
    if len(occurrences) == 1:  # as in most nodes
        ((length, position),) = occurrences
        token = text[position + depth] if position < end else path()[position - end]
        return [] if token == SEPARATOR else [Continuation(token, length, position, occurrences)]
    groups: dict[int, list[Occurrence]] = {}
    for occurrence in occurrences:
        position = occurrence[1]
        token = text[position + depth] if position < end else path()[position - end]
        if token in groups:
            groups[token].append(occurrence)
        else:
            groups[token] = [occurrence]
    groups.pop(SEPARATOR, None)
    distinct = [
        Continuation(token, group[0][0], max(map(_POSITION, group)), group)
        for token, group in groups.items()
    ]
    if len(distinct) > 1:
        distinct.sort(key=lambda c: (c.length, len(c.occurrences), c.newest), reverse=True)
    return distinct


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix of two sequences of the same type."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices compare faster than single tokens
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
