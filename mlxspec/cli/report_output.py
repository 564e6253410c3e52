"""What reports on standard output are made of."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType

from ..terminal import visible
from .consoles import output_console


def print_tables(parts: Iterable[RenderableType]) -> None:
    """Write tables and lines of text to standard output."""
    console = output_console()
    for part in parts:
        console.print(part)


def shown(name: str) -> str:
    """A name from the user's data, harmless in a table."""
    return visible(" ".join(name.split()))


def ratio(value: float | None) -> str:
    """A speed against another one."""
    return "–" if value is None else f"{value:.2f}×"
