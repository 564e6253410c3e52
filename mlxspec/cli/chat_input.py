"""What the user of a chat types: one message after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper

from ..errors import PromptError

_QUOTES = '"""'


class ChatInput:
    """Reads messages from standard input, at a terminal with line editing and history.

    A message is a line. One that begins with three double quotes goes on to the next three; a
    backslash at the end of a line has it go on with the next line.

    Raises:
        PromptError: standard input is closed.
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise PromptError("standard input is closed: chat at a terminal, or pipe the turns in")
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            if self.interactive:
                sys.stdin.reconfigure(errors="replace")
            else:  # bytes that are not UTF-8 become lone surrogates, by which they are found
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")
        self._read_line: Callable[[str], str] = _line_of_stream
        if self.interactive and sys.stdout.isatty():
            with suppress(ImportError):  # there is none on Windows
                import readline  # noqa: F401  (gives input() arrow keys and history)
            self._read_line = input

    def message(self) -> str | None:
        """The next message, which may be empty; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the message so far is forgotten.
            PromptError: what comes through a pipe is not UTF-8.
        """
        try:
            line = self._line("> ")
            if line.startswith(_QUOTES):
                return self._quoted(line.removeprefix(_QUOTES))
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._line(". "))
        except EOFError:
            return None
        return "\n".join(lines)

    def _quoted(self, first: str) -> str:
        lines = [first]
        with suppress(EOFError):  # the end of a file closes the quotes
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(self._line(". "))
        return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n")

    def _line(self, prompt: str) -> str:
        return self._read_line(prompt if self.interactive else "")


def _line_of_stream(prompt: str) -> str:
    """A line where ``input()`` would write its prompt among the answers."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise PromptError("standard input is not UTF-8 text: convert it to UTF-8") from error
    return line.removesuffix("\n").removesuffix("\r")
