"""Input from a pipe or from a terminal with line editing, and answers rendered as Markdown."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

import click
from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    DummyCompleter,
    PathCompleter,
    WordCompleter,
    merge_completers,
)
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines
from rich.theme import Theme

from ...errors import MlxspecError, PromptError
from ...terminal import visible, wants_color
from ..common.notes import note
from . import COMMANDS, NAMES


def message_reader(
    history: bool, models: Callable[[], list[str]], color: bool | None
) -> Callable[[], str]:
    """Make a function that reads the next message; at the end of the input it raises EOFError.

    At a terminal the function raises :class:`KeyboardInterrupt` if Ctrl-C is pressed before
    anything is typed.

    Args:
        history: whether to keep typed messages for the next chat.
        models: returns the names to complete for ``/model``.
        color: as for :func:`mlxspec.terminal.wants_color`.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not at_terminal or os.environ.get("TERM", "dumb") == "dumb":
        return read_line
    return terminal_reader(history, models, wants_color(sys.stdout, color))


def terminal_reader(
    history: bool, models: Callable[[], list[str]], color: bool
) -> Callable[[], str]:
    """Like :func:`message_reader`, with line editing.

    Pasted lines are one message. Each line that was typed before the prompt appears is a message,
    too.
    """
    output = create_output()
    if isinstance(output, Vt100_Output):
        # The terminal's reply to a cursor query would mix with typed text.
        output.enable_cpr = False
    session: PromptSession[str] = PromptSession(
        "> ",
        history=kept_history() if history else InMemoryHistory(),
        completer=ChatCompleter(models),
        complete_while_typing=Condition(_types_command),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation=lambda width, line, wraps: "  " if wraps else ". ",
        search_ignore_case=True,
        enable_suspend=True,
        enable_open_in_editor=True,
        color_depth=None if color else ColorDepth.DEPTH_1_BIT,
        output=output,
    )

    def read() -> str:
        if not sys.stdin.isatty() or not select.select([sys.stdin], [], [], 0)[0]:
            return _unquoted(session.prompt().rstrip("\n"))
        # A line was typed while the model loaded or answered. Line editing would not send it, since
        # the terminal has turned its Enter into Ctrl-J.
        message = read_line()
        click.echo(visible(message), err=True)
        session.history.append_string(message)
        return message

    return read


def read_line() -> str:
    """Read a line as a message.

    Three double quotes begin a message of several lines, which ends with the next three.

    Raises:
        PromptError: the line is not UTF-8 text.
        EOFError: the input has ended.
    """
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    message = ""
    while line := sys.stdin.buffer.readline():
        try:
            message += line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError("standard input is not UTF-8 text: convert it to UTF-8") from error
        if not _is_open(message):
            break
        message += "\n"
    if not (message or line):
        raise EOFError
    return _unquoted(message)


_QUOTES = '"""'


def _is_open(text: str) -> bool:
    """Whether a message begins with three double quotes that are not closed yet."""
    return text.startswith(_QUOTES) and text.count(_QUOTES) == 1


def _unquoted(text: str) -> str:
    """A message without the three double quotes around it.

    The closing quotes may be missing if the input ended.
    """
    within = text.removeprefix(_QUOTES).rstrip()
    if not text.startswith(_QUOTES) or not (_is_open(text) or within.endswith(_QUOTES)):
        return text
    return within.removesuffix(_QUOTES).strip("\n")


def kept_history() -> History:
    """The messages of earlier chats, in a file that only the user may read."""
    from ...corpus.answers import data_directory

    path = data_directory() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("ab").close()
    except OSError as error:
        note(f"{path}: {error.strerror}; messages are not kept for the next chat")
        return InMemoryHistory()
    return FileHistory(path)


class ChatCompleter(Completer):
    """Completes commands, and their arguments: files or models.

    Args:
        models: returns the names, other than directories, that ``/model`` accepts.
    """

    def __init__(self, models: Callable[[], list[str]]) -> None:
        def known() -> list[str]:
            with suppress(MlxspecError):  # the server is gone, which the next answer reports
                return models()
            return []

        help_texts = {name: COMMANDS[spelling][0] for name, spelling in NAMES.items()}
        directories = PathCompleter(expanduser=True, only_directories=True)
        self._commands = WordCompleter([*NAMES], meta_dict=help_texts, sentence=True)
        self._arguments = {
            "FILE": PathCompleter(expanduser=True),
            "[NAME]": merge_completers([WordCompleter(known, sentence=True), directories]),
        }

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        word, space, rest = document.text_before_cursor.partition(" ")
        if not space:
            return self._commands.get_completions(document, event)
        *_, takes = NAMES.get(word, "").split(" ")
        argument = self._arguments.get(takes, DummyCompleter())
        return argument.get_completions(Document(rest.lstrip()), event)


def _types_command() -> bool:
    """Whether a command's name is being typed: only then do completions show without Tab.

    Files and models must be looked up, so they are completed only on request.
    """
    text = get_app().current_buffer.text
    return text.startswith("/") and " " not in text


def _bindings() -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=typing)
    def _enter(event: KeyPressEvent) -> None:
        if _is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=typing)
    @bindings.add("c-j", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=typing & Condition(lambda: bool(get_app().current_buffer.text)))
    def _clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return bindings


def _markdown(text: str) -> Markdown:
    """Markdown that shows every word: HTML is shown as text, and links with their addresses."""
    # "ansi" themes use the terminal's own palette, which fits its background.
    markdown = Markdown(text, code_theme="ansi_light", hyperlinks=False)
    # Rich shows neither a link's definition nor the address of an image.
    parser = MarkdownIt("commonmark", {"html": False}).disable(["reference", "image"])
    parser.enable(["strikethrough", "table"])
    markdown.parsed = parser.parse(text)
    return markdown


class MarkdownPrinter:
    """Writes an answer to a terminal, instead of :class:`mlxspec.terminal.TokenPrinter`.

    The answer's last block (a paragraph, a list, …) is redrawn as it grows, cut to the window. Once
    the next block begins, this one is written in full and never redrawn, so long answers scroll
    like any text.

    Args:
        console: standard output.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Rich's own style for inline code has a black background, even in a light window.
        console.push_theme(Theme({"markdown.code": "bold cyan"}))
        self._text = ""
        """The text of the last block."""
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def write(self, text: str, from_draft: bool) -> None:
        """Write a token's text."""
        self._live.start()
        self._text += visible(text)
        if "\n" in text:
            # A line that is still growing may turn out to belong to the block before it.
            lines = self._text.split("\n")
            blocks = _markdown("\n".join(lines[:-1])).parsed  # paragraphs, lists, …
            starts = [block.map[0] for block in blocks if block.map and not block.level]
            last = starts[-1] if starts else 0
            self._print_block("\n".join(lines[:last]), rest="\n".join(lines[last:]))

    def finish(self) -> None:
        """Write the rest of the answer."""
        self._live.stop()
        self._print_block(self._text)

    def _print_block(self, block: str, rest: str = "") -> None:
        self._text = rest
        if block.strip():
            self._console.print(_markdown(block), "")

    def _picture(self) -> SegmentLines:
        """The last lines of the growing block that fit into the window."""
        lines = self._console.render_lines(_markdown(self._text), pad=False)
        return SegmentLines(lines[-max(1, self._console.height - 2) :], new_lines=True)
