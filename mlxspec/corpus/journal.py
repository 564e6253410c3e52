"""Answers as they end, in a file that one process appends to."""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..files import PRIVATE
from .part import EARNED, Learned
from .suffix_array import TOKEN_BYTES
from .tokenizer_identity import TokenizerIdentity

JOURNAL, MOVED = ".journal", ".moved"

# A journal: a header with the magic bytes, the version, the vocabulary's size, the tokenizer's
# fingerprint and a checksum; then a record for each answer, with a checksum of the rest of it,
# the number of tokens, the time at which it ended, the figures of EARNED, and the tokens.
VERSION = 1
_HEADER = struct.Struct("<8sII32s")
_MAGIC = b"mlxjourn"
_RECORD = struct.Struct(f"<II{len(EARNED)}H")
_CRC = struct.Struct("<I")
_LONGEST = 1 << 24  # tokens of an answer
_MOST_BYTES = 1 << 28  # of a journal, which usually has less than 100 kB


class JournalMovedError(Exception):
    """A journal is no longer at its place: another process forgets answers."""


class Journal:
    """A journal that this process alone appends to, while it lives or until it is closed.

    Args:
        directory: where it is.
        identity: the tokenizer whose tokens it holds.
        name: of one that is there; a new one gets a name that nobody can guess.

    Attributes:
        path: the file.
        name: of the file, 16 hexadecimal digits.

    Raises:
        BlockingIOError: another process appends to it.
        FileNotFoundError: it is there no more.
        OSError: it cannot be opened or made.
    """

    def __init__(self, directory: Path, identity: TokenizerIdentity, name: str = "") -> None:
        self._identity = identity
        self.name = name or secrets.token_hex(8)
        self.path = directory / f"{self.name}{JOURNAL}"
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        flags |= 0 if name else os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(self.path, flags, PRIVATE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.is_at_its_place():
                raise FileNotFoundError(self.path)
            if not name:
                self._write(_header(identity))
        except BaseException:
            if not name:
                with suppress(OSError):
                    self.path.unlink()
            self.close()
            raise

    def is_at_its_place(self) -> bool:
        """Whether nobody has moved, removed or replaced the file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except OSError:
            return False

    def adopt(self) -> list[Learned]:
        """The answers in it. A torn one at the end, which its writer was killed at, is cut off.

        Raises:
            ValueError: it is no journal of this tokenizer's tokens.
            OSError: it cannot be read.
        """
        data = read(self._descriptor)
        answers, end = parse(data, self._identity)
        if end < len(data):
            os.ftruncate(self._descriptor, end)
        if end == 0:
            self._write(_header(self._identity))
        return answers

    def append(self, answer: Learned) -> None:
        """Write an answer down.

        Raises:
            JournalMovedError: the file is not at its place; what it held is not known.
            OSError: it cannot be written; the file is as it was.
        """
        if not self.is_at_its_place():
            raise JournalMovedError
        record = _RECORD.pack(len(answer.text) // TOKEN_BYTES, answer.learned, *answer.earned)
        record += answer.text
        self._write(_CRC.pack(zlib.crc32(record)) + record)
        if not self.is_at_its_place():  # whoever moved it may have read it before
            raise JournalMovedError

    def remove(self) -> None:
        """Remove the file, whose answers are elsewhere by now."""
        if self.is_at_its_place():
            with suppress(OSError):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Leave the file to whoever opens the directory next."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise


def read(descriptor: int) -> bytes:
    """All of a file.

    Raises:
        ValueError: it is longer than any journal.
        OSError: it cannot be read.
    """
    if os.fstat(descriptor).st_size > _MOST_BYTES:
        raise ValueError("is too long for a journal")
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def parse(data: bytes, identity: TokenizerIdentity) -> tuple[list[Learned], int]:
    """The answers in a journal, and where the last of them ends.

    A damaged one is left out. What follows it is read where its length is right.

    Raises:
        ValueError: it is no journal of this tokenizer's tokens.
    """
    header = _header(identity)
    if data[: len(header)] != header:
        if header.startswith(data):  # its writer was killed at the beginning
            return [], 0
        raise ValueError("is no journal of this tokenizer")
    answers: list[Learned] = []
    at = end = len(header)
    while at + _CRC.size + _RECORD.size <= len(data):
        (checksum,) = _CRC.unpack_from(data, at)
        length, learned, *earned = _RECORD.unpack_from(data, at + _CRC.size)
        text_at = at + _CRC.size + _RECORD.size
        next_at = text_at + TOKEN_BYTES * length
        if not 2 <= length <= _LONGEST or next_at > len(data):
            break
        text = data[text_at:next_at]
        if zlib.crc32(data[at + _CRC.size : next_at]) == checksum and _are_tokens(text, identity):
            answers.append(Learned(text, learned, tuple(earned)))
            end = next_at
        at = next_at
    return answers, end


def _header(identity: TokenizerIdentity) -> bytes:
    header = _HEADER.pack(_MAGIC, VERSION, identity.vocab_size, identity.fingerprint)
    return header + _CRC.pack(zlib.crc32(header))


def _are_tokens(text: bytes, identity: TokenizerIdentity) -> bool:
    tokens = np.frombuffer(text, np.int32)
    return bool(tokens.min() >= 0 and tokens.max() < identity.vocab_size)
