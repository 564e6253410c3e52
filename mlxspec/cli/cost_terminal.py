"""A cost curve for the terminal: a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cost_points import CostPoint

_WIDEST_PLOT = 100
_HEIGHT = 16
_ASCII = str.maketrans("┌┐└┘├┤┬┴┼─│·", "+++++++++-|.")


def cost_table(points: Sequence[CostPoint]) -> Table:
    """Rows, milliseconds and costs; fits 40 columns."""
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in ("rows", "ms", "T(M)/T(1)", "ms/row", "±"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            str(point.rows),
            _milliseconds(point.seconds),
            f"{point.cost:.2f}",
            _milliseconds(point.seconds_per_row),
            f"{point.error:.0%}",
        )
    return table


def cost_plot(points: Sequence[CostPoint], console: Console) -> Text:
    """T(M)/T(1) over M, as wide as the terminal up to 100 columns, with T(M) = M in dots.

    Args:
        points: at least two.
        console: where it will be shown; tells width, colours and characters.
    """
    import plotext

    ascii_only = console.options.ascii_only
    rows = [point.rows for point in points]
    costs = [point.cost for point in points]
    top = max(costs) * 1.05
    linear = [row for row in range(1, rows[-1] + 1) if row <= top]
    line = plotext.marker("*" if ascii_only else "braille", pixel="blue+")

    figure = plotext.figure
    figure.clear()
    figure.theme("simple")
    figure.canvas("default")
    plotext.terminal.limit(False, False)
    figure.plot_size(min(console.width, _WIDEST_PLOT), _HEIGHT)
    figure.draw(figure.signal(linear, linear, marker="." if ascii_only else "·"))
    figure.draw(figure.signal(rows, costs, marker=line).lines())
    across, upwards = figure.ruler("x"), figure.ruler("y")
    across.lim(1, rows[-1])
    across.ticks(*_labelled([1, *_ticks(rows[-1], 4)]))
    upwards.lim(0, top)
    upwards.ticks(*_labelled(_ticks(top, 6)))
    figure.title("T(M)/T(1) over M rows; dots: T(M) = M")
    drawn = figure.build().string(console.no_color).rstrip()
    return Text.from_ansi(drawn.translate(_ASCII) if ascii_only else drawn)


def _ticks(end: float, count: int) -> list[int]:
    """At most so many whole numbers above 0, equally far from each other."""
    step = max(1, math.ceil(end / count))
    return list(range(step, int(end) + 1, step))


def _labelled(ticks: list[int]) -> tuple[list[int], list[str]]:
    return ticks, [str(tick) for tick in ticks]


def _milliseconds(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:.2f}" if milliseconds < 1000 else f"{milliseconds:.0f}"
