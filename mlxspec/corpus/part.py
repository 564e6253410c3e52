"""A sorted part of a memory: texts that stay as they are, and what is known of each."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from .excerpts import Searched
from .suffix_array import (
    TOKEN_BYTES,
    Moves,
    SuffixArray,
    merged_order,
    sorted_places,
)

SOURCES = ("context", "memory", "store", "prediction", "lookahead", "other")
"""What accepted draft tokens came from."""

EARNED = ("steps", "tokens", *SOURCES)
"""The figures that are kept of a generation: its steps, its tokens, and how many of these were
draft tokens of each source."""

RECORD = np.dtype(
    [("end", "<u4"), ("learned", "<u4"), ("hash", "<u8"), *((name, "<u2") for name in EARNED)]
)
"""What is known of a text, in 32 bytes: where its SEPARATOR ends, when it was learned (seconds
since 1970), the hash of its tokens, and what the generation earned."""

_MOST = 0xFFFF  # of a figure
_PIECE = 1 << 18  # tokens that are copied at a time
_SORTED_ANEW = 1 << 15  # tokens up to which sorting is as fast as merging; it takes 90 bytes each
_GONE = -(1 << 40)  # less than any place is far from 0
_DAY = 24 * 60 * 60
SUPERSEDED = 0
"""In place of a day: the same text is in a newer part."""


def today() -> int:
    """Days since 1970."""
    return min(_MOST, int(time.time()) // _DAY)


def day_of(seconds: np.ndarray) -> np.ndarray:
    """The days of some times, (n,) of uint16."""
    return (seconds // _DAY).astype(np.uint16)


def hash_of(text: bytes) -> int:
    """The hash of a text, by which equal ones are known: 64 bits of BLAKE2b."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, eq=False)
class Learned:
    """One answer.

    Attributes:
        text: the bytes of its tokens, as int32.
        learned: when it ended, in seconds since 1970.
        earned: a figure for each name of EARNED, below 65536.
    """

    text: bytes
    learned: int
    earned: tuple[int, ...]

    @classmethod
    def now(cls, text: bytes, earned: Mapping[str, int]) -> Learned:
        """An answer that has just ended."""
        figures = tuple(min(_MOST, max(0, int(earned.get(name, 0)))) for name in EARNED)
        return cls(text, int(time.time()), figures)

    def again(self, later: Learned) -> Learned:
        """The same answer, given once more later."""
        figures = tuple(map(sum, zip(self.earned, later.earned, strict=True)))
        fits = max(figures) <= _MOST
        return Learned(self.text, later.learned, figures if fits else later.earned)


def distinct(answers: Iterable[Learned]) -> list[Learned]:
    """Each answer once, the one given last at the end."""
    found: dict[bytes, Learned] = {}
    for answer in answers:
        put(answer, found)
    return [*found.values()]


def put(answer: Learned, answers: dict[bytes, Learned]) -> bool:
    """Put an answer behind others, by their texts; whether it is new among them."""
    before = answers.pop(answer.text, None)
    answers[answer.text] = before.again(answer) if before else answer
    return before is None


class Part:
    """Texts in the order of their learning, their sorted places, and a record of each.

    Args:
        array: the texts.
        records: (texts,) of RECORD.
        used: (texts,) of uint16: the day on which each was last learned or drafted from with
            success, or SUPERSEDED. It is changed in place.
    """

    def __init__(self, array: SuffixArray, records: np.ndarray, used: np.ndarray) -> None:
        self.array = array
        self.records = records
        self.used = used

    @classmethod
    def of(cls, answers: Sequence[Learned]) -> Part:
        """Sort answers; no two of them are equal."""
        array = SuffixArray.of(answer.text for answer in answers)
        records = np.zeros(len(answers), RECORD)
        records["end"] = np.cumsum([len(answer.text) // TOKEN_BYTES + 1 for answer in answers])
        records["learned"] = [answer.learned for answer in answers]
        records["hash"] = [hash_of(answer.text) for answer in answers]
        for number, name in enumerate(EARNED):
            records[name] = [answer.earned[number] for answer in answers]
        return cls(array, records, day_of(records["learned"]))

    def __len__(self) -> int:
        """How many tokens there are, with a SEPARATOR for each text."""
        return len(self.array.tokens)

    @property
    def searched(self) -> Searched:
        """The part as a look-up takes it."""
        return Searched(self.array.matches, self.array.tokens.data, self)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each text and its SEPARATOR, (texts,) of int64."""
        return np.diff(self.records["end"].astype(np.int64), prepend=0)

    @property
    def newest(self) -> int:
        """When its last text was learned, in seconds since 1970."""
        return int(self.records["learned"][-1]) if len(self.records) else 0

    def use(self, position: int) -> None:
        """Take note that the text at a position was drafted from with success."""
        text = int(np.searchsorted(self.records["end"], position, side="right"))
        if text < len(self.used) and self.used[text] != SUPERSEDED:
            self.used[text] = today()

    def supersede(self, hashes: np.ndarray) -> None:
        """Take note that a newer part has these texts.

        Args:
            hashes: of the texts, sorted, (n,) of uint64.
        """
        self.used[_are_in(self.records["hash"], hashes)] = SUPERSEDED


NOTHING = Part.of([])


class Merged:
    """What one part made of two will hold, to be written piece by piece.

    Args:
        older, newer: the parts, of which one may be NOTHING. Of a text that both have, the newer
            one's is taken.
        leave_out: for each of them, which texts are left out, (texts,) of bool. Those that are
            superseded are left out as well.

    Attributes:
        records: as in :class:`Part`.
        n_tokens, n_places: lengths of what the iterators give.
    """

    def __init__(
        self, older: Part, newer: Part, leave_out: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self._parts = older, newer
        kept = [part.used != SUPERSEDED for part in self._parts]
        if leave_out:
            kept = [texts & ~out for texts, out in zip(kept, leave_out, strict=True)]
        self.records = np.concatenate([older.records, newer.records])
        again = _are_in(older.records["hash"], np.sort(newer.records["hash"][kept[1]])) & kept[0]
        kept[0] &= ~again
        self._add_up(np.flatnonzero(again), len(older.records))
        self._kept = kept
        both = np.concatenate(kept)
        lengths = np.concatenate([older.lengths, newer.lengths])[both]
        self.records = self.records[both]
        self.records["end"] = np.cumsum(lengths)
        self.n_tokens = int(lengths.sum())
        self.n_places = self.n_tokens - 2 * len(lengths)

    def used(self) -> np.ndarray:
        """As in :class:`Part`, as it is now."""
        return np.concatenate(
            [part.used[kept] for part, kept in zip(self._parts, self._kept, strict=True)]
        )

    def tokens(self) -> Iterator[np.ndarray]:
        """The tokens of the texts, in pieces."""
        for part, kept in zip(self._parts, self._kept, strict=True):
            borders = np.diff(kept.astype(np.int8), prepend=0, append=0)
            ends = np.append(0, part.records["end"]).astype(np.int64)
            for first, last in zip(
                ends[borders == 1].tolist(), ends[borders == -1].tolist(), strict=True
            ):
                for start in range(first, last, _PIECE):
                    yield part.array.tokens[start : min(start + _PIECE, last)]

    def order(self) -> Iterator[np.ndarray]:
        """The order of their places, in pieces."""
        if self.n_tokens <= _SORTED_ANEW:
            tokens = [*self.tokens()]
            yield sorted_places(np.concatenate(tokens) if tokens else np.zeros(0, np.int32))
            return
        older, newer = self._parts
        length = int(older.lengths[self._kept[0]].sum())
        moves = _moves(older, self._kept[0], 0), _moves(newer, self._kept[1], length)
        if len(older.array.order) < len(newer.array.order):
            yield from merged_order(newer.array, older.array, *reversed(moves))
        else:
            yield from merged_order(older.array, newer.array, *moves)

    def in_memory(self) -> Generator[None, None, Part]:
        """Make the part in this process's memory, piece by piece."""
        tokens, order = np.empty(self.n_tokens, np.int32), np.empty(self.n_places, np.int32)
        for whole, pieces in (tokens, self.tokens()), (order, self.order()):
            done = 0
            for piece in pieces:
                whole[done : done + len(piece)] = piece
                done += len(piece)
                yield
        return Part(SuffixArray(tokens, order), self.records, self.used())

    def _add_up(self, again: np.ndarray, first_newer: int) -> None:
        """Give the newer one of equal texts what both earned, where that fits."""
        hashes = self.records["hash"][first_newer:]
        sorting = np.argsort(hashes)
        places = np.searchsorted(hashes, self.records["hash"][again], sorter=sorting)
        newer = first_newer + sorting[places]
        sums = {
            name: self.records[name][again].astype(np.uint32) + self.records[name][newer]
            for name in EARNED
        }
        fits = np.all([figures <= _MOST for figures in sums.values()], axis=0)
        for name, figures in sums.items():
            self.records[name][newer[fits]] = figures[fits]


def _moves(part: Part, kept: np.ndarray, start: int) -> Moves:
    """Where a part's places are once only some texts are kept, and these begin at ``start``."""
    if kept.all():
        return lambda places: places + np.int32(start)
    ends = part.records["end"].astype(np.int64)
    new_ends = start + np.cumsum(np.where(kept, part.lengths, 0))
    shifts = np.where(kept, new_ends - ends, _GONE)

    def move(places: np.ndarray) -> np.ndarray:
        moved = places + shifts[np.searchsorted(ends, places, side="right")]
        return np.maximum(moved, 0).astype(np.int32)

    return move


def _are_in(hashes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which hashes are among some sorted ones."""
    places = np.searchsorted(wanted, hashes)
    places[places == len(wanted)] = 0
    return wanted[places] == hashes if len(wanted) else np.zeros(len(hashes), bool)
