"""Where a chat's messages come from: a pipe, a simple terminal, or one with line editing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Protocol

from ...errors import PromptError
from ...terminal import wants_color
from .commands import QUOTES


class ChatInput(Protocol):
    """Reads messages.

    Attributes:
        interactive: a user sits before it.
        forgot: whether something had been typed when Ctrl-C was pressed last, if that is known.
    """

    @property
    def interactive(self) -> bool: ...
    @property
    def forgot(self) -> bool: ...

    def message(self) -> str | None:
        """The next message, which may be empty; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; the message so far is forgotten.
            PromptError: what comes through a pipe is not UTF-8.
        """

    def close(self) -> None:
        """Leave a terminal as it was."""


def open_input(history: bool, models: Callable[[], Iterable[str]], color: bool | None) -> ChatInput:
    """Standard input.

    Args:
        history: keep what is typed for the next chat.
        models: names that ``/model`` takes, to be completed.
        color: as for :func:`mlxspec.terminal.wants_color`.

    Raises:
        PromptError: it is closed.
    """
    if sys.stdin is None:
        raise PromptError("standard input is closed: chat at a terminal, or pipe the turns in")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not at_terminal or os.environ.get("TERM", "dumb") == "dumb":
        return LineInput()
    from .prompt import TerminalInput

    file = history_file() if history else None
    return TerminalInput(file, models, wants_color(sys.stdout, color))


def history_file() -> Path:
    """Where what was typed is kept.

    Raises:
        OptionError: the environment names no directory that there can be.
    """
    from ...corpus import data_directory

    return data_directory() / "chat_history"


class LineInput:
    """Reads lines, each of them a message, and writes what prompts there are to standard error.

    A message that begins with three double quotes goes on to the next three; a backslash at the
    end of a line has it go on with the next line.
    """

    forgot = False

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            if self.interactive:
                sys.stdin.reconfigure(errors="replace")
            else:  # bytes that are not UTF-8 become lone surrogates, by which they are found
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")

    def message(self) -> str | None:
        try:
            line = self._line("> ")
            if line.startswith(QUOTES):
                return self._quoted(line.removeprefix(QUOTES))
            lines = [line]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._line(". "))
        except (EOFError, KeyboardInterrupt) as ended:
            if self.interactive:
                sys.stderr.write("\n")  # the line that the key was pressed in
            if isinstance(ended, KeyboardInterrupt):
                raise
            return None
        return "\n".join(lines)

    def close(self) -> None:
        pass

    def _quoted(self, first: str) -> str:
        lines = [first]
        with suppress(EOFError):  # the end of a file closes the quotes
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(self._line(". "))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")

    def _line(self, prompt: str) -> str:
        if self.interactive:
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
