"""Input from a pipe or from a terminal with line editing, and answers rendered as Markdown."""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click
from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.styles import Style
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines
from rich.theme import Theme

from ...errors import FileError, MlxspecError, PromptError
from ...files import replaced
from ...terminal import visible, wants_color
from ..common.notes import note
from . import COMMANDS, NAMES, QUOTES, is_open, without_quotes


@contextmanager
def open_input(
    history: bool, models: Callable[[], Iterable[str]], color: bool | None
) -> Iterator[LineInput | TerminalInput]:
    """Open standard input.

    Args:
        history: keep typed messages for the next chat.
        models: returns the names to complete for ``/model``.
        color: as for :func:`mlxspec.terminal.wants_color`.

    Raises:
        PromptError: standard input is closed.
    """
    if sys.stdin is None:
        raise PromptError("standard input is closed: chat at a terminal, or pipe the turns in")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not at_terminal or os.environ.get("TERM", "dumb") == "dumb":
        yield LineInput()
        return
    file = history_file() if history else None
    turns = TerminalInput(file, models, wants_color(sys.stdout, color))
    with _quiet_keys():
        yield turns


class LineInput:
    """Reads each line as a message, and writes prompts to standard error.

    A message that begins with three double quotes ends at the next three. A backslash at the end of
    a line continues the message on the next line.
    """

    forgot = False

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, TextIOWrapper):
            if self.interactive:
                sys.stdin.reconfigure(errors="replace")
            else:  # bytes that are not UTF-8 become lone surrogates, which _line() finds
                sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape")

    def message(self) -> str | None:
        """The next message; None at the end of the input."""
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
        line = ""
        try:
            line = sys.stdin.readline()
        finally:
            if self.interactive and not line:  # end the prompt's line
                click.echo(err=True)
        if not line:
            raise EOFError
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise PromptError("standard input is not UTF-8 text: convert it to UTF-8") from error
        return line.removesuffix("\n").removesuffix("\r")


# The terminal's own colours, since prompt_toolkit's greys are hard to tell apart.
_STYLE = Style.from_dict(
    {
        "completion-menu": "noinherit",
        "completion-menu.completion": "noinherit",
        "completion-menu.completion.current": "noinherit reverse",
        "completion-menu.meta.completion": "noinherit",
        "completion-menu.meta.completion.current": "noinherit reverse",
        "scrollbar.background": "noinherit",
        "scrollbar.button": "noinherit reverse",
    }
)


class TerminalInput:
    """Reads messages at a terminal, where pasted lines are one message.

    Args:
        history: the file of earlier messages; None keeps messages only in this process.
        models: returns the names to complete for ``/model``.
        color: whether to use colours.

    Attributes:
        forgot: whether the last Ctrl-C cleared a partly typed message.
    """

    interactive = True

    def __init__(
        self, history: Path | None, models: Callable[[], Iterable[str]], color: bool
    ) -> None:
        self.forgot = False
        self._file = history
        earlier = kept_messages(history) if history else []
        self._last = earlier[-1] if earlier else None
        output = create_output()
        if isinstance(output, Vt100_Output):
            # The terminal's reply to a cursor query would mix with typed text.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=InMemoryHistory(earlier),
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
            style=_STYLE,
        )

    def message(self) -> str | None:
        """The next message, which may be empty; None if the user leaves.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; typed text is lost.
        """
        try:
            typed = self._session.prompt()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.forgot = bool(self._session.default_buffer.text)
            raise
        finally:
            click.echo(_PASTES_BRACKETED, nl=False)
        self._keep(typed)
        # Python has made lone surrogates of undecodable bytes.
        return without_quotes(typed.encode(errors="replace").decode().rstrip("\n"))

    def _keep(self, typed: str) -> None:
        """Keep a message for the next chat, unless it repeats the last one."""
        if self._file and typed and typed != self._last:
            self._last = typed
            try:
                keep_message(self._file, typed)
            except (FileError, OSError) as error:
                reason = str(error).partition(";")[0]
                note(f"{reason}; messages are not kept for the next chat")
                self._file = None


_MOST_BYTES = 1_000_000
"""The size at which the history drops its older half."""

_ENTRY = b"\n# "  # the beginning of each message in prompt_toolkit's FileHistory


def history_file() -> Path:
    """The file of typed messages.

    Raises:
        OptionError: the environment names an impossible directory.
    """
    from ...corpus import data_directory

    return data_directory() / "chat_history"


def kept_messages(path: Path) -> list[str]:
    """Read the messages of :func:`keep_message`, oldest first; none from an unreadable file."""
    with suppress(OSError):
        if path.is_file():
            return [*FileHistory(path).load_history_strings()][::-1]
    return []


def keep_message(path: Path, message: str) -> None:
    """Append a message to a private file that several chats may write.

    Args:
        path: the file; its directory is created if it is missing.
        message: the message.

    Raises:
        FileError, OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = "".join(f"+{line}\n" for line in message.split("\n"))
    entry = f"\n# {datetime.now()}\n{lines}".encode(errors="replace")
    with replaced(path) as file:
        kept = path.read_bytes() if path.exists() else b""
        if len(kept) > _MOST_BYTES:
            _, begin, newer = kept[-_MOST_BYTES // 2 :].partition(_ENTRY)
            kept = begin + newer
        file.write(kept + entry)


class ChatCompleter(Completer):
    """Completes commands, and the files or models after them.

    Args:
        models: returns the names that ``/model`` takes besides directories.
    """

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        self._models = models
        self._files = PathCompleter(expanduser=True)
        self._directories = PathCompleter(expanduser=True, only_directories=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        word, space, rest = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not space:
            for command in COMMANDS:
                for name in (command.name, *command.aliases):
                    if name.startswith(word):
                        more = " " if command.takes else ""
                        yield Completion(
                            name + more, -len(word), display=name, display_meta=command.help
                        )
            return
        takes = NAMES[word].takes if word in NAMES else ""
        if not event.completion_requested:  # query disks and servers only at Tab
            return
        rest = rest.lstrip()
        if takes == "model":
            with suppress(MlxspecError):  # a server that is gone; the next answer reports it
                for model in self._models():
                    if model.startswith(rest):
                        yield Completion(model, -len(rest))
            yield from self._directories.get_completions(Document(rest), event)
        elif takes == "file":
            yield from self._files.get_completions(Document(rest), event)


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


_PASTES_BRACKETED = "\x1b[?2004h"
_PASTES_BARE = "\x1b[?2004l"


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """Stop the terminal from showing keys that are pressed while an answer is written.

    The next prompt gets these keys, with Enter and pastes as at a prompt. Ctrl-C and Ctrl-Z still
    work. Each prompt turns bracketed paste off, so turn it on again after each prompt.
    """
    terminal = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(terminal)

    def hush(*_: object) -> None:
        with suppress(termios.error):
            attributes = termios.tcgetattr(terminal)
            attributes[0] &= ~termios.ICRNL  # otherwise Enter would become Ctrl-J
            attributes[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)

    handler = signal.signal(signal.SIGCONT, hush)  # again after each resume by the shell
    hush()
    click.echo(_PASTES_BRACKETED, nl=False)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, handler)
        with suppress(OSError, termios.error):  # the window is closed
            click.echo(_PASTES_BARE, nl=False)
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


_REFRESH = 0.1  # the fewest seconds between two drawings of a growing block
_SHARE = 20  # drawing takes at most a twentieth of the time


def _markdown(text: str) -> Markdown:
    """Markdown that shows every word: HTML is shown as text, and links with their addresses."""
    # "ansi" themes use the terminal's own palette, which fits its background.
    markdown = Markdown(text, code_theme="ansi_light", hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    markdown.parsed = parser.parse(text)
    return markdown


def _rendered(console: Console, text: str) -> list[list[Segment]]:
    return console.render_lines(_markdown(text), pad=False)


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
        self._live: Live | None = None
        self._text = ""
        """The text from the last written block on."""
        self._written = 0
        """The number of rendered lines of :attr:`_text` that are written."""
        self._next = 0.0
        """The earliest time of the next drawing."""

    def write(self, text: str, from_draft: bool) -> None:
        """Write a token's text."""
        self._text += visible(text)
        if "\n" in text:
            self._write_complete()
        if time.monotonic() >= self._next:
            began = time.monotonic()
            self._draw()
            ended = time.monotonic()
            self._next = ended + max(_REFRESH, _SHARE * (ended - began))

    def finish(self) -> None:
        """Write the rest of the answer."""
        self._erase()
        if self._text.strip():
            self._print(self._text)
        self._text, self._written = "", 0

    def _write_complete(self) -> None:
        """Write the blocks before the last one, if they are not yet written."""
        # A line that is still growing may turn out to belong to the block before it.
        lines = self._text[: self._text.rfind("\n") + 1].split("\n")
        blocks = _markdown("\n".join(lines)).parsed  # paragraphs, lists, …
        begins = [block.map[0] for block in blocks if block.map and block.level == 0]
        earlier = 1 if self._written else 0
        if len(begins) - earlier < 2:
            return
        complete = "\n".join(lines[: begins[-1]]) + "\n"
        self._erase()
        self._print(complete)
        # Keep the last of them, since the space between two blocks depends on both.
        self._text = "\n".join(self._text.split("\n")[begins[-2] :])
        last = "\n".join(lines[begins[-2] : begins[-1]])
        self._written = len(_rendered(self._console, last))

    def _print(self, text: str) -> None:
        """Write the lines of a text that are not yet written."""
        lines = _rendered(self._console, text)[self._written :]
        self._console.print(SegmentLines(lines, new_lines=True), end="")

    def _draw(self) -> None:
        room = max(1, self._console.height - 1)
        lines = _rendered(self._console, self._text)[self._written :][-room:]
        picture = SegmentLines(lines, new_lines=True)
        if self._live is None:
            self._live = Live(
                picture,
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(picture, refresh=True)

    def _erase(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
