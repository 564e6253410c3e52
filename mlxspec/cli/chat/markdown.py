"""Answers rendered as Markdown while they come."""

from __future__ import annotations

import time

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines
from rich.theme import Theme

from ...terminal import visible

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
    """Writes an answer to a terminal, in place of :class:`mlxspec.terminal.TokenPrinter`.

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
