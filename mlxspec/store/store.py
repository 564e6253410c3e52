"""A store as a drafter uses it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..drafting.suffix_index import Occurrence
from ..errors import StoreError
from .place_search import PlaceSearch
from .store_file import StoreFile, read_store_file
from .tokenizer_identity import TokenizerIdentity, Vocabulary, identify


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
