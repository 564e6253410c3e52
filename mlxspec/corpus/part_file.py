"""A sorted part of a memory in a file, mapped and never changed."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import StoreError
from ..files import replaced
from .part import RECORD, Merged, Part, day_of
from .suffix_array import TOKEN_BITS, SuffixArray
from .suffix_index import SEPARATOR
from .tokenizer_identity import TokenizerIdentity

PART, USED, DAMAGED = ".part", ".used", ".damaged"

# A part's file: the header, then the records, the tokens, and the order of their places, all
# little-endian. The header has the magic bytes, the version, its own length, the vocabulary's
# size, the tokenizer's fingerprint, the numbers of texts and tokens, the checksums of the three
# sections and the number of files that the part replaces. Their names follow, eight bytes each,
# and at the header's end is its checksum. A text of n tokens has n - 1 places, so the length of
# the order is known.
VERSION = 1
_MAGIC = b"mlxmemry"
_HEADER = struct.Struct("<8sIII32sIIIIII4x")
_NAME_BYTES = 8
_ALIGNMENT = 32
_CRC = struct.Struct("<I")
_MAX_HEADER = 1 << 20
_MAX_WORDS = 2**31 - 1  # positions are int32
_CHECKED = 1 << 20  # bytes, or numbers, that are verified at a time


class DamagedPartError(Exception):
    """A file is no part, or a damaged one; the message says in which way."""


class LaterPartError(Exception):
    """A file was written by a later version of mlxspec."""


class FilePart(Part):
    """A part in a file, of which only header and length were verified when it was opened.

    Args:
        path: the file.
        identity: the tokenizer whose tokens it must hold.

    Attributes:
        path: the file.
        name: of the file, 16 hexadecimal digits.
        replaces: the names of the files whose texts this one has.
        nbytes: size of the file.

    Raises:
        DamagedPartError, LaterPartError: it is no such part.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, identity: TokenizerIdentity) -> None:
        mapped = _map(path)
        fields, names = _header(mapped)
        version, start, vocab_size, fingerprint, n_texts, n_tokens, *self._checksums = fields
        if version != VERSION:
            raise LaterPartError(f"has version {version} of the format, not {VERSION}")
        if (vocab_size, fingerprint) != (identity.vocab_size, identity.fingerprint):
            raise DamagedPartError("holds another tokenizer's tokens")
        lengths = RECORD.itemsize * n_texts, 4 * n_tokens, 4 * (n_tokens - 2 * n_texts)
        if min(lengths) < 0 or start + sum(lengths) != len(mapped):
            raise DamagedPartError("is cut short, or too long")
        self.path = path
        self.name = path.stem
        self.replaces = frozenset(names)
        self.nbytes = len(mapped)
        self._vocab_size = vocab_size
        self._ends = np.cumsum((start, *lengths)).tolist()
        kinds = RECORD, np.dtype("<i4"), np.dtype("<i4")
        records, tokens, order = (
            np.frombuffer(mapped, kind, length // kind.itemsize, offset)
            for kind, length, offset in zip(kinds, lengths, self._ends, strict=False)
        )
        super().__init__(SuffixArray(tokens, order), records, _used(path, records))

    def verify(self) -> Generator[None, None, None]:
        """Verify all of the file, piece by piece.

        Raises:
            DamagedPartError: it is damaged.
            OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            sections = zip(self._ends, self._ends[1:], self._checksums, strict=False)
            for start, end, checksum in sections:
                file.seek(start)
                crc = 0
                while start < end:
                    piece = file.read(min(_CHECKED, end - start))
                    if not piece:
                        raise DamagedPartError("is cut short")
                    crc, start = zlib.crc32(piece, crc), start + len(piece)
                    yield
                if crc != checksum:
                    raise DamagedPartError("is damaged (a checksum is wrong)")
        yield from self._make_sense()

    def _make_sense(self) -> Generator[None, None, None]:
        """Verify what a merge relies on, should somebody have made the checksums right."""
        tokens, order, lengths = self.array.tokens, self.array.order, self.lengths
        sense = not len(lengths) or bool(
            lengths.min() > 2
            and self.records["end"][-1] == len(tokens)
            and (tokens[self.records["end"] - 1] == SEPARATOR).all()
        )
        sense = sense and (len(lengths) > 0 or len(tokens) == 0)
        separators = 0
        for start in range(0, len(tokens), _CHECKED):
            piece, places = tokens[start:][:_CHECKED], order[start:][:_CHECKED]
            separators += int(np.count_nonzero(piece == SEPARATOR))
            sense = sense and bool(
                piece.min() >= SEPARATOR
                and piece.max() < self._vocab_size
                and (not len(places) or (places.min() > 0 and places.max() < len(tokens)))
            )
            yield
        if not sense or separators != len(lengths):
            raise DamagedPartError("holds tokens or places out of bounds")


def write_part(
    directory: Path, merged: Merged, identity: TokenizerIdentity, replaces: Iterable[str]
) -> Generator[None, None, FilePart]:
    """Write a part, piece by piece; it appears whole or not at all.

    Args:
        directory: where it shall be.
        merged: what it holds.
        identity: the tokenizer.
        replaces: the names of the files whose texts it has.

    Raises:
        StoreError: it cannot be written, or is too large.
    """
    if merged.n_tokens > _MAX_WORDS:
        raise StoreError(f"{directory}: more than {_MAX_WORDS:,} tokens; lower max_tokens")
    names = sorted(set(replaces))
    length = _HEADER.size + _NAME_BYTES * len(names) + _CRC.size
    start = -(-length // _ALIGNMENT) * _ALIGNMENT
    path = directory / f"{secrets.token_hex(_NAME_BYTES)}{PART}"
    used = path.with_suffix(USED)
    try:
        # First, so that no part is without it.
        with replaced(used, StoreError) as file:
            file.write(merged.used().data)
        with replaced(path, StoreError) as file:
            file.write(bytes(start))
            records = merged.records.tobytes()
            file.write(records)
            checksums = [zlib.crc32(records), 0, 0]
            counts = [0, 0]
            for section, pieces in enumerate((merged.tokens(), merged.order())):
                for piece in pieces:
                    data = np.ascontiguousarray(piece).data
                    file.write(data)
                    checksums[section + 1] = zlib.crc32(data, checksums[section + 1])
                    counts[section] += len(piece)
                    yield
            if counts != [merged.n_tokens, merged.n_places]:
                raise StoreError(f"{directory}: a part to be merged is damaged")
            header = _HEADER.pack(
                _MAGIC,
                VERSION,
                start,
                identity.vocab_size,
                identity.fingerprint,
                len(merged.records),
                merged.n_tokens,
                *checksums,
                len(names),
            )
            header += b"".join(bytes.fromhex(name) for name in names)
            header = header.ljust(start - _CRC.size, b"\0")
            file.seek(0)
            file.write(header + _CRC.pack(zlib.crc32(header)))
    except BaseException:
        with suppress(OSError):
            used.unlink()
        raise
    return FilePart(path, identity)


def _map(path: Path) -> mmap.mmap:
    # A blocking open would wait for the other end of a named pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedPartError("is no regular file")
        if status.st_size < _HEADER.size + _CRC.size:
            raise DamagedPartError("is cut short")
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def _header(mapped: mmap.mmap) -> tuple[list, list[str]]:
    """The fields behind the magic bytes up to the checksums, and the names of replaced files."""
    magic, *fields, n_names = _HEADER.unpack_from(mapped)
    start = fields[1]
    if magic != _MAGIC:
        raise DamagedPartError("is no part of a memory")
    names_end = _HEADER.size + _NAME_BYTES * n_names
    if not names_end + _CRC.size <= start <= min(_MAX_HEADER, len(mapped)) or start % _ALIGNMENT:
        raise DamagedPartError("has a damaged header")
    header = mapped[: start - _CRC.size]
    if _CRC.unpack_from(mapped, len(header))[0] != zlib.crc32(header):
        raise DamagedPartError("has a damaged header")
    vocab_size = fields[2]
    if not 0 < vocab_size < 1 << TOKEN_BITS:
        raise DamagedPartError(f"has a vocabulary of {vocab_size:,} tokens")
    starts = range(_HEADER.size, names_end, _NAME_BYTES)
    return fields, [header[at : at + _NAME_BYTES].hex() for at in starts]


def _used(path: Path, records: np.ndarray) -> np.ndarray:
    """The days of last use of a part's texts, shared with other processes where that can be."""
    size = 2 * len(records)
    with suppress(OSError, ValueError):
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path.with_suffix(USED), flags)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == size > 0:
                return np.frombuffer(mmap.mmap(descriptor, size), "<u2")
        finally:
            os.close(descriptor)
    return day_of(records["learned"])
