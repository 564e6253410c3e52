"""Tables on standard output: as wide as a terminal, and whole in a file or pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.table import Table

from ..terminal import visible, wants_color

_WIDTH_WITHOUT_TERMINAL = 160


def print_tables(parts: Iterable[RenderableType]) -> None:
    """Write tables and lines of text to standard output."""
    in_color = wants_color(sys.stdout)
    console = Console(
        width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL,
        no_color=not in_color,
        highlight=False,
        markup=False,
    )
    for part in parts:
        console.print(part)


def shown(name: str) -> str:
    """A name from the user's data, harmless in a table."""
    return visible(" ".join(name.split()))


def ratio(value: float | None) -> str:
    """A speed against another one."""
    return "–" if value is None else f"{value:.2f}×"


def table(first: str, *others: str) -> Table:
    """A table with its first column to the left and figures to the right."""
    result = Table(box=SIMPLE, caption_justify="left", caption_style="dim", pad_edge=False)
    result.add_column(first)
    for heading in others:
        result.add_column(heading, justify="right")
    return result
