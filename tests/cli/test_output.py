"""Wrapped tables, console widths, progress bars and formatted numbers."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from mlxspec.cli.common.notes import note
from mlxspec.cli.common.output import (
    ProgressBar,
    counted,
    folding_table,
    output_console,
    print_tables,
    waiting_bar,
)

ROWS = [("copy a long text", "3", "1.59× (worst)"), ("free", "12", "1.00×")]


def example() -> Table:
    table = folding_table("set", "outputs", "speed", caption="speed against plain decoding")
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
    table = folding_table("set", "outputs below 0.98")
    table.add_row("free", "1%")
    console = Console(file=io.StringIO(), width=16, color_system=None)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split() for line in lines if "free" in line] == [["free", "1%"]]


@pytest.mark.parametrize("columns", [28, 34])
def test_in_a_narrow_window_cells_are_folded_and_nothing_is_lost(columns: int) -> None:
    lines = printed(columns)
    assert max(map(len, lines)) <= columns
    shown = "".join("".join(lines).split())
    assert all(word in shown for word in ("set", "outputs", "speed", "1.00×", "(worst)"))


@pytest.mark.parametrize("columns", range(28, 42))
def test_a_figure_that_is_too_long_continues_on_the_next_line(columns: int) -> None:
    table = folding_table("decoder", "worst set")
    table.add_row("auto", "a_set_with_a_long_name_indeed 1.25×")
    console = Console(file=io.StringIO(), width=columns, color_system=None)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= columns
    figures = "".join("".join(lines[lines.index(next(x for x in lines if "auto" in x)) :]).split())
    assert figures == "autoa_set_with_a_long_name_indeed1.25×"


def test_a_terminal_has_bold_and_dim_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in on_a_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in on_a_terminal(monkeypatch)


def test_names_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "[bold]:smile:[/bold]" in on_a_terminal(monkeypatch)


def test_a_pipe_wraps_no_line_unless_its_width_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "word " * 200
    output_console().print(line)
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setenv("COLUMNS", "40")
    output_console().print(line)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_one_thing_is_singular() -> None:
    assert [counted(number, "turn") for number in (0, 1, 2000)] == [
        "0 turns",
        "1 turn",
        "2,000 turns",
    ]


def drawn(interactive: bool, total: int) -> str:
    """Return the progress output of a prefill of ``total`` tokens."""
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=interactive, _environ={})
    with ProgressBar("prefill", MofNCompleteColumn(), console=console, least=100) as progress:
        progress(0, total)
        progress(total, total)
    return stream.getvalue()


def test_a_long_prefill_shows_a_bar_before_its_first_chunk_ends():
    assert "0/100" in drawn(interactive=True, total=100)


def test_a_short_prefill_shows_nothing():
    assert drawn(interactive=True, total=99) == ""


def test_without_a_terminal_nothing_is_drawn():
    assert drawn(interactive=False, total=100) == ""


def test_an_interrupted_prefill_leaves_no_bar_behind():
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=True, _environ={})
    try:
        with ProgressBar("prefill", MofNCompleteColumn(), console=console) as progress:
            progress(0, 100)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    text = stream.getvalue()
    assert text.endswith("\x1b[2K")  # the line is erased


def test_a_note_appears_above_a_bar_and_not_on_its_line():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=40)
    with ProgressBar("Working", console=console) as progress:
        progress(0.5)
        note("the machine is busy")
    before, found, _ = file.getvalue().partition("Note: the machine is busy")
    assert found
    assert before.endswith("\r\x1b[2K")  # the bar's line is erased first


def test_a_note_breaks_between_words_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("mlxspec.cli.common.notes.columns_of", lambda _: 40)
    note("there is no directory /a/path/of/more/than/forty/characters/in/all: name another one")
    assert stream.getvalue().splitlines() == [
        "Note: there is no directory",
        "/a/path/of/more/than/forty/characters/in/all:",
        "name another one",
    ]


def test_long_work_begins_with_a_note_where_no_bar_can_appear(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting_bar("Loading"):
        pass
    assert capsys.readouterr().err == ""
    with waiting_bar("Examining", noted="examining x"):
        assert capsys.readouterr().err == "Note: examining x …\n"
    console = Console(file=io.StringIO(), force_terminal=True, width=40, _environ={})
    with ProgressBar("Examining", console=console, noted="examining x"):
        pass
    assert capsys.readouterr() == ("", "")
