"""Answers rendered as Markdown while they come."""

from __future__ import annotations

import time
from collections.abc import Iterator

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.theme import Theme

from ...terminal import visible

_REFRESH = 0.1  # seconds between two pictures of a block that grows, at least
_SHARE = 20  # drawing takes no more than a twentieth of the time from the model


class _AnswerMarkdown(Markdown):
    """Markdown of which no word is lost or hidden: HTML is text, and links show where they lead."""

    def __init__(self, text: str) -> None:
        # Colours of the terminal's own palette, which are made for its background.
        super().__init__(text, code_theme="ansi_light", hyperlinks=False)
        parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
        self.parsed = parser.parse(text)

    @property
    def block_lines(self) -> list[int]:
        """In which lines of the text its blocks (paragraphs, lists, …) begin."""
        return [token.map[0] for token in self.parsed if token.map and token.level == 0]


class _Lines:
    """Some lines of rendered Markdown.

    Args:
        text: Markdown.
        skip: how many lines are left out at the beginning.
        fitting: leave out as many there that the rest fits the window, too.
    """

    def __init__(self, text: str, skip: int, fitting: bool = False) -> None:
        self._text, self._skip, self._fitting = text, skip, fitting

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        lines = _rendered(console, self._text, options)[self._skip :]
        if self._fitting:
            lines = lines[-max(1, console.height - 1) :]
        for line in lines:
            yield from line
            yield Segment.line()


def _rendered(
    console: Console, text: str, options: ConsoleOptions | None = None
) -> list[list[Segment]]:
    return console.render_lines(_AnswerMarkdown(text), options, pad=False)


class MarkdownPrinter:
    """Writes an answer to a terminal, in place of :class:`mlxspec.terminal.TokenPrinter`.

    The block that grows is drawn anew with each part of it, as far as the window has room. Once
    the next one begins it is complete: it is written whole, and never touched again. So long
    answers scroll as any text does.

    Args:
        console: standard output.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # Rich's own style for code in a line has a black ground, also in a light window.
        console.push_theme(Theme({"markdown.code": "bold cyan"}))
        self._live: Live | None = None
        self._text = ""
        """From the last block on that is written."""
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
            self._console.print(_Lines(self._text, self._written), end="")
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
        self._console.print(_Lines(complete, self._written), end="")
        # The last of them stays, since what stands between two blocks depends on both.
        self._text = "\n".join(self._text.split("\n")[begins[-2] :])
        last = "\n".join(lines[begins[-2] : begins[-1]])
        self._written = len(_rendered(self._console, last))

    def _draw(self) -> None:
        picture = _Lines(self._text, self._written, fitting=True)
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
