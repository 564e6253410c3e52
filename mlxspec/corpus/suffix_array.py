"""Texts and their suffix array, searched by binary search, and the file that holds both."""

from __future__ import annotations

import json
import mmap
import os
import stat
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..jsonl import load_json
from .suffix_index import MAX_LENGTH, SEPARATOR

TOKEN_BITS = 21
"""Token ids are below 2**TOKEN_BITS - 1: three of them fit into one integer to sort by."""
TOKEN_BYTES = 4

_MOST_KNOWN = 1 << 13  # tokens whose slots are kept, 1 MB

_CHUNK = 1 << 16  # places that are merged at a time
_SEPARATOR_BYTES = np.int32(SEPARATOR).tobytes()


class SuffixArray:
    """Texts, and the order in which their places are searched.

    A place is between two tokens of a text, numbered by the token that follows it. Places are
    sorted by the tokens before them, read backwards, so this is the suffix array of the reversed
    texts. Nothing needs to be loaded: a look-up reads a few dozen numbers of either array.

    Args:
        tokens: (n,) of int32, a SEPARATOR behind each text.
        order: (places,) of int32, from 1 to n - 1, as :func:`sorted_places` sorts them. A wrong
            order costs matches and never gives a false one: every match is compared by token.
    """

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        self.tokens = tokens
        self.order = order
        # Memory views give Python integers four times as fast as arrays do.
        self._tokens = tokens.data
        self._order = order.data
        # The slots of places after some tokens: half of the time of a look-up goes to find them.
        self._after: dict[int, tuple[int, int]] = {}

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> SuffixArray:
        """Sort texts, each given as the bytes of its tokens."""
        data = b"".join(text + _SEPARATOR_BYTES for text in texts)
        tokens = np.ndarray(len(data) // TOKEN_BYTES, np.int32, data)
        return cls(tokens, sorted_places(tokens))

    def matches(self, tail: Sequence[int], limit: int) -> list[tuple[int, int]]:
        """Find up to ``limit`` places, the longest matches first, then the newest.

        Where more places match equally long than are wanted, a sample is taken at regular
        intervals of the order, which shows better than the newest places what mostly follows.
        (Half of each open trace set looked up in the other half, eight places: the right token
        came first 13.9 % against 12.5 % of the times on Spec-Bench, 34.0 against 32.7 on code,
        53.2 against 52.9 with the agent.)

        Args:
            tail: the context, of which the last MAX_LENGTH tokens count, and only those behind a
                SEPARATOR.
            limit: how many places to return at most.

        Returns:
            the length of each match, and the position of the token that follows it.

        Raises:
            IndexError: ``order`` holds places that are not in ``tokens``.
        """
        recent = list(tail[-MAX_LENGTH:])[::-1]
        if SEPARATOR in recent:
            del recent[recent.index(SEPARATOR) :]
        ranges = self._ranges(recent, limit)
        if limit < 1 or not ranges:
            return []
        low, high = ranges.pop()  # the slots that have been taken
        if high - low <= limit:
            found = self._measured(self._order[low:high].tolist(), recent)
        else:
            ranges.append((low, high))
            found, high = [], low
        while ranges and len(found) < limit:
            left, right = ranges.pop()
            equal = right - left - (high - low)
            if equal:
                match = array("i", recent[len(ranges) :: -1]).tobytes()
                found += self._sample(left, low, high, equal, limit - len(found), match)
            low, high = left, right
        return found

    def _ranges(self, recent: list[int], limit: int) -> list[tuple[int, int]]:
        """The slots of the places after the last token, after the last two tokens, and so on.

        Each range lies within the one before it. The last is the first that has no more than
        ``limit`` slots, or that of the longest match.
        """
        tokens, order = self._tokens, self._order
        if not recent:
            return []
        known = self._after.get(recent[0])
        low, high = known or (0, len(order))
        ranges: list[tuple[int, int]] = []
        for depth, token in enumerate(recent, 1):
            if depth > 1 or not known:

                def key(place: int, depth: int = depth) -> int:
                    # Before the first text this is the last token of all, a SEPARATOR as well.
                    return tokens[place - depth]

                low = bisect_left(order, token, low, high, key=key)
                if low == high or key(order[low]) != token:
                    break
                high = bisect_right(order, token, low + 1, high, key=key)
            if depth == 1 and len(self._after) < _MOST_KNOWN:
                self._after[token] = low, high
            ranges.append((low, high))
            if high - low <= limit:
                break
        return ranges

    def _measured(self, places: list[int], recent: list[int]) -> list[tuple[int, int]]:
        """Places with the lengths of their matches, those that match at all."""
        tokens, whole = self._tokens, len(recent)
        found = []
        for place in places:
            length, longest = 0, min(place, whole)
            while length < longest and tokens[place - 1 - length] == recent[length]:
                length += 1
            if length > 0:
                found.append((length, place))
        found.sort(reverse=True)
        return found

    def _sample(
        self, left: int, low: int, high: int, equal: int, limit: int, match: bytes
    ) -> list[tuple[int, int]]:
        """Places in some of the ``equal`` slots from ``left`` on without those ``low`` … ``high``.

        Args:
            left, low, high, equal: slots and their number.
            limit: how many places are wanted.
            match: what stands before all of them, as the bytes of int32.
        """
        tokens, order = self._tokens, self._order
        wanted, length = min(equal, limit), len(match) // TOKEN_BYTES
        slots = [left + equal * number // wanted for number in range(wanted)]
        places = [order[slot if slot < low else slot + high - low] for slot in slots]
        places.sort(reverse=True)
        return [
            (length, place)
            for place in places
            if place >= length and tokens[place - length : place].tobytes() == match
        ]


def merged_order(
    first: SuffixArray, second: SuffixArray, first_start: int, second_start: int
) -> Iterator[np.ndarray]:
    """The order of the places of two arrays together, without sorting them again.

    The places of the second are located in the order of the first by binary search, many at a
    time. So this takes time in proportion to the second's length times the logarithm of the
    first's, and to read the first once, and little memory.

    Args:
        first: the larger one.
        second: the smaller one. Of equal places its own come last.
        first_start, second_start: where their tokens begin in the merged text.

    Yields:
        the next places of the order, (n,) of int32.
    """
    done = 0  # slots of the first
    for start in range(0, len(second.order), _CHUNK):
        places = second.order[start : start + _CHUNK]
        slots = _slots_among(first, second.tokens, places, done)
        taken, last = 0, int(slots[-1])
        while taken < len(slots):
            stop = min(done + _CHUNK, last)
            next_taken = int(np.searchsorted(slots, stop, side="right"))
            yield np.insert(
                first.order[done:stop] + np.int32(first_start),
                slots[taken:next_taken] - done,
                places[taken:next_taken] + np.int32(second_start),
            )
            done, taken = stop, next_taken
    for start in range(done, len(first.order), _CHUNK):
        yield first.order[start : start + _CHUNK] + np.int32(first_start)


def _slots_among(
    array: SuffixArray, tokens: np.ndarray, places: np.ndarray, least: int
) -> np.ndarray:
    """Before which slots of an array's order other places belong, behind those equal to them.

    Args:
        array: the suffix array to place them in.
        tokens: the texts of the other places, a SEPARATOR behind each.
        places: the other places, in order.
        least: no place belongs before this slot.

    Returns:
        (places,) of int64, ascending.
    """
    low = np.full(len(places), least, np.int64)
    high = np.full(len(places), len(array.order), np.int64)
    while len(open_ := np.flatnonzero(low < high)):
        middle = (low[open_] + high[open_]) // 2
        there, here = array.order[middle], places[open_]
        before = np.zeros(len(open_), bool)
        equal = np.arange(len(open_))
        for depth in range(1, MAX_LENGTH + 1):
            # Before the first text stands the last token of all, a SEPARATOR as well.
            that, this = array.tokens[there[equal] - depth], tokens[here[equal] - depth]
            before[equal] = this < that
            equal = equal[(this == that) & (this != SEPARATOR)]
            if not len(equal):
                break
        high[open_[before]] = middle[before]
        low[open_[~before]] = middle[~before] + 1
    return low


def encode_texts(tokens: Sequence[int], vocab_size: int) -> list[bytes]:
    """Turn token ids into texts: the bytes of their int32 ids, which can be compared and hashed.

    Ids beyond the vocabulary, which a model with spare rows may emit, split a text. A text of
    one token is left out: nothing can be looked up in it.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    known = (ids >= 0) & (ids < vocab_size)
    return split_texts(np.where(known, ids, SEPARATOR).astype(np.int32))


def split_texts(tokens: np.ndarray) -> list[bytes]:
    """The texts between the separators, less the empty ones and those of one token."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    texts = (text[text != SEPARATOR].tobytes() for text in np.split(tokens, ends))
    return [text for text in texts if len(text) > TOKEN_BYTES]


def sorted_places(tokens: np.ndarray) -> np.ndarray:
    """Sort the places that have a token before and after them by the tokens before them.

    The tokens are compared backwards from the place: first the one just before it, then the one
    before that, at least MAX_LENGTH of them. So the places at which a context ends as it does
    now are neighbours, the closer to it the longer they match. Equal places keep the
    order of the text.

    A suffix array of the reversed text (Manber and Myers, 1990), built by doubling the number of
    tokens compared, each time only among the places that were equal so far (Larsson and
    Sadakane, 1999).

    Args:
        tokens: (n,) of int32, ids below 2**TOKEN_BITS - 1, and SEPARATOR between texts.

    Returns:
        (places,) of int32: positions of the tokens that follow the places.
    """
    n = len(tokens)
    order, starts = _sorted_by_three(tokens)  # slot s holds the place order[s]
    # A place's rank is the first slot of the places that are equal to it.
    rank = np.empty(n + 1, np.int32)
    rank[order] = np.maximum.accumulate(np.where(starts, np.arange(n + 1, dtype=np.int32), 0))
    depth = 3
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


def _sorted_by_three(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort all places 0 … n by the three tokens before them, and mark where values change.

    A separator, and what would stand before the text, comes before every token.
    """
    values = np.zeros(len(tokens) + 3, np.int64)
    values[3:] = tokens.astype(np.int64) + 1
    keys = values[2:] << 2 * TOKEN_BITS
    keys |= values[1:-1] << TOKEN_BITS
    keys |= values[:-2]
    order = np.argsort(keys, kind="stable")
    return order.astype(np.int32), _starts(keys[order])


def _starts(keys: np.ndarray) -> np.ndarray:
    """Where, in sorted keys, a value comes for the first time."""
    starts = np.ones(len(keys), bool)
    starts[1:] = keys[1:] != keys[:-1]
    return starts


# A file: a line of JSON, padded with spaces to whole words, the arrays one after the other as
# little-endian int32, and the CRC-32 of all that. The JSON has the arrays' names and lengths.
_WORD = 4
_MOST_HEADER = 1 << 14


def write_arrays(
    file: BinaryIO,
    header: Mapping[str, Any],
    arrays: Mapping[str, tuple[int, Iterable[np.ndarray]]],
) -> None:
    """Write a file, piece by piece.

    Args:
        file: where to write.
        header: what the JSON says besides, with a "format".
        arrays: by name, the length and the pieces of each array.

    Raises:
        ValueError: an array does not have its length.
    """
    lengths = {name: length for name, (length, _) in arrays.items()}
    line = json.dumps({**header, "arrays": lengths}).encode()
    data: bytes | memoryview = line.ljust(-(-(len(line) + 1) // _WORD) * _WORD - 1) + b"\n"
    file.write(data)
    checksum = zlib.crc32(data)
    for length, pieces in arrays.values():
        for piece in pieces:
            data = np.ascontiguousarray(piece, np.int32).data
            file.write(data)
            checksum, length = zlib.crc32(data, checksum), length - len(piece)
        if length:
            raise ValueError("an index has changed while it was written")
    file.write(checksum.to_bytes(_WORD, "little"))


def read_arrays(
    path: Path, expected: str, names: Sequence[str]
) -> tuple[dict[str, Any], np.ndarray, list[np.ndarray]]:
    """Map a file; the header and the length are checked, the rest is not read.

    Args:
        path: the file.
        expected: its format.
        names: the arrays that it must have, in their order.

    Returns:
        the header, all of the file as int32, and the arrays.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file; the message says why.
    """
    # A blocking open would wait for the other end of a named pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        if status.st_size < 2 * _WORD:
            raise ValueError(f"is not an {expected}")
        mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    line = mapped[: mapped.find(b"\n", 0, _MOST_HEADER) + 1]
    try:
        header = load_json(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != expected:
        raise ValueError(f"is not an {expected}")
    lengths = header.get("arrays")
    if (
        not isinstance(lengths, dict)
        or [*lengths] != [*names]
        or not all(type(length) is int and length >= 0 for length in lengths.values())
    ):
        raise ValueError("has a damaged header")
    if len(line) % _WORD or len(line) + _WORD * (sum(lengths.values()) + 1) != len(mapped):
        raise ValueError("is cut short, or too long")
    whole = np.frombuffer(mapped, np.dtype("<i4"))
    ends = np.cumsum([len(line) // _WORD, *lengths.values()]).tolist()
    return header, whole, [whole[a:b] for a, b in pairwise(ends)]


def is_intact(whole: np.ndarray) -> bool:
    """Whether the checksum at a file's end is right."""
    return zlib.crc32(whole[:-1].data) == int(whole[-1:].view(np.uint32)[0])
