"""Characters that a stream's encoding lacks: plain ones instead."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from io import TextIOWrapper

_PLAIN = {"–": "-", "−": "-", "’": "'", "·": "|", "×": "x", "■": "#", "±": "+-", "…": "..."}

_Handler = Callable[[UnicodeError], tuple[str | bytes, int]]


def write_plainly() -> None:
    """Have the standard streams write what their encodings lack in plain characters.

    One that has no plain form becomes a question mark on standard output. On standard error it
    is written as Python escapes it, so that the name of a file can be told.
    """
    codecs.register_error("mlxspec.generation.text", _plain_or(codecs.replace_errors))
    codecs.register_error("mlxspec.error", _plain_or(codecs.backslashreplace_errors))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="mlxspec.generation.text")
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr.reconfigure(errors="mlxspec.error")


def _plain_or(other: _Handler) -> _Handler:
    def handle(error: UnicodeError) -> tuple[str | bytes, int]:
        if isinstance(error, UnicodeEncodeError):
            error.end = error.start + 1  # one at a time
            if error.object[error.start] in _PLAIN:
                return _PLAIN[error.object[error.start]], error.end
        return other(error)

    return handle
