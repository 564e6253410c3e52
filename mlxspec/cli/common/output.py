"""Output of commands: consoles, progress bars, tables, pages, figures of answers, JSON, sizes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ...errors import OptionError
from ...files import SHARED, check_writable, replaced
from ...terminal import one_line, wants_color
from .notes import note, say
from .options import option_field

if TYPE_CHECKING:
    from ...generation.response import GenerationResponse, GenerationResult, SpeculationStats

_UNLIMITED = 10_000  # columns
_LONG_PROMPT = 1000  # tokens; shorter prompts need no progress bar
_PAGE_WIDTH = 160  # columns


def output_console(color: bool | None = None) -> Console:
    """A console on standard output; ``color`` is as for :func:`mlxspec.terminal.wants_color`.

    It is as wide as the terminal or COLUMNS. In a file or pipe, lines are not wrapped unless
    COLUMNS is set.
    """
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    in_color = wants_color(sys.stdout, color)
    # Requested colours also go into a pipe.
    return Console(
        force_terminal=in_color or None, width=None if limited else _UNLIMITED, **_look(in_color)
    )


def error_console(color: bool | None = None) -> Console:
    """A console on standard error; ``color`` is as for :func:`mlxspec.terminal.wants_color`.

    In a file or pipe, requested colours are written, but no progress bars.
    """
    in_color = wants_color(sys.stderr, color)
    shows, animates = sys.stderr.isatty() or in_color, None if sys.stderr.isatty() else False
    return Console(stderr=True, force_terminal=shows, force_interactive=animates, **_look(in_color))


def _look(in_color: bool) -> dict[str, Any]:
    """Rich's options to print text unchanged. Without colours, no text is bold or dim, either."""
    as_they_are = dict.fromkeys(("highlight", "markup", "emoji"), False)
    return {"no_color": not in_color, "color_system": "256" if in_color else None, **as_they_are}


def confirm(asking: str, question: str, refused: str) -> None:
    """Ask the user at a terminal; if the answer is no, print ``refused`` and exit.

    Raises:
        OptionError: there is no terminal to ask at. The message names ``asking``, the command or
            option that asks.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise OptionError(f"{asking} asks for confirmation, which needs a terminal: add --yes")
    if not click.confirm(question, err=True):
        say(refused)
        sys.exit(1)


class ProgressBar(Progress):
    """Shows a progress bar on an interactive terminal. Elsewhere, it prints a note at most.

    Call it with the amount of work done and the total, which is None if unknown. The bar is erased
    when all work is done, or at the end of the ``with`` block.

    Args:
        what: the text before the bar.
        figures: the columns after the bar; by default the percentage.
        console: where to draw the bar; by default on standard error.
        least: the smallest total for which a bar is shown.
        noted: the note to print, without a terminal, when the ``with`` block begins.
    """

    def __init__(
        self,
        what: str,
        *figures: ProgressColumn,
        console: Console | None = None,
        least: float = 0,
        noted: str = "",
    ) -> None:
        console = console or error_console()
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),  # so that everything, with an echoed ^C, fits into 40 columns
            *(figures or [TaskProgressColumn()]),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=True,  # so that notes appear above it
            disable=not console.is_interactive,
        )
        self._only = self.add_task(what, total=None)
        self._least, self._noted = least, noted

    def __enter__(self) -> ProgressBar:
        if self._noted and self.disable:
            note(f"{self._noted} …")
        return self  # the first call with work to do starts it

    def __call__(self, done: float, total: float | None = 1.0) -> None:
        self.update(self._only, completed=done, total=total)
        if total is not None and done >= total:
            self.stop()
        elif total is None or total >= self._least:
            self.start()


def prefill_bar(console: Console) -> ProgressBar:
    """A progress bar for the prefill of a prompt; it appears only if the prompt is long."""
    figures = MofNCompleteColumn(), TimeElapsedColumn()
    return ProgressBar("prefill", *figures, console=console, least=_LONG_PROMPT)


@contextmanager
def waiting_bar(what: str, console: Console | None = None, noted: str = "") -> Iterator[None]:
    """Show at a terminal that work is under way, and for how long, while its extent is unknown.

    The arguments are those of :class:`ProgressBar`.
    """
    with ProgressBar(what, TimeElapsedColumn(), console=console, noted=noted) as bar:
        bar(0, None)
        yield


def folding_table(heading: str, *others: str, caption: str | None = None) -> Table:
    """A table of names and figures; its cells wrap on a narrow terminal.

    Args:
        heading: the heading of the names.
        others: the headings of the figures.
    """
    table = Table(
        box=SIMPLE, pad_edge=False, collapse_padding=True, caption=caption, caption_justify="left"
    )
    table.add_column(heading, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def print_tables(parts: Iterable[RenderableType], color: bool | None = None) -> None:
    """Write tables and lines of text to standard output, with :func:`output_console`."""
    console = output_console(color)
    for part in parts:
        console.print(part)


def print_rows(*rows: tuple[str, object]) -> None:
    """Write names and values in two columns, each row on one line."""
    width = max(9, *(len(name) for name, _ in rows))  # so that several blocks are usually aligned
    for name, value in rows:
        click.echo(f"{name:<{width}}  {one_line(value)}")


def html_page(parts: Iterable[RenderableType]) -> str:
    """Make an HTML page of tables and lines of text; text is escaped."""
    console = Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH, force_terminal=True)
    for part in parts:
        console.print(part, highlight=False, markup=False, emoji=False)
    return console.export_html(inline_styles=True)


def write_json(report: dict[str, Any], indent: int | None = None) -> None:
    """Write one JSON object to standard output.

    The text is ASCII without control characters, so it is valid in every encoding and safe to print
    on a terminal.
    """
    click.echo(json_text(report, indent))


def json_text(report: dict[str, Any], indent: int | None = None) -> str:
    """The text that :func:`write_json` writes, without the newline."""
    # DEL is the only control character that json does not escape.
    return json.dumps(report, indent=indent).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class ReportOptions:
    """How to show a report: as tables or as one JSON object, and optionally as a page.

    Raises:
        OptionError: the page's name does not end in ``.html``.
        FileError: the page cannot be written.
    """

    html: Path | None = option_field(  # noqa: RUF009
        "--html FILE", "Also write the report as an HTML page, FILE.html."
    )
    as_json: bool = option_field(
        "--json", "Write one JSON object instead of tables.", default=False
    )

    def __post_init__(self) -> None:
        if self.html:
            if self.html.suffix != ".html":
                raise OptionError(f"--html {self.html}: choose a name *.html")
            check_writable(self.html)

    def show_tables(
        self, figures: dict[str, Any], tables: Iterable[RenderableType], color: bool | None = None
    ) -> None:
        """Show a report as JSON or as tables, and write it as a page if requested.

        Args:
            figures: the JSON object.
            tables: tables and lines of text.
            color: as for :func:`mlxspec.terminal.wants_color`.

        Raises:
            FileError: the page cannot be written; an existing file is unchanged.
        """
        parts = [*tables]
        if self.as_json:
            write_json(figures)
        else:
            print_tables(parts, color)
        if self.html:
            content = html_page(parts)
            with replaced(self.html, SHARED) as file:
                file.write(content.encode(errors="replace"))  # file names need not be UTF-8


def ratio(value: float | None) -> str:
    """Format the ratio of two speeds."""
    return "–" if value is None else f"{value:.2f}×"


def figures_table(
    heading: str, reports: Mapping[str, Mapping[str, Any]], names: Iterable[str], caption: str
) -> Table:
    """A table with a row for each report and a column for each of the named figures.

    Args:
        heading: the heading of the first column, which has the reports' names.
        reports: the reports by their names. Each has figures by name; None if unknown.
    """
    columns = [*names]
    headings = (name.replace("_", " ") for name in columns)
    table = folding_table(heading, *headings, caption=caption)
    for of, report in reports.items():
        values = (report[name] for name in columns)
        table.add_row(of, *("–" if value is None else f"{value:.3g}" for value in values))
    return table


def counted(number: int, thing: str) -> str:
    """Format a number of things: "1 file", "2,000 files"."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def result_report(result: GenerationResult, model: str) -> dict[str, Any]:
    """A result as an object for JSON: its fields, further figures, and the model's name."""
    report = {"model": model, **asdict(result), "generation_tokens": len(result.tokens)}
    del report["segments"], report["stats"]["cost"]
    report["stats"] |= {
        "tokens_per_step": result.stats.tokens_per_step,
        "acceptance_rate": result.stats.acceptance_rate,
    }
    return report


class PlainDecoding(NamedTuple):
    """An answer without drafts: its speed in tokens per second, and whether its text is equal."""

    tps: float
    text: str


@dataclass
class Figures:
    """Sums of figures over answers, and the panel that shows them.

    Attributes:
        prompt_tokens, reused_tokens, generated_tokens: sums over all answers.
        prefill_seconds, seconds: the time for prompts and for generated tokens.
        stats: sums of the answers' stats; None before the first answer.
        answers: the number of answers.
        plain: the one answer without drafts, if that was measured.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    stats: SpeculationStats | None = None
    answers: int = 0
    plain: PlainDecoding | None = None

    def add(self, answer: GenerationResponse | GenerationResult, generated: int) -> None:
        """Count an answer.

        Args:
            answer: the answer's last response, or its result.
        """
        self.answers += 1
        self.prompt_tokens += answer.prompt_tokens
        self.reused_tokens += answer.reused_tokens
        self.generated_tokens += generated
        if answer.prompt_tps:
            run = answer.prompt_tokens - answer.reused_tokens
            self.prefill_seconds += run / answer.prompt_tps
        if answer.generation_tps:
            self.seconds += generated / answer.generation_tps
        self.stats = self.stats + answer.stats if self.stats else answer.stats

    def panel(
        self,
        *first: tuple[str, ...],
        subtitle: str | None = None,
        below: Iterable[RenderableType] = (),
    ) -> Panel:
        """A panel with a row for each figure: its name, the figure and a remark.

        Args:
            first: rows to show before those of the figures.
        """
        run, stats = self.prompt_tokens - self.reused_tokens, self.stats
        speed = rate(self.generated_tokens, self.seconds)
        rows = [
            *first,
            ("prompt tokens", f"{self.prompt_tokens:,}", rate(run, self.prefill_seconds)),
            *([("reused", f"{self.reused_tokens:,}")] if self.reused_tokens else []),
            ("generated tokens", f"{self.generated_tokens:,}", speed),
        ]
        if stats:
            share = f"{stats.acceptance_rate:.0%}" if stats.drafted else "–"
            accepted = f"{stats.accepted}/{stats.drafted}" if stats.drafted else "no drafts"
            rows += [
                ("steps", f"{stats.steps:,}"),
                ("tokens per step", f"{stats.tokens_per_step:.2f}"),
                ("acceptance rate", share, accepted),
            ]
            if self.plain:
                gain = ratio(self.generated_tokens / self.seconds / self.plain.tps)
                rows += [
                    ("without drafts", self.plain.text, rate(self.plain.tps, 1)),
                    ("against plain", gain, "measured"),
                ]
            elif stats.gain:
                rows.append(("against plain", ratio(stats.gain), "estimated"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column()
        grid.add_column(justify="right")
        for row in rows:
            grid.add_row(*filter(None, row))  # a column of empty cells would make others wrap
        return Panel(Group(grid, *below), expand=False, border_style="dim", subtitle=subtitle)


def rate(number: float, seconds: float) -> str:
    """Format a speed; empty if the time is unknown."""
    if not (number and seconds):
        return ""
    speed = number / seconds
    return f"{speed:,.{0 if speed >= 100 else 1}f}/s"
