"""The places of a text in the order of what stands before them."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..draft.suffix_index import MAX_LENGTH, SEPARATOR
from ..errors import StoreError
from ..files import replaced

TOKEN_BITS = 21
"""Token ids are below 2**TOKEN_BITS - 1: three of them fit into one integer to sort by."""


def sorted_places(tokens: np.ndarray) -> np.ndarray:
    """Sort the places that have a token before and after them by the tokens before them.

    The tokens are compared backwards from the place: first the one just before it, then the one
    before that, at least MAX_LENGTH of them. So the places at which a context ends as it does
    now stand beside each other, and the longer they agree with it the closer. Equal places
    keep the text's order.

    This is a suffix array of the reversed text (Manber and Myers, 1990), built by doubling the
    number of tokens compared, and each time only among the places that were equal so far
    (Larsson and Sadakane, 1999).

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
    """All places 0 … n by the three tokens before them, and where a new value starts.

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
    """Where, in sorted keys, one stands for the first time."""
    starts = np.ones(len(keys), bool)
    starts[1:] = keys[1:] != keys[:-1]
    return starts


_HUB_SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")
_MAX_VOCABULARY = (1 << TOKEN_BITS) - 1


class Vocabulary(Protocol):
    """What is asked of a tokenizer here; mlx-lm's, transformers' and tokenizers' have it."""

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made some token ids.

    Attributes:
        name: for people; a model's name, without the path to it.
        vocab_size: all ids are below it.
        fingerprint: SHA-256 of the vocabulary, 32 bytes. Equal for tokenizers whose ids mean
            the same; how they split a text is not in it, because a store from text that was
            split otherwise is still right, if less useful.
    """

    name: str
    vocab_size: int
    fingerprint: bytes

    def __str__(self) -> str:
        return f"{self.name} ({self.vocab_size:,} tokens, {self.fingerprint.hex()[:8]})"


def identify(tokenizer: Vocabulary) -> TokenizerIdentity:
    """The identity of a tokenizer, from its whole vocabulary, added tokens included.

    Raises:
        StoreError: it has no tokens, or more than a store can hold.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    name = _short_name(getattr(tokenizer, "name_or_path", None) or "unnamed")
    if not vocabulary or not 0 <= vocabulary[0][0] <= vocabulary[-1][0] < _MAX_VOCABULARY:
        raise StoreError(
            f"the tokenizer {name} has ids that no store can hold: 0 to {_MAX_VOCABULARY - 1:,} "
            "are possible"
        )
    fingerprint = hashlib.sha256(json.dumps(vocabulary).encode()).digest()
    return TokenizerIdentity(name, vocabulary[-1][0] + 1, fingerprint)


def _short_name(path: str) -> str:
    """``owner/name`` of a copy from the Hub; of other directories the last part of the path."""
    if snapshot := _HUB_SNAPSHOT.search(path):
        return f"{snapshot[1]}/{snapshot[2]}"
    if os.path.isabs(path) or os.path.isdir(path):
        return os.path.basename(os.path.abspath(path)) or "unnamed"
    return path


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


_WORD = 4  # bytes of a token
_SEPARATOR_BYTES = np.int32(SEPARATOR).tobytes()


def as_texts(tokens: Sequence[int], vocab_size: int) -> list[bytes]:
    """Token ids as the bytes of int32, fit to be compared and kept in a dictionary.

    Ids beyond the vocabulary, which a model with spare rows may emit, divide a text. A text of
    one token is left out: nothing can be looked up in it.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    known = (ids >= 0) & (ids < vocab_size)
    return divided(np.where(known, ids, SEPARATOR).astype(np.int32))


def divided(tokens: np.ndarray) -> list[bytes]:
    """The texts between the separators, the empty ones and those of one token left out."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    texts = (text[text != SEPARATOR].tobytes() for text in np.split(tokens, ends))
    return [text for text in texts if len(text) > _WORD]


def joined(texts: Iterable[bytes]) -> Part:
    """The texts with separators behind them, and their places in order."""
    data = b"".join(text + _SEPARATOR_BYTES for text in texts)
    if not data:
        return EMPTY
    tokens = np.frombuffer(data, dtype=np.int32)
    return Part(tokens, sorted_places(tokens))


def newest(texts: dict[bytes, None], max_tokens: int) -> list[bytes]:
    """The last texts that hold no more than ``max_tokens``; of one that is too long, its end."""
    kept: list[bytes] = []
    room = max_tokens * _WORD
    for text in reversed(texts):
        if len(text) > room:
            if not kept:
                kept.append(text[-room:])
            break
        kept.append(text)
        room -= len(text)
    return kept[::-1]


def oldest(texts: Iterable[bytes], max_tokens: int) -> Iterator[bytes]:
    """The first texts, up to ``max_tokens`` tokens; the last one may be cut."""
    room = max_tokens * _WORD
    for text in texts:
        if room <= _WORD:
            return
        yield text[:room]
        room -= len(text)
