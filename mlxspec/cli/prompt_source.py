"""Where the prompt comes from."""

from __future__ import annotations

import sys
from typing import BinaryIO

from ..errors import PromptError

_MOST_BYTES = 100_000_000  # no context holds as much, and some devices never end


def read_prompt(text: str | None, file: str | None, ids: str | None) -> str | list[int]:
    """The prompt that exactly one of three options gives.

    Args:
        text: the value of ``--prompt``; ``-`` reads standard input.
        file: the value of ``--prompt-file``.
        ids: the value of ``--prompt-ids``, numbers separated by commas or spaces.

    Returns:
        a text that is not empty, or token ids. One newline at the end of a file or of standard
        input is dropped: editors and ``echo`` put it there.

    Raises:
        PromptError: none or several are given, or the given one is empty or cannot be read.
    """
    options = {"--prompt": text, "--prompt-file": file, "--prompt-ids": ids}
    given = [name for name, value in options.items() if value is not None]
    if not given:
        raise PromptError("no prompt: give --prompt TEXT, --prompt-file FILE or --prompt-ids IDS")
    if len(given) > 1:
        raise PromptError(f"{' and '.join(given)} are given together: choose one")
    if ids is not None:
        return _parse_ids(ids)
    if file is not None:
        return _without_last_newline(_read_file(file), f"--prompt-file {file}")
    if text == "-":
        if sys.stdin is None:
            raise PromptError("standard input is closed: give --prompt TEXT or --prompt-file FILE")
        read = _read(sys.stdin.buffer, "standard input")
        return _without_last_newline(read, "standard input")
    # Bytes of an argument that are not UTF-8 have become lone surrogates.
    return _decode(str(text).encode(errors="surrogateescape"), "--prompt")


def _parse_ids(ids: str) -> list[int]:
    words = ids.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise PromptError(f"--prompt-ids is {ids!r}: write token ids, for example 1,415,2936")
    return [int(word) for word in words]


def _read_file(file: str) -> bytes:
    try:
        with open(file, "rb") as opened:
            return _read(opened, f"--prompt-file {file}")
    except OSError as error:
        raise PromptError(
            f"--prompt-file {file} cannot be read ({error.strerror}): name a readable text file"
        ) from error


def _read(file: BinaryIO, source: str) -> bytes:
    data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise PromptError(f"{source} is more than {_MOST_BYTES:,} bytes: give a shorter text")
    return data


def _without_last_newline(data: bytes, source: str) -> str:
    return _decode(data.removesuffix(b"\n").removesuffix(b"\r"), source)


def _decode(data: bytes, source: str) -> str:
    """The text of a prompt; ``source`` names it in errors."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{source} is not UTF-8 text (byte {error.start}): convert it to UTF-8"
        ) from error
    if "\0" in text:
        raise PromptError(f"{source} is binary: give a text in UTF-8")
    if not text:
        raise PromptError(f"{source} is empty: write a text, or give --prompt-ids with the BOS id")
    return text
