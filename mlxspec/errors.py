"""Errors whose message is one line that names the input and the remedy.

The command line prints that line and exits with status 1; a caller of the API
catches :class:`MlxspecError`, or the subclass of the stage that failed.
"""

_LONGEST = 1000  # characters of a message
_LONGEST_NAME = 120


def shortened(message: str) -> str:
    """A message without its middle where it is too long, because it repeats some input."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST * 6 // 10]} ... {message[-_LONGEST * 3 // 10 :]}"


def printable(name: object) -> str:
    """A name from a file as a message may repeat it: no control characters, and not too long."""
    return ascii(str(name)[:_LONGEST_NAME])[1:-1]


class MlxspecError(Exception):
    """Base of every error that the user's input can cause."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message)))


class LoadError(MlxspecError):
    """A model or tokenizer could not be found or read."""


class ConversionError(MlxspecError):
    """A checkpoint could not be converted; nothing was written."""


class PromptError(MlxspecError, ValueError):
    """A prompt is empty, too long or of a wrong type, or the chat template refuses it."""


class OptionError(MlxspecError, ValueError):
    """An option has a value that makes no sense."""


class StoreError(MlxspecError):
    """A store could not be read or written; what was there before is as it was."""


class DistributedError(MlxspecError):
    """The processes that share a model do not find each other."""


class PromptCacheError(MlxspecError):
    """A prompt cache could not be read or written, or is another model's."""


class DrafterError(MlxspecError, TypeError):
    """A custom drafter is invalid or returned an invalid draft."""


class SettingsError(MlxspecError):
    """A settings file cannot be read or changed; it is as it was."""


class ChatFileError(MlxspecError):
    """A saved chat, or the history of what was typed, cannot be read or written."""
