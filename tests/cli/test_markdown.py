"""Streamed Markdown looks like the complete text."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from mlxspec.cli.chat.terminal import MarkdownPrinter

CODE = "```python\n" + "".join(f"def f{i}():\n    pass\n" for i in range(20)) + "```\n"
BLOCKS = [
    "A paragraph with **bold** and `code`,\nwhich goes on.\n",
    "# A heading\n",
    "Another heading\n===\n",
    "## A third\n",
    "- one\n- two\n\n  of two paragraphs\n- three\n",
    "1. first\n2. second\n   - nested\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n",
    "> a quote\n> of two lines\n",
    "---\n",
    CODE,
    "    indented code\n",
    "~~~\nunfinished\n\n\n",
]


def shown(pieces: list[str], width: int) -> str:
    """Return a terminal's output without frames that were erased."""
    console = Console(file=io.StringIO(), width=width, height=10, color_system=None)
    printer = MarkdownPrinter(console)
    for piece in pieces:
        printer.write(piece, False)
    printer.finish()
    return console.file.getvalue()


def whole(text: str, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Markdown(text, code_theme="ansi_light", hyperlinks=False))
    return console.file.getvalue()


def lines(text: str) -> list[str]:
    """Return the lines that are not blank; there is always one between blocks."""
    return [line.rstrip() for line in text.split("\n") if line.strip()]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6),
    st.sampled_from([20, 40, 80]),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
)
def test_pieces_look_as_the_whole(blocks: list[str], width: int, sizes: list[int]) -> None:
    text = "\n".join(blocks)
    pieces, at = [], 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    assert lines(shown(pieces, width)) == lines(whole(text, width))


def test_a_block_is_written_once_the_next_one_begins() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    printer = MarkdownPrinter(console)
    printer.write("One.\n\nTwo", False)
    assert "One." not in console.file.getvalue()
    printer.write(".\n", False)
    assert lines(console.file.getvalue()) == ["One."]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Use <div> here.", "<div>"),
        ("<div>\nblock\n</div>\n", "<div>"),
        ("See [there](http://evil.example).", "http://evil.example"),
        ("See [there][1].\n\nAnd.\n\n[1]: http://evil.example\n", "http://evil.example"),
        ("![plan](http://evil.example/a.png)", "http://evil.example/a.png"),
        ("\x1b[2J and \u202e", "␛[2J"),
    ],
)
def test_no_word_is_lost_hidden_or_obeyed(text: str, word: str) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="256")
    printer = MarkdownPrinter(console)
    printer.write(text, False)
    printer.finish()
    printed = console.file.getvalue()
    assert word in printed
    assert "\x1b[2J" not in printed
    assert "\x1b]8" not in printed  # a link that hides its target
    assert "\u202e" not in printed


def test_the_ground_is_the_window_s() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="256")
    printer = MarkdownPrinter(console)
    printer.write("\n".join(BLOCKS), False)
    printer.finish()
    codes = ";".join(re.findall(r"\x1b\[([0-9;]*)m", console.file.getvalue())).split(";")
    assert "36" in codes  # cyan
    assert {"40", "48", "100"}.isdisjoint(codes)


def test_a_terminal_keeps_every_line_of_a_block_that_is_higher_than_its_window() -> None:
    console = Console(file=io.StringIO(), width=40, height=8, force_terminal=True)
    printer = MarkdownPrinter(console)
    for line in CODE.splitlines(keepends=True):
        printer.write(line, False)
    printer.finish()
    final = console.file.getvalue().rpartition("\x1b[2K")[2]  # after the last frame is erased
    assert [f"f{i}" in final for i in range(20)] == [True] * 20
