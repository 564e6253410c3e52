"""Tables that fold, and the consoles that say how wide they may be."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from mlxspec.cli.consoles import output_console
from mlxspec.cli.folding_table import FoldingTable
from mlxspec.cli.report_output import print_tables

ROWS = [("copy a long text", "3", "1.59× (worst)"), ("free", "12", "1.00×")]


def example() -> FoldingTable:
    table = FoldingTable("set", "outputs", "speed", caption="speed against plain decoding")
    for row in ROWS:
        table.add_row(*row)
    return table


def printed(columns: int) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(example())
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    stream = Terminal()
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", stream)
        context.setenv("TERM", "xterm-256color")
        print_tables([example(), "[bold]:smile:[/bold]"])
    return stream.getvalue()


def test_where_there_is_room_a_row_is_a_line() -> None:
    lines = printed(80)
    for row in ROWS:
        assert any(all(cell in line for cell in row) for line in lines)


def test_headings_are_broken_before_rows_are() -> None:
    table = FoldingTable("set", "outputs below 0.98")
    table.add_row("free", "1%")
    console = Console(file=io.StringIO(), width=16, color_system=None)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split() for line in lines if "free" in line] == [["free", "1%"]]


@pytest.mark.parametrize("columns", [28, 34])
def test_in_a_narrow_window_a_row_is_a_block(columns: int) -> None:
    lines = [line.rstrip() for line in printed(columns)]
    assert max(map(len, lines)) <= columns
    start = lines.index("free")
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["outputs", "12"],
        ["speed", "1.00×"],
    ]
    # Figures end in one column.
    assert len({len(line) for line in lines if line.startswith("  ")}) == 1


def test_a_terminal_has_bold_and_dim_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in on_a_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_a_terminal(monkeypatch)


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[bold]:smile:[/bold]" in on_a_terminal(monkeypatch)


def test_a_pipe_breaks_no_line_unless_told_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "word " * 200
    output_console().print(line)
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setenv("COLUMNS", "40")
    output_console().print(line)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
