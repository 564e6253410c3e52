"""Messages from a pipe or a terminal with line editing, and answers rendered as Markdown."""

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

from ...errors import ChatFileError, MlxspecError, PromptError
from ...files import replaced, sole_writer
from ...terminal import visible, wants_color
from ..common.notes import note
from . import COMMANDS, NAMES, QUOTES, is_open, without_quotes


def open_input(
    history: bool, models: Callable[[], Iterable[str]], color: bool | None
) -> LineInput | TerminalInput:
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
    end of a line continues it on the next line.
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


_MOST_BYTES = 1_000_000
"""How large the history gets; then its older half goes."""

_ENTRY = b"\n# "  # how a message of prompt_toolkit's FileHistory begins

# In the terminal's own colours: prompt_toolkit's are greys that differ little from each other.
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

_PASTES_BRACKETED = "\x1b[?2004h"
_PASTES_BARE = "\x1b[?2004l"


class TerminalInput:
    """Reads messages at a terminal, where pasted lines are one message.

    Until :meth:`close` the terminal shows no key that is pressed between two prompts: it would
    stand amid the answer. The next prompt gets it.

    Args:
        history: the file of earlier messages; None keeps them in this process alone.
        models: names that ``/model`` takes.
        color: whether to use colours.
    """

    interactive = True

    def __init__(
        self, history: Path | None, models: Callable[[], Iterable[str]], color: bool
    ) -> None:
        self.forgot = False
        self._history = ChatHistory(history) if history else None
        output = create_output()
        if isinstance(output, Vt100_Output):
            # Asking where the cursor is would mix answers of the terminal with what is typed.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=self._history or InMemoryHistory(),
            completer=ChatCompleter(models),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text[:1] == "/"),
            key_bindings=_bindings(),
            multiline=True,
            prompt_continuation=_continuation,
            search_ignore_case=True,
            enable_suspend=True,
            enable_open_in_editor=True,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            output=output,
            style=_STYLE,
        )
        self._quiet = _QuietKeys()
        self._quiet.begin()

    def message(self) -> str | None:
        """The next message, which may be empty; None where the user leaves.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; what was typed is forgotten.
        """
        try:
            typed = self._session.prompt()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.forgot = bool(self._session.default_buffer.text)
            raise
        finally:
            self._quiet.bracket_pastes()
            if self._history:
                self._history.report_trouble()
        # Undecodable bytes have become lone surrogates.
        return without_quotes(typed.encode(errors="replace").decode().rstrip("\n"))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._quiet.end()


class ChatHistory(FileHistory):
    """Earlier messages in a private file, which several chats may write to.

    Where it cannot be written, messages are kept in this process alone.

    Args:
        path: the file; its directory is made if there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trouble: str | None = None
        self._usable = True
        super().__init__(path)
        with self._trying():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > _MOST_BYTES:
                self._shorten()

    def load_history_strings(self) -> Iterable[str]:
        try:
            return [*super().load_history_strings()] if self._path.is_file() else []
        except OSError as error:
            self._fail(f"{self._path}: cannot be read ({error.strerror})")
            return []

    def store_string(self, string: str) -> None:
        if not self._usable:
            return
        text = "".join(f"+{line}\n" for line in string.split("\n"))
        entry = f"\n# {datetime.now()}\n{text}".encode(errors="replace")
        alone = sole_writer(self._path, ChatFileError, create=True)
        with self._trying(), alone, open(self._path, "ab") as file:
            file.write(entry)

    def report_trouble(self) -> None:
        """Say once why the history is not kept. (In the middle of a prompt it would tear that.)"""
        if self._trouble:
            note(self._trouble)
            self._trouble = None

    def _shorten(self) -> None:
        with sole_writer(self._path, ChatFileError, create=False):
            newer = self._path.read_bytes()[-_MOST_BYTES // 2 :]
            _, begin, whole = newer.partition(_ENTRY)
            with replaced(self._path, ChatFileError) as file:
                file.write(begin + whole)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Keep an error to report, instead of ending the chat."""
        try:
            yield
        except OSError as error:
            self._fail(f"{error.filename}: cannot be written ({error.strerror})")
        except MlxspecError as error:
            self._fail(str(error).partition(";")[0])

    def _fail(self, reason: str) -> None:
        self._trouble = f"{reason}; what is typed is not kept for the next chat"
        self._usable = False


class ChatCompleter(Completer):
    """Completes commands, the names of files after them, and models.

    Args:
        models: names that ``/model`` takes besides directories.
    """

    def __init__(self, models: Callable[[], Iterable[str]]) -> None:
        self._models = models
        self._known: list[str] | None = None
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
        if not event.completion_requested:  # disks and servers are asked when Tab is pressed
            return
        rest = rest.lstrip()
        if takes == "model":
            for model in self._model_names():
                if model.startswith(rest):
                    yield Completion(model, -len(rest))
            yield from self._directories.get_completions(Document(rest), event)
        elif takes == "file":
            yield from self._files.get_completions(Document(rest), event)

    def _model_names(self) -> list[str]:
        if self._known is None:
            try:
                self._known = [*self._models()]
            except MlxspecError:  # a server that has gone, which an answer will say
                return []
        return self._known


def _bindings() -> KeyBindings:
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=typing)
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        choosing, buffer.complete_state = buffer.complete_state, None
        chosen = choosing and choosing.current_completion
        if chosen and buffer.text not in NAMES:
            return  # the choice alone; what follows it may be still to come
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


def _continuation(width: int, line: int, wraps: int) -> str:
    return "  " if wraps else ". "


class _QuietKeys:
    """A terminal that shows no key and keeps what is typed for the next prompt.

    Enter and pastes arrive there as they are at a prompt, and Ctrl-C and Ctrl-Z have their effect.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdin.fileno()
        self._before: list[Any] = termios.tcgetattr(self._terminal)
        self._handler: Any = None

    def begin(self) -> None:
        """Set the terminal, now and whenever a shell has let the process go on."""
        self._handler = signal.signal(signal.SIGCONT, lambda *_: self._set())
        self._set()
        self.bracket_pastes()

    def bracket_pastes(self) -> None:
        """Bracket pastes again, which a prompt has ended."""
        _send(_PASTES_BRACKETED)

    def end(self) -> None:
        """Leave the terminal as it was."""
        signal.signal(signal.SIGCONT, self._handler)
        with suppress(OSError, termios.error):  # the window is closed
            _send(_PASTES_BARE)
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    def _set(self) -> None:
        with suppress(termios.error):
            attributes = termios.tcgetattr(self._terminal)
            attributes[0] &= ~termios.ICRNL  # Enter would become Ctrl-J
            attributes[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, attributes)


def _send(code: str) -> None:
    sys.stdout.write(code)
    sys.stdout.flush()


_REFRESH = 0.1  # seconds between two pictures of a block that grows, at least
_SHARE = 20  # drawing takes no more than a twentieth of the time from the model


class _AnswerMarkdown(Markdown):
    """Markdown that shows every word: HTML is text, and links show where they lead."""

    def __init__(self, text: str) -> None:
        # Colours of the terminal's own palette, which are made for its background.
        super().__init__(text, code_theme="ansi_light", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
        self.parsed = parser.parse(text)

    @property
    def block_lines(self) -> list[int]:
        """In which lines of the text its blocks (paragraphs, lists, …) begin."""
        return [token.map[0] for token in self.parsed if token.map and token.level == 0]


def _rendered(console: Console, text: str) -> list[list[Segment]]:
    return console.render_lines(_AnswerMarkdown(text), pad=False)


class MarkdownPrinter:
    """Writes an answer to a terminal, instead of :class:`mlxspec.terminal.TokenPrinter`.

    The last block is redrawn as it grows, cut to the window. Once the next one begins it is written
    whole and left alone, so long answers scroll as any text does.

    Args:
        console: standard output.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Rich's own style for code in a line has a black ground, also in a light window.
        console.push_theme(Theme({"markdown.code": "bold cyan"}))
        self._live: Live | None = None
        self._text = ""
        """The text from the last written block on."""
        self._written = 0
        """How many rendered lines of :attr:`_text` are written."""
        self._next = 0.0
        """When it may be drawn again."""

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
        """Write what is left."""
        self._erase()
        if self._text.strip():
            self._print(self._text)
        self._text, self._written = "", 0

    def _write_complete(self) -> None:
        """Write the blocks before the last one, if they are not yet written."""
        # A line that still grows may turn out to belong to the block before it.
        lines = self._text[: self._text.rfind("\n") + 1].split("\n")
        begins = _AnswerMarkdown("\n".join(lines)).block_lines
        earlier = 1 if self._written else 0
        if len(begins) - earlier < 2:
            return
        complete = "\n".join(lines[: begins[-1]]) + "\n"
        self._erase()
        self._print(complete)
        # The last of them stays, since what stands between two blocks depends on both.
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
