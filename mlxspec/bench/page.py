"""Pages of reports: their templates, their bars of speeds, and where they are written."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Bar:
    """One speed.

    Attributes:
        label: what the bar stands for.
        value: the speed, 1 for plain decoding; None without one.
        ticks: the speeds that it sums up.
        missing: what to write where there is no value.
        unreachable: no decoder can have this speed; it is drawn for comparison only.
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


# What a page and an SVG of ours have near the beginning.
_MARKS = (b'<meta name="generator" content="mlxspec">', b"<!-- mlxspec -->")
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
            f"{option} {path}: exists and is not a report of mlxspec; name another file, or "
            "replace it with --force"
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
