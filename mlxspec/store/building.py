"""Making a store from token sequences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from ..errors import OptionError, StoreError
from ..files import check_writable, sole_writer
from .sequences import as_texts, divided, joined, oldest
from .store import Store, check_tokenizer
from .store_file import EMPTY, begins_as_store, read_store_file, write_store_file
from .tokenizer_identity import Vocabulary, identify

MAX_TOKENS = 50_000_000
"""Tokens of a store unless it is told otherwise. Building it takes about 90 bytes a token."""


def build_store(
    path: str | os.PathLike[str],
    sequences: Iterable[Sequence[int]],
    tokenizer: Vocabulary,
    *,
    max_tokens: int = MAX_TOKENS,
    force: bool = False,
) -> Store:
    """Write a store of the sequences, each of which is kept once; it appears whole or not at all.

    Args:
        path: the file to write.
        sequences: token ids of one text each. Later ones count as newer.
        tokenizer: whose ids they are.
        max_tokens: how many to take; what comes after them is not read.
        force: replace a store that is at ``path``.

    Raises:
        OptionError: ``max_tokens`` is below 2.
        StoreError: ``path`` is in use or cannot be written, or there are no tokens.
    """
    target = Path(path)
    _check_target(target, force)
    _check_max_tokens(max_tokens)
    identity = identify(tokenizer)
    texts = chain.from_iterable(as_texts(ids, identity.vocab_size) for ids in sequences)
    built = joined(oldest(_once(texts), max_tokens))
    if not len(built.tokens):
        raise StoreError(f"{target}: nothing to write, there is no text of two tokens or more")
    with sole_writer(target, StoreError, create=True):
        _check_target(target, force)
        write_store_file(target, identity, built, EMPTY)
    return Store(read_store_file(target))


def add_to_store(
    path: str | os.PathLike[str],
    sequences: Iterable[Sequence[int]],
    tokenizer: Vocabulary,
    *,
    max_tokens: int = MAX_TOKENS,
) -> Store:
    """Add those sequences to a store that it does not hold yet; what it has learned stays.

    Args:
        path: the store.
        sequences: token ids of one text each.
        tokenizer: whose ids they are.
        max_tokens: how many tokens the built part may have then.

    Raises:
        OptionError: ``max_tokens`` is below 2.
        StoreError: ``path`` is no store, another tokenizer's, or cannot be written.
    """
    target = Path(path)
    _check_max_tokens(max_tokens)
    identity = identify(tokenizer)
    check_tokenizer(path, read_store_file(target).identity, identity)
    # Made before the lock is taken: tokenising may last.
    texts = [text for ids in sequences for text in as_texts(ids, identity.vocab_size)]
    with sole_writer(target, StoreError, create=False):
        file = read_store_file(target)
        check_tokenizer(path, file.identity, identity)
        held = divided(file.built.tokens)
        new = oldest(_once(texts, known=held), max_tokens - file.built.size)
        write_store_file(target, file.identity, joined(chain(held, new)), file.learned)
    return Store(read_store_file(target))


def _once(texts: Iterable[bytes], known: Iterable[bytes] = ()) -> Iterator[bytes]:
    """The texts without repetitions, and without those known before."""
    seen = set(known)
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _check_target(target: Path, force: bool) -> None:
    check_writable(target, StoreError)
    if not target.exists() or target.stat().st_size == 0:
        return
    if not force:
        raise StoreError(
            f"{target}: exists; name another file, extend it with `mlxspec store add`, or "
            "replace it with --force"
        )
    if not begins_as_store(target):
        raise StoreError(f"{target}: is no store, and --force replaces nothing else")


def _check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 2:
        raise OptionError(f"max_tokens is {max_tokens}: take at least 2")
