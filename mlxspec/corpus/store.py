"""A store: texts in a file, and the tokenizer whose tokens they are."""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import OptionError, StoreError
from ..files import replaced
from .excerpts import DamagedTexts, Searched, excerpts
from .suffix_array import TOKEN_BITS, SuffixArray
from .suffix_index import EXCERPT_TOKENS, SEPARATOR, Excerpts
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


@dataclass(frozen=True, eq=False)
class Store:
    """Texts on disk in which a context's last tokens are looked up; see :func:`open_store`.

    The file is mapped into memory, so processes share it, and only what look-ups touch needs to
    stay there. A store holds what the file held when it was opened, even when others replace the
    file meanwhile. (mlxspec never changes a file in place. A program that cuts one short in place
    ends the processes that read it, as with every mapped file.)

    Attributes:
        identity: the tokenizer.
        built: what ``mlxspec store build`` and ``add`` put in.
        learned: outputs.
        tokens: the ids of all texts, a SEPARATOR behind each.
        nbytes: size of the file.
        path, checksums: of the file and its four sections, to verify it.
    """

    identity: TokenizerIdentity
    built: SuffixArray
    learned: SuffixArray
    tokens: memoryview
    nbytes: int
    path: Path
    checksums: tuple[int, ...]

    def verify(self) -> Store:
        """Verify all of the file (0.1 s for ten million tokens).

        Returns:
            the store itself.

        Raises:
            StoreError: it is damaged.
        """
        parts = self.built, self.learned
        sections = (*(part.tokens for part in parts), *(part.order for part in parts))
        for section, checksum in zip(sections, self.checksums, strict=True):
            if zlib.crc32(section.data) != checksum:
                raise StoreError(f"{self.path}: is damaged (a checksum is wrong); {_REMEDY}")
        if not all(_is_valid(part, self.identity.vocab_size) for part in parts):
            raise StoreError(f"{self.path}: holds tokens or places out of bounds; {_REMEDY}")
        return self

    @cached_property
    def _searched(self) -> list[Searched]:
        """Both parts as a look-up takes them, the newer one first."""
        return [
            Searched(part.matches, part.tokens.data, part) for part in (self.learned, self.built)
        ]

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = EXCERPT_TOKENS) -> Excerpts:
        """Find what followed where the context's last tokens stand.

        Args:
            tail: the context's last tokens, at most 64 of which are compared.
            limit: how many excerpts to return at most.
            depth: how many tokens an excerpt has at most.

        Returns:
            the excerpts; none from a part of the file that proves to be damaged.
        """
        parts = self._searched
        while True:
            try:
                return excerpts(parts, tail, limit, depth, self.identity.vocab_size)
            except DamagedTexts as damaged:
                parts = [part for part in parts if part.texts is not damaged.texts]

    @property
    def info(self) -> StoreInfo:
        """What the store holds, counted."""
        return StoreInfo(
            self.identity,
            self.built.n_tokens,
            self.built.n_texts,
            self.learned.n_tokens,
            self.learned.n_texts,
            self.nbytes,
        )


def open_store(path: str | os.PathLike[str], tokenizer: Vocabulary | None = None) -> Store:
    """Open a store. Its header and its length are verified, so that this takes a millisecond.

    :meth:`Store.look_up` bears whatever the rest holds; :meth:`Store.verify` verifies it.

    Args:
        path: the file.
        tokenizer: the model's; None opens a store of any tokenizer.

    Raises:
        StoreError: it is no store, cut short, of a later version, or another tokenizer's, or its
            header is damaged.
    """
    return read_store(Path(path), None if tokenizer is None else identify(tokenizer))


# The file: a header, then the tokens of what was built, the tokens of what was learned, and the
# order of either, all as little-endian int32. The header has the magic bytes, the version, the
# vocabulary's size, the four sections' lengths and checksums, the tokenizer's fingerprint and
# name, and at its end a checksum of its own.
VERSION = 1
_MAGIC = b"mlxstore"
_HEADER = struct.Struct("<8sII4I4I32s96s76xI")
_NAME_BYTES = 96
_CRC_BYTES = 4
_MAX_WORDS = 2**31 - 1  # positions are int32
_REMEDY = "build it again with `mlxspec store build`"


def read_store(path: Path, identity: TokenizerIdentity | None = None) -> Store:
    """Map a store's file and verify its header and its length.

    Args:
        path: the file.
        identity: the tokenizer whose tokens it must hold; None for any.

    Raises:
        StoreError: as :func:`open_store`.
    """
    words = _map(path)
    header = words[: _HEADER.size // 4].tobytes()
    magic, version, vocab_size, *rest, name, header_crc = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise StoreError(f"{path}: is no store; {_REMEDY}")
    if version != VERSION:
        raise StoreError(f"{path}: has version {version} of the format, not {VERSION}; {_REMEDY}")
    if header_crc != zlib.crc32(header[:-_CRC_BYTES]):
        raise StoreError(f"{path}: its header is damaged; {_REMEDY}")
    lengths, checksums, fingerprint = rest[:4], rest[4:8], rest[8]
    missing = _HEADER.size + 4 * sum(lengths) - 4 * len(words)
    if missing:
        wrong = f"{missing:,} bytes too short" if missing > 0 else f"{-missing:,} bytes too long"
        raise StoreError(f"{path}: is {wrong}; {_REMEDY}")
    if not 0 < vocab_size < 1 << TOKEN_BITS:
        raise StoreError(f"{path}: has a vocabulary of {vocab_size:,} tokens; {_REMEDY}")
    body = words[_HEADER.size // 4 :]
    sections = np.split(body, np.cumsum(lengths)[:3])
    built, learned = (SuffixArray(sections[part], sections[part + 2]) for part in (0, 1))
    held = TokenizerIdentity(_printable(name), vocab_size, fingerprint)
    if identity and (identity.fingerprint, identity.vocab_size) != (fingerprint, vocab_size):
        raise StoreError(
            f"{path}: holds tokens of {held}, the model's tokenizer is {identity}; "
            "build a store for it with `mlxspec store build`"
        )
    tokens = body[: lengths[0] + lengths[1]]
    return Store(held, built, learned, tokens.data, words.nbytes, path, tuple(checksums))


def write_store(
    path: Path, identity: TokenizerIdentity, built: SuffixArray, learned: SuffixArray
) -> None:
    """Put a store in the place of whatever is at ``path``, whole or not at all.

    Raises:
        StoreError: it cannot be written, or is too large.
    """
    sections = (built.tokens, learned.tokens, built.order, learned.order)
    if len(built.tokens) + len(learned.tokens) > _MAX_WORDS:
        raise StoreError(f"{path}: more than {_MAX_WORDS:,} tokens; build several stores")
    # Cut to whole characters.
    name = identity.name.encode()[:_NAME_BYTES].decode(errors="ignore").encode()
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        identity.vocab_size,
        *map(len, sections),
        *(zlib.crc32(section.data) for section in sections),
        identity.fingerprint,
        name,
        0,
    )[:-_CRC_BYTES]
    with replaced(path, StoreError) as file:
        file.write(header + struct.pack("<I", zlib.crc32(header)))
        for section in sections:
            file.write(section.data)


def begins_as_store(path: Path) -> bool:
    """Whether a file is a store, damaged perhaps."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def check_max_tokens(max_tokens: int) -> None:
    """Refuse a limit below the two tokens that a look-up needs.

    Raises:
        OptionError: it is below 2.
    """
    if max_tokens < 2:
        raise OptionError(f"max_tokens is {max_tokens}: take at least 2")


def _map(path: Path) -> np.ndarray:
    """The file as int32 words, read from the disk when they are looked at."""
    try:
        # A blocking open would wait for the other end of a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"{path}: is not a regular file; name a store")
            if status.st_size < _HEADER.size or status.st_size % 4:
                raise StoreError(f"{path}: is no store, or cut short; {_REMEDY}")
            mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise StoreError(
            f"{path}: no such file; make a store with `mlxspec store build`, or by learning"
        ) from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    if sys.byteorder != "little":
        raise StoreError(f"{path}: stores can be read on little-endian machines only")
    return np.frombuffer(mapped, dtype=np.int32)


def _printable(name: bytes) -> str:
    """The tokenizer's name as it may go to a terminal, on one line."""
    text = name.rstrip(b"\0").decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def _is_valid(part: SuffixArray, vocab_size: int) -> bool:
    """Whether every id is the tokenizer's and every place has a token before and after it."""
    tokens, order = part.tokens, part.order
    if len(tokens) == 0:
        return len(order) == 0
    return (
        len(order) < len(tokens)
        and tokens[-1] == SEPARATOR
        and tokens.min() >= SEPARATOR
        and tokens.max() < vocab_size
        and (len(order) == 0 or (order.min() > 0 and order.max() < len(tokens)))
    )
