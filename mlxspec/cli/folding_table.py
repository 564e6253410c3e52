"""A table that turns into blocks of lines where the window is too narrow for it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000


class FoldingTable:
    """Rows of a name and figures.

    A table with the name to the left and the figures to the right, its headings broken into
    lines if need be. Where cells would have to be broken, too, it is a block for each row: its
    name, and a line for each figure.

    Args:
        heading: of the names.
        others: of the figures.
        caption: what stands below.
    """

    def __init__(self, heading: str, *others: str, caption: str = "") -> None:
        self._headings = (heading, *others)
        self._rows: list[tuple[str, ...]] = []
        self._caption = caption

    def add_row(self, *cells: str) -> None:
        """Add a name and as many figures as there are headings for."""
        self._rows.append(cells)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        unlimited = options.update(max_width=_ANY_WIDTH)
        for separator in (" ", "\n"):
            table = self._table(separator)
            if Measurement.get(console, unlimited, table).maximum <= options.max_width:
                yield table
                break
        else:
            yield from self._blocks()
        if self._caption:
            yield Text(f"{self._caption}\n", style="dim")

    def _table(self, separator: str) -> Table:
        """With ``separator`` between the words of its headings."""
        table = Table(box=SIMPLE, pad_edge=False)
        for column, heading in enumerate(self._headings):
            words = heading.replace(" ", separator)
            table.add_column(words, justify="right" if column else "left")
        for row in self._rows:
            table.add_row(*row)
        return table

    def _blocks(self) -> Iterator[RenderableType]:
        labels = self._headings[1:]
        widest = max((len(cell) for row in self._rows for cell in row[1:]), default=0)
        for name, *figures in self._rows:
            yield Text(name, style="bold")
            # All blocks are of one width, so that figures stand below each other.
            grid = Table.grid(padding=(0, 2))
            grid.add_column(min_width=max(map(len, labels), default=0))
            grid.add_column(min_width=widest, justify="right")
            for label, figure in zip(labels, figures, strict=True):
                grid.add_row(label, figure)
            yield Padding(grid, (0, 0, 1, 2))
