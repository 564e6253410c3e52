"""Texts and their suffix array, in memory or in a file, for binary search."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..jsonl import load_json
from .suffix_index import MAX_LENGTH, SEPARATOR

MAX_VOCABULARY = (1 << 31) - 1
"""All token ids are below it."""
TOKEN_BYTES = 4

_SHORT = 8  # tokens, whose comparison is fast, and which leave few places to compare further
_CHUNK = 1 << 16  # places merged at a time
_HEADER = 1 << 12  # bytes of a file before its arrays
_SEPARATOR_BYTES = np.int32(SEPARATOR).tobytes()


class SuffixArray:
    """Texts, and the sorted order of their places.

    A place is between two tokens of a text. Its number is the position of the token after it.
    Places are sorted by the tokens before them, read backwards, so this is the suffix array of the
    reversed texts. Nothing needs to be loaded: a look-up reads a few dozen numbers of either array.

    A file begins with a line of JSON, which says how long both arrays are. They follow as
    little-endian int32, and then the CRC-32 of all that.

    Args:
        tokens: (n,) of int32, with a SEPARATOR after each text.
        order: (places,) of int32, from 1 to n - 1, sorted by :func:`sorted_places`. A wrong order
            loses matches, or gives places that do not match.

    Attributes:
        header: the JSON, if the array is in a file.
        file: the whole file, (words,) of int32; None if the array is in memory.
    """

    header: Mapping[str, Any] = {}
    file: np.ndarray | None = None

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        self.tokens = tokens
        self.order = order
        # Memory views return Python integers four times as fast as arrays.
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
        """Whether the file, if there is one, is as it was written."""
        if self.file is None:
            return True
        return zlib.crc32(self.file[:-1].data) == int(self.file[-1:].view(np.uint32)[0])

    @property
    def nbytes(self) -> int:
        """The memory of the texts and their order, without a file, which is only mapped."""
        return self.tokens.nbytes + self.order.nbytes if self.file is None else 0

    def matches(self, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Find up to ``limit`` places, the longest matches first, then the newest.

        They are neighbours of the slot where a place with this context would be. If too many
        match equally long, those whose earlier tokens have the nearest ids are taken, which says
        little about them.

        Args:
            tail: the context's last tokens. At most MAX_LENGTH count, and only those after a
                SEPARATOR.
            limit: the most places to return.

        Returns:
            the length of each match, and the position of the token that follows it.

        Raises:
            IndexError: ``order`` holds places that are not in ``tokens``.
        """
        recent = list(tail[-MAX_LENGTH:])[::-1]
        if SEPARATOR in recent:
            del recent[recent.index(SEPARATOR) :]
        tokens, first, last = self._tokens, 0, len(self._order)
        for depth in (_SHORT, MAX_LENGTH):

            def before(place: int, depth: int = depth) -> list[int]:
                return tokens[max(place - depth, 0) : place].tolist()[::-1]

            first = bisect_left(self._order, recent[:depth], first, last, key=before)
            last = bisect_right(self._order, recent[:depth], first, last, key=before)
        low, high = first - 1, first
        below, above = self._length(low, recent), self._length(high, recent)
        found: list[tuple[int, int]] = []
        while len(found) < limit and (below or above):
            if below > above:
                found.append((below, self._order[low]))
                low -= 1
                below = self._length(low, recent)
            else:
                found.append((above, self._order[high]))
                high += 1
                above = self._length(high, recent)
        return sorted(found, reverse=True)

    def _length(self, slot: int, recent: list[int]) -> int:
        """How many of the tokens before a slot's place match."""
        if not 0 <= slot < len(self._order):
            return 0
        length, place = 0, self._order[slot]
        longest = min(place, len(recent))
        while length < longest and self._tokens[place - 1 - length] == recent[length]:
            length += 1
        return length


def merged_order(old: SuffixArray, new: SuffixArray) -> Iterator[np.ndarray]:
    """Merge the orders of two arrays, of which the second's tokens follow the first's.

    Binary search finds where the new places belong in the old order, many at a time. So the time
    is proportional to the new length times the logarithm of the old one, plus one pass over the old
    order. It takes little memory.

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
    """The slots of ``array`` from ``least`` on before which sorted ``places`` of ``tokens`` go."""
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
    """Turn token ids into texts: bytes of int32, which can be compared and hashed.

    Ids beyond the vocabulary, which a model with spare rows may emit, split a text. Texts of one
    token are dropped, since look-ups cannot use them.
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

    Tokens are compared backwards from the place, at least MAX_LENGTH of them. So the places where
    similar contexts end are neighbours; the closer they are, the longer they match. Equal places
    keep the order of the text.

    The result is a suffix array of the reversed text (Manber and Myers, 1990). Each pass doubles
    the number of tokens compared, among the places that are still equal (Larsson and Sadakane,
    1999).

    Args:
        tokens: (n,) of int32, ids below MAX_VOCABULARY, and SEPARATOR between texts.

    Returns:
        (places,) of int32: the position of the token after each place.
    """
    n = len(tokens)
    # The token before each place 0 … n; 0 stands for a separator, or the beginning of the text.
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
    """Mark the first of equal keys."""
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
        file: where to write.
        header: the other entries of the JSON, with a "format".
        lengths: those of the tokens and of the order.
        pieces: both, one after the other.
    """
    line = json.dumps({**header, "lengths": lengths}).encode().ljust(_HEADER - 1) + b"\n"
    checksum = 0
    for data in chain([np.frombuffer(line, np.uint8)], pieces):
        file.write(data.data)
        checksum = zlib.crc32(data.data, checksum)
    file.write(checksum.to_bytes(TOKEN_BYTES, "little"))
