"""Errors whose message is one line that names the input and the remedy.

The command line prints that line and exits with status 1. Python callers catch
:class:`MlxspecError` or one of its subclasses.
"""

import operator
from typing import SupportsIndex

_LONGEST = 1000  # characters of a message
_LONGEST_NAME = 120


def shortened(message: str) -> str:
    """Cut out the middle of a message that is too long, usually because it quotes input."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST * 6 // 10]} ... {message[-_LONGEST * 3 // 10 :]}"


def printable(name: object) -> str:
    """Escape and shorten a name from a file, so that a message can quote it."""
    return ascii(str(name)[:_LONGEST_NAME])[1:-1]


class MlxspecError(Exception):
    """Base of every error that the user's input can cause."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message)))


class LoadError(MlxspecError):
    """A model, a tokenizer or a checkpoint could not be found, read or converted."""


class PromptError(MlxspecError, ValueError):
    """A prompt is empty, too long or of the wrong type, or the chat template rejects it."""


class OptionError(MlxspecError, ValueError):
    """An option has an invalid value, or options contradict each other."""


def whole(name: str, value: object) -> int:
    """Return an option's value as an int; raise OptionError unless it is a whole number."""
    if not isinstance(value, SupportsIndex):
        raise OptionError(f"{name} is {value!r}: choose a whole number")
    return operator.index(value)


class FileError(MlxspecError):
    """A prompt cache, saved chat, settings file or report could not be read or written."""
