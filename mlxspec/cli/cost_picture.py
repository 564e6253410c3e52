"""A cost curve as a picture, PNG or SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import OptionError
from ..eval.page import check_report
from .cost_points import CostPoint

_BLUE = "#0072b2"  # with grey beside it told apart with every kind of colour blindness


def check_picture(option: str, path: Path, *, force: bool) -> None:
    """Find out before a measurement whether its picture can be drawn and written.

    Raises:
        OptionError: matplotlib is not there, or ``path`` cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise OptionError(f"{option} needs matplotlib: pip install 'mlxspec[plots]'")
    check_report(path, option, force=force)


def drawn_curve(kind: str, points: Sequence[CostPoint], title: str, subtitle: str) -> bytes:
    """Draw a curve.

    Args:
        kind: "png" or "svg".
        points: the curve.
        title: what was measured.
        subtitle: on what, and how.

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
            rows, costs, errors, fmt="o-", markersize=3.5, color=_BLUE, capsize=2, label="measured"
        )
        axes.set_xlim(0, rows[-1] * 1.04)
        axes.set_ylim(0, top)
        axes.set_xlabel("rows M of a step: the current token and M − 1 draft tokens")
        axes.set_ylabel("T(M) / T(1): tokens a step must emit to pay")
        # A dollar sign in a name would start mathematics.
        axes.set_title(title, loc="left", fontsize=12, pad=20, parse_math=False)
        axes.annotate(
            subtitle,
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
