"""What can be typed in a chat: commands, which begin with a slash, and messages in quotes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto

from ...errors import OptionError

QUOTES = '"""'
"""They begin and end a message of several lines."""

_OR_TEXT = "a space before it makes it a message"
_COMMAND = re.compile(r"/[A-Za-z][\w-]*")


class Argument(Enum):
    """What a command takes besides its name."""

    NOTHING = auto()
    FILE = auto()
    MODEL = auto()
    TEXT = auto()


@dataclass(frozen=True)
class ChatCommand:
    """A command of a chat.

    Attributes:
        spelling: its name and what follows it, as the help shows them.
        help: what it does.
        takes: what follows it.
        aliases: its other names.
    """

    spelling: str
    help: str
    takes: Argument = Argument.NOTHING
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """With the slash."""
        return self.spelling.split()[0]

    @property
    def takes_name(self) -> bool:
        """Whether a file's or model's name follows, which may be in quotes."""
        return self.takes in (Argument.FILE, Argument.MODEL)


COMMANDS = (
    ChatCommand("/help", "show what can be typed"),
    ChatCommand("/retry [TEMP]", "answer the last message again", Argument.TEXT),
    ChatCommand("/undo", "take the last message and its answer back"),
    ChatCommand("/reset", "begin a new conversation", aliases=("/clear",)),
    ChatCommand("/system [TEXT]", "show or set the system prompt; - for none", Argument.TEXT),
    ChatCommand("/model [NAME]", "show the model, or go on with another", Argument.MODEL),
    ChatCommand("/save FILE", "write the conversation as JSON", Argument.FILE),
    ChatCommand("/load FILE", "go on with a saved conversation", Argument.FILE),
    ChatCommand("/markdown", "render answers as Markdown, or no longer"),
    ChatCommand("/stats", "figures of the conversation"),
    ChatCommand("/exit", "leave; Ctrl-D does, too", aliases=("/quit", "/bye")),
)

NAMES = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}

KEYS = (
    ("Enter", "sends the message; pasted lines are one message"),
    ("Alt-Enter", "a new line; so do Ctrl-J, and \\ at a line's end"),
    ("Up, Ctrl-R", "earlier messages; Tab completes commands and files"),
    ("Ctrl-C", "stops an answer; twice at the prompt leaves"),
)


def help_rows() -> list[tuple[str, str]]:
    """Commands and keys, and what they do."""
    names = [", ".join([command.spelling, *command.aliases]) for command in COMMANDS]
    return [*zip(names, (command.help for command in COMMANDS), strict=True), *KEYS]


def help_text() -> str:
    """The same as lines of text."""
    rows = help_rows()
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in rows)


def command_in(message: str) -> tuple[ChatCommand, str] | None:
    """The command that a message is, and what follows its name; None for text to be answered.

    A command begins with the slash itself. So a space before it makes a message of it, and a
    path at the beginning (``/etc/hosts``) is text.

    Raises:
        OptionError: there is no such command, or it takes nothing, or needs something.
    """
    word, *rest = message.split(maxsplit=1) if message.startswith("/") else [""]
    if not _COMMAND.fullmatch(word):
        return None
    argument = rest[0].strip() if rest else ""
    command = NAMES.get(word)
    if command is None:
        close = get_close_matches(word, NAMES, 1)
        guess = f"did you mean {close[0]}?" if close else "/help lists them"
        raise OptionError(f"there is no command {word} ({guess}); {_OR_TEXT}")
    if argument and command.takes is Argument.NOTHING:
        raise OptionError(f"{word} takes nothing after it; {_OR_TEXT}")
    if not argument and command.takes is Argument.FILE:
        raise OptionError(f"{word} needs the name of a file: {command.spelling}")
    return command, argument


def is_open(text: str) -> bool:
    """Whether a message begins with three double quotes and the next three are still to come."""
    return text.startswith(QUOTES) and text.count(QUOTES) % 2 == 1


def without_quotes(text: str) -> str:
    """A message without the three double quotes around it; as it is where it has others."""
    within = text.rstrip()
    if text.count(QUOTES) != 2 or not (text.startswith(QUOTES) and within.endswith(QUOTES)):
        return text
    return within.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
