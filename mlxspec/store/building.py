"""Texts from files and directories, as a user names them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..errors import OptionError, StoreError
from ..files import check_writable, sole_writer
from ..jsonl import conversation_of, load_json
from .store import Store, check_tokenizer
from .store_file import (
    EMPTY,
    Vocabulary,
    as_texts,
    begins_as_store,
    divided,
    identify,
    joined,
    oldest,
    read_store_file,
    write_store_file,
)

_TEXT_CHARACTERS = 32_768  # of a longer file, so much at a time, up to the end of a line
_LONGEST_LINE = 1 << 24  # bytes; of a chat log, whose records are lines
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
    """What was read, counted as it is read.

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
    """The files that are named, and those in directories that are named.

    In directories, hidden files and directories (whose name begins with a dot) are left out,
    and so is whatever is no regular file; links to directories are not followed, so there are
    no loops. A file that is reached twice is taken once.

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
    """The texts in files: what models wrote in chat logs (``.jsonl``), all of other files.

    Long files come in stretches of lines. Files that are no UTF-8 text, or cannot be opened,
    are passed over and counted in ``reading``.
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
    records = _records(path) if path.suffix.lower() == ".jsonl" else iter(())
    first = _outputs(next(records, None))
    if first is None:
        yield from _stretches(path)
        return
    yield from first
    for record in records:
        outputs = _outputs(record)
        if outputs is None:
            reading.bad_lines += 1
        else:
            yield from outputs


def _outputs(record: object) -> list[str] | None:
    """What a model wrote, of a record of a chat log; None if it is no such record."""
    try:
        return [output for output in conversation_of(record).outputs if output]
    except (ValueError, RecursionError):
        return None


def _stretches(path: Path) -> Iterator[str]:
    """The file's text, cut behind the ends of lines where it is long."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        while text := file.read(_TEXT_CHARACTERS):
            yield text + file.readline(_TEXT_CHARACTERS)


def _records(path: Path) -> Iterator[object]:
    """The JSON values in the file's lines; None for a line that is no JSON."""
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if line.strip():
                try:
                    yield load_json(line)
                except (ValueError, RecursionError):
                    yield None


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
