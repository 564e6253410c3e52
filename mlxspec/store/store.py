"""Looking up a context's end in a text that is sorted by places."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..draft.suffix_index import MAX_LENGTH, Occurrence
from ..errors import StoreError
from .store_file import StoreFile, TokenizerIdentity, Vocabulary, identify, read_store_file


class PlaceSearch:
    """Finds the places of a text before which a context's last tokens stand.

    Nothing is loaded: a look-up reads a few dozen numbers of either array. Every match is
    compared token by token, so that a wrong order costs matches and never gives a false one.

    Args:
        tokens: (n,) of int32.
        order: its places as :func:`sorted_places` orders them, each from 1 to n - 1.
    """

    def __init__(self, tokens: np.ndarray, order: np.ndarray) -> None:
        # A memory view gives Python integers four times as fast as an array does.
        self._tokens = tokens.data
        self._order = order.data

    def occurrences(self, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """Up to ``limit`` places, the longest matches first, then the newest.

        Of places that match equally long, where not all are wanted, it takes a sample at regular
        intervals of the order: that tells better what mostly follows than the newest ones do.
        (Half of each open trace set looked up in the other half, eight places: the right token
        came first 13.9 % against 12.5 % of the times on Spec-Bench, 34.0 against 32.7 on code,
        53.2 against 52.9 with the agent.)

        Args:
            tail: the context, of which the last MAX_LENGTH tokens count.
            limit: most places to return.
        """
        order = self._order
        context = list(tail[-MAX_LENGTH:])
        low = high = self._slot(context[::-1])  # the slots from low to high have been taken
        found: list[Occurrence] = []
        longer = len(context) + 1
        while len(found) < limit:
            length = max(self._match(low - 1, context), self._match(high, context))
            if not 0 < length < longer:  # nothing is left, or the order is wrong
                break
            longer, match = length, context[-length:]
            left = low - self._run(low - 1, -1, match)
            right = high + self._run(high, 1, match)
            equal = right - left - (high - low)
            wanted = min(equal, limit - len(found))
            slots = [left + equal * number // wanted for number in range(wanted)]
            places = [order[slot if slot < low else slot + high - low] for slot in slots]
            places.sort(reverse=True)
            found += [Occurrence(length, place) for place in places if self._follows(place, match)]
            low, high = left, right
        return found

    def _slot(self, recent: list[int]) -> int:
        """Where the context would stand in the order; ``recent`` is its end read backwards."""
        tokens, order, whole = self._tokens, self._order, len(recent)
        low, high = 0, len(order)
        low_match = high_match = 0  # tokens that the places around the interval share with it
        while low < high:
            middle = (low + high) // 2
            place = order[middle]
            length = min(low_match, high_match)
            longest = min(place, whole)
            while length < longest and tokens[place - 1 - length] == recent[length]:
                length += 1
            if length == whole or (length < place and tokens[place - 1 - length] > recent[length]):
                high, high_match = middle, length
            else:
                low, low_match = middle + 1, length
        return low

    def _match(self, slot: int, context: list[int]) -> int:
        """How many tokens before the place in ``slot`` equal the context's last."""
        if not 0 <= slot < len(self._order):
            return 0
        tokens, place = self._tokens, self._order[slot]
        longest = min(place, len(context))
        length = 0
        while length < longest and tokens[place - 1 - length] == context[-1 - length]:
            length += 1
        return length

    def _run(self, slot: int, direction: int, match: list[int]) -> int:
        """How many slots, from ``slot`` on in a direction, hold places right after ``match``."""
        slots = self._order[slot:] if direction > 0 else self._order[: slot + 1][::-1]
        inside, outside = 0, 1
        while outside <= len(slots) and self._follows(slots[outside - 1], match):
            inside, outside = outside, 2 * outside
        outside = min(outside, len(slots) + 1)
        while outside - inside > 1:
            middle = (inside + outside) // 2
            if self._follows(slots[middle - 1], match):
                inside = middle
            else:
                outside = middle
        return inside

    def _follows(self, place: int, match: list[int]) -> bool:
        return place >= len(match) and self._tokens[place - len(match) : place].tolist() == match


@dataclass(frozen=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        identity: whose tokens.
        built_tokens, built_sequences: from ``mlxspec store build`` and ``add``.
        learned_tokens, learned_sequences: from outputs.
        nbytes: size of the file.
    """

    identity: TokenizerIdentity
    built_tokens: int
    built_sequences: int
    learned_tokens: int
    learned_sequences: int
    nbytes: int


class Store:
    """Texts on disk in which a context's last tokens are looked up.

    The file is mapped into memory, so processes share it and only what look-ups touch needs to
    stay there. It remains readable while others replace it: this store then holds what the file
    held when it was opened. (mlxspec never changes a file in place. A program that cuts one short
    in place ends the processes that read it, as with every mapped file.) Use :func:`open_store`.

    Attributes:
        tokens: the ids of all texts, a SEPARATOR behind each; an indexable view.
    """

    def __init__(self, file: StoreFile) -> None:
        self._file = file
        self.tokens = file.tokens.data
        self._parts = tuple(
            (PlaceSearch(part.tokens, part.order), offset - len(file.tokens))
            for part, offset in ((file.built, 0), (file.learned, len(file.built.tokens)))
            if len(part.order)
        )

    def occurrences(self, tail: Sequence[int], limit: int) -> list[Occurrence]:
        """Where the context's last tokens stand, the longest matches first, then the newest.

        Args:
            tail: the context's last tokens, at most 64 of which are compared.
            limit: most occurrences to return.

        Returns:
            occurrences whose positions are **negative**: they count from the end of
            :attr:`tokens`, so that ``tokens[position]`` is what followed and no position is one
            of the context's. What follows a position ends with a SEPARATOR, always.
        """
        found: list[Occurrence] = []
        for search, offset in self._parts:
            found += [
                Occurrence(length, position + offset)
                for length, position in search.occurrences(tail, limit)
            ]
        if len(self._parts) > 1:
            found.sort(reverse=True)
        return found[:limit]

    @property
    def info(self) -> StoreInfo:
        """What the store holds, counted."""
        built, learned = self._file.built, self._file.learned
        return StoreInfo(
            self._file.identity,
            built.size,
            built.sequences,
            learned.size,
            learned.sequences,
            self._file.nbytes,
        )


def open_store(path: str | os.PathLike[str], tokenizer: Vocabulary | None = None) -> Store:
    """Open a store, all of which is verified once (0.1 s for ten million tokens).

    Args:
        path: the file.
        tokenizer: the model's; None opens a store of any tokenizer.

    Raises:
        StoreError: it is no store, damaged, or another tokenizer's.
    """
    file = read_store_file(Path(path))
    if tokenizer is not None:
        check_tokenizer(path, file.identity, identify(tokenizer))
    return Store(file)


def check_tokenizer(
    path: str | os.PathLike[str], of_store: TokenizerIdentity, given: TokenizerIdentity
) -> None:
    """Raise StoreError unless a store's tokenizer is the given one."""
    if (of_store.fingerprint, of_store.vocab_size) != (given.fingerprint, given.vocab_size):
        raise StoreError(
            f"{os.fspath(path)}: holds tokens of {of_store}, the model's tokenizer is {given}; "
            "build a store for it with `mlxspec store build`"
        )
