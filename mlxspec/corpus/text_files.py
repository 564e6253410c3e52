"""Texts in the user's files, which ``mlxspec memory add`` keeps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..errors import FileError
from ..jsonl import conversation_of, json_lines

_TEXT_CHARACTERS = 32_768  # read at a time; then the rest of the line is read, too


def find_files(path: Path) -> list[Path]:
    """The file that a path names, or all files in the directory that it names.

    In directories, names that begin with a dot are skipped, and so is anything but regular files.
    Links to directories are not followed, so loops cannot occur. Each file is found once.

    Raises:
        FileError: the path does not exist, or is neither a file nor a directory.
    """
    if not (os.path.isfile(path) or os.path.isdir(path)) or not os.access(path, os.R_OK):
        raise FileError(f"{path}: cannot be read; name a readable file or directory")
    files: dict[Path, Path] = {}  # the key is the path without links
    for file in _files_below(path) if path.is_dir() else [path]:
        if os.path.isfile(file):
            files.setdefault(file.resolve(), file)
    return list(files.values())


def read_texts(file: Path, counts: Counter[str]) -> Iterator[str]:
    """Read texts from a file: the model's messages of a chat log, the whole text of other files.

    Long texts are read in pieces of several lines.

    Args:
        file: the file; one with the suffix ``.jsonl`` may be a chat log.
        counts: where to count the "files" with text, the "skipped" files, which are not text, and
            the "bad_lines" of chat logs.
    """
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
        for _ in _pieces(path):
            pass  # so that a file is added whole or not at all, if a late byte is not UTF-8
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
