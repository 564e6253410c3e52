"""Input from a pipe or from a terminal with line editing, and answers rendered as Markdown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import click
from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
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
from . import NAMES, QUOTES, is_open, without_quotes


def open_input(
    history: bool, models: Callable[[], Iterable[str]], color: bool | None
) -> LineInput | TerminalInput:
    """Open standard input.

    Args:
        history: keep typed messages for the next chat.
        models: returns the names to complete for ``/model``.
        color: as for :func:`mlxspec.terminal.wants_color`.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not at_terminal or os.environ.get("TERM", "dumb") == "dumb":
        return LineInput()
    earlier = kept_history() if history else InMemoryHistory()
    return TerminalInput(earlier, models, wants_color(sys.stdout, color))


def kept_history() -> History:
    """The messages of earlier chats, in a file that only the user may read."""
    from ...corpus import data_directory

    path = data_directory() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("ab").close()
    except OSError as error:
        note(f"{path}: {error.strerror}; messages are not kept for the next chat")
        return InMemoryHistory()
    return FileHistory(path)


class LineInput:
    """Reads each line as a message, and writes prompts to standard error.

    A message that begins with three double quotes ends at the next three. A backslash at the end of
    a line continues the message on the next line.
    """

    forgot = False

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()

    def message(self) -> str | None:
        """The next message; None at the end of the input.

        Raises:
            PromptError: it is not UTF-8 text.
        """
        try:
            text = self._line("> ")
        except EOFError:
            return None
        with suppress(EOFError):  # the end of the file closes the quotes
            while (opened := is_open(text)) or text.endswith("\\"):
                text = f"{text if opened else text[:-1]}\n"
                text += self._line(". ")
        return without_quotes(text + QUOTES if is_open(text) else text)

    def _line(self, prompt: str) -> str:
        if self.interactive:
            click.echo(prompt, nl=False, err=True)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        try:
            return line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptError("standard input is not UTF-8 text: convert it to UTF-8") from error


class TerminalInput:
    """Reads messages at a terminal, where pasted lines are one message.

    Args:
        history: earlier messages.
        models: returns the names to complete for ``/model``.
        color: whether to use colours.

    Attributes:
        forgot: whether the last Ctrl-C cleared a partly typed message.
    """

    interactive = True

    def __init__(self, history: History, models: Callable[[], Iterable[str]], color: bool) -> None:
        self.forgot = False
        output = create_output()
        if isinstance(output, Vt100_Output):
            # The terminal's reply to a cursor query would mix with typed text.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=history,
            completer=ChatCompleter(models),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text[:1] == "/"),
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation=lambda width, line, wraps: "  " if wraps else ". ",
            search_ignore_case=True,
            enable_suspend=True,
            enable_open_in_editor=True,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            output=output,
        )

    def message(self) -> str | None:
        """The next message, which may be empty; None if the user leaves.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; typed text is lost.
        """
        try:
            return without_quotes(self._session.prompt().rstrip("\n"))
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.forgot = bool(self._session.default_buffer.text)
            raise


class ChatCompleter(Completer):
    """Completes commands, and the files or models after them.

    Args:
        models: returns the names that ``/model`` takes besides directories.
    """

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        self._models = models
        help_texts = {
            f"{name} " if command.takes else name: command.help for name, command in NAMES.items()
        }
        self._commands = WordCompleter([*help_texts], meta_dict=help_texts, sentence=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        word, space, rest = document.text_before_cursor.partition(" ")
        if not space:
            yield from self._commands.get_completions(document, event)
        elif event.completion_requested and word in NAMES:  # query disks and servers only at Tab
            takes, typed = NAMES[word].takes, Document(rest.lstrip())
            if takes == "model":
                with suppress(MlxspecError):  # a server that is gone; the next answer reports it
                    names = WordCompleter([*self._models()], sentence=True)
                    yield from names.get_completions(typed, event)
            if takes in ("file", "model"):
                paths = PathCompleter(expanduser=True, only_directories=takes == "model")
                yield from paths.get_completions(typed, event)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=typing)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        choosing, buffer.complete_state = buffer.complete_state, None
        chosen = choosing and choosing.current_completion
        if chosen and buffer.text not in NAMES:
            return  # only choose; the user may still type an argument
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=typing)
    @bindings.add("c-j", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _markdown(text: str) -> Markdown:
    """Markdown that shows every word: HTML is shown as text, and links with their addresses."""
    # "ansi" themes use the terminal's own palette, which fits its background.
    markdown = Markdown(text, code_theme="ansi_light", hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    markdown.parsed = parser.parse(text)
    return markdown


class MarkdownPrinter:
    """Writes an answer to a terminal, instead of :class:`mlxspec.terminal.TokenPrinter`.

    The last block is redrawn as it grows, cut to the window. Once the next block begins, the block
    is written in full and never redrawn, so long answers scroll like any text.

    Args:
        console: standard output.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Rich's own style for inline code has a black background, even in a light window.
        console.push_theme(Theme({"markdown.code": "bold cyan"}))
        self._text = ""
        """The text of the last block."""
        self._between = ""
        """What comes before the next block: a blank line, except before the first one."""
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
            lines = self._text[: self._text.rfind("\n")].split("\n")
            blocks = _markdown("\n".join(lines)).parsed or []  # paragraphs, lists, …
            *_, begin = 0, *(block.map[0] for block in blocks if block.map and not block.level)
            if begin:
                complete, rest = lines[:begin], self._text.split("\n")[begin:]
                self._text = "\n".join(rest)
                self._print("\n".join(complete))

    def finish(self) -> None:
        """Write the rest of the answer."""
        rest, self._text = self._text, ""
        self._live.stop()
        if rest.strip():
            self._print(rest)

    def _print(self, block: str) -> None:
        self._console.print(self._between, end="")
        self._console.print(_markdown(block))
        self._between = "\n"

    def _picture(self) -> SegmentLines:
        """The last lines of the growing block that fit into the window."""
        lines = self._console.render_lines(_markdown(self._text), pad=False)
        return SegmentLines(lines[-max(1, self._console.height - 2) :], new_lines=True)
