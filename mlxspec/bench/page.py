"""Pages, and what is drawn in them: bars and lines of speeds, and trees."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import OptionError
from ..files import SHARED, check_writable, replaced

_HEADROOM = 1.05
_LEAST_SPAN = 0.1  # of the speeds of a line chart, so that noise looks like noise
_MOST_LABELS = 8  # below a line; more would touch each other


@dataclass(frozen=True)
class Bar:
    """One speed.

    Attributes:
        label: what the bar stands for.
        value: the speed, 1 for plain decoding; None where there is none to show.
        ticks: the speeds that it sums up.
        missing: what to write where there is no value.
        unreachable: no decoder can have this speed; it is drawn beside those that compete.
    """

    label: str
    value: float | None
    ticks: Sequence[float] = ()
    missing: str = "–"
    unreachable: bool = False


@dataclass(frozen=True)
class BarChart:
    """Groups of bars on one scale; ``templates/bars.html`` draws them.

    Attributes:
        groups: what is drawn, by title.
        slow_below: the speed below which a bar is drawn as slower than plain decoding.
    """

    groups: Mapping[str, Sequence[Bar]]
    slow_below: float

    def percent(self, value: float) -> float:
        """Where a speed stands on the scale, from 0 on the left to 100 on the right."""
        bars = [bar for group in self.groups.values() for bar in group]
        values = [speed for bar in bars for speed in (bar.value, *bar.ticks) if speed is not None]
        return round(100 * value / (max([1.0, *values]) * _HEADROOM), 2)

    @staticmethod
    def best(bars: Sequence[Bar]) -> float:
        """The highest speed of a group, the unreachable left out."""
        return max((bar.value or 0.0 for bar in bars if not bar.unreachable), default=0.0)


@dataclass(frozen=True)
class Line:
    """Speeds at the places of a chart.

    Attributes:
        values: the speeds, the first of which the others are compared with.
        marked: the index of the one that stands out.
    """

    values: Sequence[float]
    marked: int


@dataclass(frozen=True)
class LineChart:
    """Lines over the same places, each in a panel of its own; ``templates/lines.html`` draws it.

    All panels have one scale: equal heights are equal differences. Each begins at its line's
    lowest value, since a small gain is not seen from 0.

    Attributes:
        labels: of the places, which are evenly spaced.
        lines: by title.
    """

    labels: Sequence[str]
    lines: Mapping[str, Line]

    def across(self, index: int) -> float:
        """Where a place is, from 0 on the left to 1 on the right."""
        return index / (len(self.labels) - 1) if len(self.labels) > 1 else 0.5

    def upwards(self, line: Line, value: float) -> float:
        """Where a value of a line stands in its panel, from 0 at the bottom to 1 at the top."""
        spans = (max(each.values) - min(each.values) for each in self.lines.values())
        return (value - min(line.values)) / max(_LEAST_SPAN, *spans)

    def labelled(self, index: int) -> bool:
        """Whether a place has its label: all have, unless they are too many; the last has."""
        last = len(self.labels) - 1
        return (last - index) % math.ceil(len(self.labels) / _MOST_LABELS) == 0


# Pixels; a letter's width is that of 13-pixel monospace fonts.
_LETTER, _PADDING, _GAP = 7.9, 16, 20
_CHIP_HEIGHT, _ROW_HEIGHT, _WORD_HEIGHT, _HEAD_HEIGHT = 22, 28, 12, 26


@dataclass(frozen=True)
class TreeNode:
    """A node to draw.

    Attributes:
        parent: the index of its parent, which stands before it; -1 for the root.
        label: the text in its chip.
        letters: how wide the label is.
        kind: the CSS class that says how it looks.
        above: a word above the chip.
        after: a text behind the chip, where the node has no children.
        title: what a pointer over the chip shows.
    """

    parent: int
    label: str
    letters: int
    kind: str
    above: str = ""
    after: str = ""
    title: str = ""


@dataclass(frozen=True)
class Chip:
    """A node in its place; x and y are the middle of its left side, in pixels."""

    node: TreeNode
    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        return self.x + self.width


class TreeDrawing:
    """A tree whose depth grows to the right: nodes of one depth stand below each other.

    A node's first child continues its row and the others get rows of their own below, so no
    lines cross.

    Args:
        nodes: in pre-order: a node's first child follows it, then that child's descendants.

    Attributes:
        columns: per depth, the x where its chips begin.
        chips: the nodes in their places.
        width, height: of the whole.
    """

    chip_height = _CHIP_HEIGHT

    def __init__(self, nodes: Sequence[TreeNode]) -> None:
        depths, rows = [0], [0]
        for index, node in enumerate(nodes[1:], start=1):
            depths.append(depths[node.parent] + 1)
            rows.append(rows[-1] if node.parent == index - 1 else rows[-1] + 1)
        widths = [_LETTER * node.letters + _PADDING for node in nodes]
        self.columns = [2.0]
        for depth in range(max(depths)):
            widest = max(width for at, width in zip(depths, widths, strict=True) if at == depth)
            self.columns.append(self.columns[-1] + widest + _GAP)
        worded = {row for node, row in zip(nodes, rows, strict=True) if node.above}
        middles = [_HEAD_HEIGHT + _ROW_HEIGHT / 2 + _WORD_HEIGHT * (0 in worded)]
        for row in range(1, rows[-1] + 1):
            middles.append(middles[-1] + _ROW_HEIGHT + _WORD_HEIGHT * (row in worded))
        self.chips = [
            Chip(node, self.columns[depth], middles[row], width)
            for node, depth, row, width in zip(nodes, depths, rows, widths, strict=True)
        ]
        self.height = middles[-1] + _ROW_HEIGHT / 2
        self.width = max(
            chip.right + _GAP + _LETTER * (len(chip.node.after) + 1) for chip in self.chips
        )

    @property
    def edges(self) -> list[tuple[Chip, str]]:
        """Per child its chip and the path that leads to it, as SVG has it; the first is below."""
        return [
            (chip, _path(self.chips[chip.node.parent], chip))
            for chip in sorted(self.chips, key=lambda chip: -chip.y)
            if chip.node.parent >= 0
        ]


def _path(parent: Chip, child: Chip) -> str:
    """Straight on, or down from behind the parent and then to the right."""
    if parent.y == child.y:
        return f"M{parent.right:.1f} {parent.y:.1f}H{child.x:.1f}"
    turn = child.x - _GAP / 2
    return f"M{parent.right:.1f} {parent.y:.1f}H{turn:.1f}V{child.y - 5:.1f}q0 5 5 5H{child.x:.1f}"


# What the beginning of a report has, and of nothing else: a page, an SVG and a PNG.
_MARKS = (
    b'<meta name="generator" content="mlxspec">',
    b"<dc:title>mlxspec</dc:title>",
    b"tEXtSoftware\0mlxspec",
)
_BEGINNING = 1024  # bytes in which the mark stands


def render(template: str, **values: Any) -> str:
    """Fill a template; every value is escaped.

    Args:
        template: a file of ``templates/``.
        values: what the template shows.
    """
    return _environment().get_template(template).render(**values)


def check_report(path: Path, option: str, *, force: bool) -> None:
    """Check that a report can be written, before the work for it begins.

    Args:
        path: the file. An older report there, page or picture, makes room for the new one.
        option: that gave the path, for errors.
        force: replace whatever regular file is there.

    Raises:
        OptionError: ``path`` cannot be written, or holds something else.
    """
    is_file = path.is_file() and not path.is_symlink()
    if not is_file and not path.is_dir() and os.path.lexists(path):
        raise OptionError(f"{option} {path}: is a link, a pipe or a device; name a regular file")
    try:
        check_writable(path, OptionError)
    except OptionError as error:
        raise OptionError(f"{option} {error}") from error
    if is_file and not force and not _is_report(path):
        raise OptionError(
            f"{option} {path}: exists and is no report of mlxspec; name another file, or replace "
            "it with --force"
        )


def write_report(path: Path, content: str | bytes, option: str, *, force: bool) -> None:
    """Write a page or a picture, whole or not at all; the arguments are :func:`check_report`'s.

    Raises:
        OptionError: it cannot be written; what was there before is unchanged.
    """
    check_report(path, option, force=force)
    if isinstance(content, str):
        content = content.encode(errors="replace")  # names of files may be no UTF-8
    with replaced(path, OptionError, SHARED) as file:
        file.write(content)


def _is_report(path: Path) -> bool:
    """Whether a file is a report, or empty."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING)
    except OSError:
        return False
    return not beginning or any(mark in beginning for mark in _MARKS)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"speed": _speed, "share": _share}
    return environment


def _speed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}×"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
