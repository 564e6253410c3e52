"""A cost curve for the eye: a table and a plot in the terminal, and a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import OptionError

if TYPE_CHECKING:
    from ..drafting.costs import KnownTime


@dataclass(frozen=True)
class CostPoint:
    """T(rows) and what follows from it.

    Attributes:
        rows: rows of a step.
        seconds: its wall time.
        cost: T(rows)/T(1).
        error: half the width of the cost's 95 % confidence interval, relative to the cost.
    """

    rows: int
    seconds: float
    cost: float
    error: float

    @property
    def seconds_per_row(self) -> float:
        return self.seconds / self.rows


def cost_points(times: Sequence[KnownTime]) -> list[CostPoint]:
    """The curve of step times, that of one row first."""
    from ..drafting.measurement import cost_errors

    return [
        CostPoint(time.rows, time.seconds, time.seconds / times[0].seconds, error)
        for time, error in zip(times, cost_errors(times), strict=True)
    ]


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
            f"{point.error:.0%}" if point.rows > 1 else "–",
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


_MEASURED = "measured, with 95 % confidence intervals"
_BLUE = "#0072b2"  # with grey beside it told apart with every kind of colour blindness


def check_picture(option: str, path: Path, *, force: bool) -> None:
    """Find out before a measurement whether its picture can be drawn and written.

    Raises:
        OptionError: matplotlib is not there, or ``path`` cannot be written.
    """
    from ..bench.page import check_report

    if find_spec("matplotlib") is None:
        raise OptionError(f"{option} needs matplotlib: pip install 'mlxspec[plots]'")
    check_report(path, option, force=force)


def drawn_curve(kind: str, points: Sequence[CostPoint], title: str, about: Sequence[str]) -> bytes:
    """Draw a curve.

    Args:
        kind: "png" or "svg".
        points: the curve.
        title: which model was measured.
        about: lines on what it is, and where and how it was measured.

    Returns:
        The file's content.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text in an SVG, and one measurement gives one file, byte for byte.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mlxspec"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        rows = [point.rows for point in points]
        costs = [point.cost for point in points]
        errors = [point.cost * point.error for point in points]
        top = max(cost + error for cost, error in zip(costs, errors, strict=True)) * 1.1
        axes.plot([1, top], [1, top], ":", color="0.5", label="T(M) = M: drafts cannot pay")
        axes.errorbar(
            rows, costs, errors, fmt="o-", markersize=3.5, color=_BLUE, capsize=2, label=_MEASURED
        )
        axes.set_xlim(0, rows[-1] * 1.04)
        axes.set_ylim(0, top)
        axes.set_xlabel("rows M of a step: the current token and M − 1 draft tokens")
        axes.set_ylabel("T(M) / T(1): tokens a step must emit to pay")
        # A dollar sign in a name would start mathematics.
        axes.set_title(title, loc="left", fontsize=12, pad=9 + 11 * len(about), parse_math=False)
        axes.annotate(
            "\n".join(about),
            xy=(0, 1),
            xycoords="axes fraction",
            xytext=(0, 6),
            textcoords="offset points",
            fontsize=8,
            color="0.35",
            parse_math=False,
        )
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        # By its maker a report is told from other files; without a date it is the same again.
        made_by = {"Creator": "mlxspec", "Date": None} if kind == "svg" else {"Software": "mlxspec"}
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=160, metadata=made_by)
        return picture.getvalue()
