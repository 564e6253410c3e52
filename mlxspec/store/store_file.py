"""The file format of a store, version 1.

All numbers are little endian. The header of 256 bytes:

====== ===== ======================================================================
offset bytes
====== ===== ======================================================================
0      8     ``mlxstore``
8      4     version, 1
12     4     vocabulary size V of the tokenizer
16     16    int32 words in each of the four sections below
32     16    CRC-32 of each section
48     32    fingerprint of the tokenizer
80     96    its name, UTF-8, padded with zeros
176    76    zeros
252    4     CRC-32 of the header up to here
====== ===== ======================================================================

The sections are arrays of int32 and fill the rest of the file: built tokens, learned tokens,
built order, learned order. Tokens are texts with a separator (-1) behind each; the order of a
part (:func:`mlxspec.store.place_order.sorted_places`) counts from that part's beginning.

A file comes from anywhere, so nothing in it is believed: the checksums find accidents, and
every token and position is compared with its bounds besides, which is what protects from malice.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..drafting.suffix_index import SEPARATOR
from ..errors import StoreError
from ..files import replaced
from .place_order import TOKEN_BITS
from .tokenizer_identity import TokenizerIdentity

VERSION = 1
_MAGIC = b"mlxstore"
_HEADER = struct.Struct("<8sII4I4I32s96s76xI")
_NAME_BYTES = 96
_CRC_BYTES = 4
_MAX_WORDS = 2**31 - 1  # positions are int32
_REMEDY = "build it again with `mlxspec store build`"


@dataclass(frozen=True)
class Part:
    """Texts and their sorted places.

    Attributes:
        tokens: (n,) of int32, a separator behind each text.
        order: (places,) of int32.
    """

    tokens: np.ndarray
    order: np.ndarray

    @property
    def sequences(self) -> int:
        """The number of texts."""
        return int(np.count_nonzero(self.tokens == SEPARATOR))

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.tokens) - self.sequences


EMPTY = Part(np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True)
class StoreFile:
    """A store's file, mapped.

    Attributes:
        identity: the tokenizer.
        built: what ``mlxspec store build`` and ``add`` put in.
        learned: outputs.
        tokens: the tokens of both parts, one after the other.
        nbytes: size of the file.
    """

    identity: TokenizerIdentity
    built: Part
    learned: Part
    tokens: np.ndarray
    nbytes: int


def read_store_file(path: Path) -> StoreFile:
    """Map a store's file and verify all of it.

    Raises:
        StoreError: it is no store, cut short, damaged, or of a later version.
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
    for section, checksum in zip(sections, checksums, strict=True):
        if zlib.crc32(section.data) != checksum:
            raise StoreError(f"{path}: is damaged (a checksum is wrong); {_REMEDY}")
    built, learned = Part(sections[0], sections[2]), Part(sections[1], sections[3])
    if not (_is_valid(built, vocab_size) and _is_valid(learned, vocab_size)):
        raise StoreError(f"{path}: holds tokens or places out of bounds; {_REMEDY}")
    return StoreFile(
        TokenizerIdentity(_printable(name), vocab_size, fingerprint),
        built,
        learned,
        tokens=body[: lengths[0] + lengths[1]],
        nbytes=4 * len(words),
    )


def begins_as_store(path: Path) -> bool:
    """Whether a file is a store, damaged perhaps."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def write_store_file(path: Path, identity: TokenizerIdentity, built: Part, learned: Part) -> None:
    """Put a store's file in the place of whatever is at ``path``, whole or not at all.

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


def _map(path: Path) -> np.ndarray:
    """The file as int32 words, read from the disk when they are looked at."""
    try:
        # A named pipe would keep a blocking open waiting.
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


def _is_valid(part: Part, vocab_size: int) -> bool:
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
