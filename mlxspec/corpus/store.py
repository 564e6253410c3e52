"""Stores: files of texts to draft from, chosen by the user."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError, printable
from ..files import check_writable, replaced
from ..jsonl import conversation_of, json_lines
from .answers import TokenizerIdentity, identify
from .suffix_index import (
    EXCERPT_TOKENS,
    SEPARATOR,
    TOKEN_BYTES,
    Excerpts,
    SuffixArray,
    encode_texts,
    excerpts,
    write_index,
)

MAX_TOKENS = 50_000_000
"""The most tokens in a store; further texts are not read. Building takes 90 bytes per token."""

_TEXT_CHARACTERS = 32_768  # read at a time; then the rest of the line is read, too


def find_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Find the named files, and all files in the named directories.

    In directories, names that begin with a dot are skipped, and so is anything but regular files.
    Links to directories are not followed, so loops cannot occur. Each file is found once.

    Raises:
        FileError: a named path does not exist, or is neither a file nor a directory.
    """
    found: dict[Path, Path] = {}  # the key is the path without links
    for path in map(Path, paths):
        if not (os.path.isfile(path) or os.path.isdir(path)) or not os.access(path, os.R_OK):
            raise FileError(f"{path}: cannot be read; name a readable file or directory")
        for file in _files_below(path) if path.is_dir() else [path]:
            if os.path.isfile(file):
                found.setdefault(file.resolve(), file)
    return list(found.values())


def read_texts(files: Iterable[Path], counts: Counter[str]) -> Iterator[str]:
    """Read texts from files: the model's messages of a chat log, the whole text of other files.

    Long texts are read in pieces of several lines.

    Args:
        files: the files; those with the suffix ``.jsonl`` may be chat logs.
        counts: where to count the "files" with text, the "skipped" files, which are not text, and
            the "bad_lines" of chat logs.
    """
    for file in files:
        try:
            for number, text in enumerate(_texts_in(file, counts)):
                counts["files"] += number == 0
                yield text
        except (UnicodeDecodeError, OSError):
            counts["skipped"] += 1


def _files_below(directory: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(root, name)


def _texts_in(path: Path, counts: Counter[str]) -> Iterator[str]:
    outputs = _outputs(path) if path.suffix.lower() == ".jsonl" else iter(())
    first = next(outputs, None)
    if first is None:  # not a chat log
        yield from _pieces(path)
        return
    yield from first
    for texts in outputs:
        counts["bad_lines"] += texts is None
        yield from texts or ()


def _outputs(path: Path) -> Iterator[list[str] | None]:
    """The model's messages in each record of a chat log; None for a line without a record."""
    with path.open("rb") as file:
        for _, record in json_lines(file):
            try:
                messages, completions = conversation_of(record)
                yield [text for i in completions if (text := messages[i]["content"])]
            except (ValueError, RecursionError):
                yield None


def _pieces(path: Path) -> Iterator[str]:
    """The file's text in pieces of whole lines."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        while text := file.read(_TEXT_CHARACTERS):
            yield text + file.readline(_TEXT_CHARACTERS)


_FORMAT = "mlxspec store"
_GLANCE = 256  # bytes at a file's beginning, in which its format is named
_REMEDY = "build it again with `mlxspec store build`"


class Store:
    """Texts on disk in which a context's last tokens are looked up.

    The file is mapped into memory. Processes share the memory, and only the parts that look-ups
    touch need to stay there. A store keeps the content that its file had when it was opened, even
    if the file is replaced. (mlxspec never changes a store in place. If another program truncates
    one, processes that read it crash, as with every mapped file.)

    Opening checks only the header and the length, which takes a millisecond. :meth:`look_up` is
    safe even if the rest is damaged; :meth:`verify` checks everything.

    Args:
        path: the file.
        tokenizer: the model's tokenizer; None opens a store of any tokenizer.

    Attributes:
        identity: the tokenizer.
        index: the texts.
        n_tokens, n_texts: how many tokens and texts there are.
        nbytes: the size of the file.

    Raises:
        FileError: the file is not a store, is truncated, or belongs to another tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        self.path = Path(path)
        try:
            self.index = SuffixArray.open(self.path, _FORMAT)
            self.identity = held = _identity(self.index.header)
            self.nbytes = self.path.stat().st_size
        except OSError as error:
            raise FileError(
                f"{path}: cannot be read ({error.strerror}); make a store with `mlxspec store "
                "build`"
            ) from error
        except ValueError as error:
            raise FileError(f"{path}: {error}; {_REMEDY}") from error
        if tokenizer is None:
            return
        needed = identify(tokenizer)
        if needed.fingerprint != held.fingerprint:
            raise FileError(
                f"{path}: holds tokens of {held}, but the model's tokenizer is {needed}; use "
                "`mlxspec store build` to build a store for this model"
            )

    @property
    def n_texts(self) -> int:
        return int(np.count_nonzero(self.index.tokens == SEPARATOR))

    @property
    def n_tokens(self) -> int:
        return len(self.index.tokens) - self.n_texts

    def verify(self) -> Store:
        """Check the whole file (0.1 s for ten million tokens).

        Returns:
            the store itself.

        Raises:
            FileError: the file is damaged.
        """
        if not self.index.is_intact():
            raise FileError(f"{self.path}: is damaged (its checksum is wrong); {_REMEDY}")
        return self

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = EXCERPT_TOKENS) -> Excerpts:
        """Find the tokens after occurrences of the context's last tokens.

        Args:
            tail: the context's last tokens; up to 64 are compared.
            limit: the most excerpts to return.
            depth: the most tokens of an excerpt.

        Returns:
            the excerpts, without those from damaged parts of the file.
        """
        return excerpts([self.index], tail, limit, depth, self.identity.vocab_size)


def build_store(
    path: str | os.PathLike[str],
    sequences: Iterable[Sequence[int]],
    tokenizer: Any,
    *,
    force: bool = False,
) -> Store:
    """Write a store of texts without duplicates; the file appears complete or not at all.

    Args:
        path: the file to write.
        sequences: the token ids of each text. Later texts count as newer.
        tokenizer: the tokenizer of these ids.
        force: replace an existing store at ``path``, even a damaged one, or an empty file.

    Raises:
        FileError: ``path`` exists or cannot be written, or no text has at least two tokens.
    """
    path = Path(path)
    check_writable(path)
    if path.exists():
        with path.open("rb") as file:
            begins = file.read(_GLANCE)
        if begins and f'"{_FORMAT}"'.encode() not in begins:
            raise FileError(f"{path}: exists and is not an mlxspec store; name another file")
        if not force:
            raise FileError(f"{path}: exists; name another file, or replace it with --force")
    identity = identify(tokenizer)
    index = SuffixArray.of(_first(sequences, identity.vocab_size))
    if not len(index.tokens):
        raise FileError(f"{path}: nothing to write; add a text of at least two tokens")
    header = {
        "format": _FORMAT,
        "tokenizer": identity.name,
        "vocab_size": identity.vocab_size,
        "fingerprint": identity.fingerprint.hex(),
    }
    with replaced(path) as file:
        lengths = len(index.tokens), len(index.order)
        write_index(file, header, lengths, [index.tokens, index.order])
    return Store(path)


def _identity(header: Mapping[str, Any]) -> TokenizerIdentity:
    """The tokenizer in a store's header; raises ValueError if the header is damaged."""
    match header:
        case {"tokenizer": str(name), "vocab_size": int(vocab_size), "fingerprint": str(digits)}:
            return TokenizerIdentity(printable(name), vocab_size, bytes.fromhex(digits))
    raise ValueError("has a damaged header")


def _first(sequences: Iterable[Sequence[int]], vocab_size: int) -> Iterator[bytes]:
    """Distinct texts, until they reach MAX_TOKENS in total; the last one may be truncated."""
    seen: set[bytes] = set()
    room = MAX_TOKENS * TOKEN_BYTES
    for ids in sequences:
        for text in encode_texts(ids, vocab_size):
            if room <= TOKEN_BYTES:
                return
            if text not in seen:
                seen.add(text)
                yield text[:room]
                room -= len(text)
