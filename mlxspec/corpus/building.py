"""Making a store: finding files, reading texts from them, and writing what they hold."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from ..errors import StoreError
from ..files import check_writable, sole_writer
from ..jsonl import conversation_of, json_lines
from .store import (
    Store,
    begins_as_store,
    check_max_tokens,
    read_store,
    write_store,
)
from .suffix_array import TOKEN_BYTES, SuffixArray, encode_texts
from .tokenizer_identity import Vocabulary, identify

MAX_TOKENS = 50_000_000
"""Tokens of a store unless it is told otherwise. Building it takes about 90 bytes a token."""

_TEXT_CHARACTERS = 32_768  # read of a file at a time, and then up to the end of the line
_MAX_LINE = 1 << 24  # bytes of a chat log, which has one record a line
_PROBED_BYTES = 8192

OnBytes = Callable[[int], None]
"""Called with the size of each file that has been read."""


@dataclass(frozen=True)
class TextFile:
    """A file to read, and its size in bytes."""

    path: Path
    size: int


@dataclass
class Reading:
    """Counts of what is read, made while it is read.

    Attributes:
        files: those that gave text.
        binary: files left out because they are no UTF-8 text.
        unreadable: files left out because they cannot be opened.
        bad_lines: lines of chat logs that are no record.
    """

    files: int = 0
    binary: int = 0
    unreadable: int = 0
    bad_lines: int = 0


def find_files(paths: Iterable[str | os.PathLike[str]]) -> list[TextFile]:
    """Find the files that are named, and those in directories that are named.

    In directories, hidden files and directories (whose name begins with a dot) are left out, and
    so is everything but regular files. Links to directories are not followed, so there are no
    loops. A file that is reached twice is taken once.

    Raises:
        StoreError: a named path is not there, or neither a file nor a directory.
    """
    found: dict[tuple[int, int], TextFile] = {}
    for name in paths:
        path = Path(name)
        try:
            mode = path.stat().st_mode
            if stat.S_ISREG(mode):
                path.open("rb").close()
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise StoreError(f"{path}: is neither a file nor a directory; name one of them")
        for file in _files_below(path) if stat.S_ISDIR(mode) else [path]:
            try:
                status = file.stat()
            except OSError:  # a link to nowhere, or removed meanwhile
                continue
            if stat.S_ISREG(status.st_mode):
                place = (status.st_dev, status.st_ino)
                found.setdefault(place, TextFile(file, status.st_size))
    return list(found.values())


def read_texts(
    files: Iterable[TextFile], reading: Reading, on_bytes: OnBytes = lambda size: None
) -> Iterator[str]:
    """Read the texts in files: of chat logs (``.jsonl``) what models wrote, of others everything.

    Long files come in pieces of several lines. Files that are no UTF-8 text or cannot be opened
    are skipped and counted in ``reading``.
    """
    for file in files:
        try:
            texts = False
            for text in _texts_in(file.path, reading):
                texts = True
                yield text
            reading.files += texts
        except UnicodeDecodeError:
            reading.binary += 1
        except OSError:
            reading.unreadable += 1
        on_bytes(file.size)


def _files_below(directory: Path) -> Iterator[Path]:
    for root, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(root, name)


def _texts_in(path: Path, reading: Reading) -> Iterator[str]:
    with path.open("rb") as file:
        if b"\0" in file.read(_PROBED_BYTES):
            reading.binary += 1
            return
    outputs = _outputs(path) if path.suffix.lower() == ".jsonl" else iter(())
    first = next(outputs, None)
    if first is None:  # the file is no chat log
        yield from _pieces(path)
        return
    yield from first
    for texts in outputs:
        if texts is None:
            reading.bad_lines += 1
        else:
            yield from texts


def _outputs(path: Path) -> Iterator[list[str] | None]:
    """What a model wrote, per record of a chat log; None for a line that is no record."""
    with path.open("rb") as file:
        for _, record in json_lines(iter(partial(file.readline, _MAX_LINE), b"")):
            try:
                yield [output for output in conversation_of(record).outputs if output]
            except (ValueError, RecursionError):
                yield None


def _pieces(path: Path) -> Iterator[str]:
    """The file's text; a long one is cut at the ends of lines."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        while text := file.read(_TEXT_CHARACTERS):
            yield text + file.readline(_TEXT_CHARACTERS)


def build_store(
    path: str | os.PathLike[str],
    sequences: Iterable[Sequence[int]],
    tokenizer: Vocabulary,
    *,
    max_tokens: int = MAX_TOKENS,
    force: bool = False,
) -> Store:
    """Write a store of texts, each of which is kept once; it appears whole or not at all.

    Args:
        path: the file to write.
        sequences: the token ids of each text. Later ones count as newer.
        tokenizer: whose ids they are.
        max_tokens: how many to take; what comes after them is not read.
        force: replace a store that is at ``path``.

    Raises:
        OptionError: ``max_tokens`` is below 2.
        StoreError: ``path`` is in use or cannot be written, or there are no tokens.
    """
    target = Path(path)
    _check_target(target, force)
    check_max_tokens(max_tokens)
    identity = identify(tokenizer)
    texts = chain.from_iterable(encode_texts(ids, identity.vocab_size) for ids in sequences)
    built = SuffixArray.of(_first(texts, max_tokens))
    if not len(built.tokens):
        raise StoreError(f"{target}: nothing to write, there is no text of two tokens or more")
    with sole_writer(target, StoreError, create=True):
        _check_target(target, force)
        write_store(target, identity, built, SuffixArray.of([]))
    return read_store(target)


def add_to_store(
    path: str | os.PathLike[str],
    sequences: Iterable[Sequence[int]],
    tokenizer: Vocabulary,
    *,
    max_tokens: int = MAX_TOKENS,
) -> Store:
    """Add texts that a store does not hold yet; what it has learned stays.

    Args:
        path: the store.
        sequences: the token ids of each text.
        tokenizer: whose ids they are.
        max_tokens: how many tokens the built part may have then.

    Raises:
        OptionError: ``max_tokens`` is below 2.
        StoreError: ``path`` is no store, another tokenizer's, or cannot be written.
    """
    target = Path(path)
    check_max_tokens(max_tokens)
    identity = identify(tokenizer)
    read_store(target, identity).verify()
    # Tokenizing takes long, so it comes before the lock is taken.
    texts = [text for ids in sequences for text in encode_texts(ids, identity.vocab_size)]
    with sole_writer(target, StoreError, create=False):
        store = read_store(target, identity).verify()
        held = store.built.texts
        new = _first(texts, max_tokens - store.built.n_tokens, known=held)
        write_store(target, store.identity, SuffixArray.of(chain(held, new)), store.learned)
    return read_store(target)


def _first(texts: Iterable[bytes], max_tokens: int, known: Iterable[bytes] = ()) -> Iterator[bytes]:
    """The first texts that are not known, each once, up to ``max_tokens``; the last may be cut."""
    seen = set(known)
    room = max_tokens * TOKEN_BYTES
    for text in texts:
        if room <= TOKEN_BYTES:
            return
        if text not in seen:
            seen.add(text)
            yield text[:room]
            room -= len(text)


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
