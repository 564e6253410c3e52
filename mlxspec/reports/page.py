"""Rendering pages, and writing reports so that nothing is lost to them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import OptionError
from ..files import SHARED, check_writable, replaced

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
    """Find out that a report cannot be written before the work for it begins.

    Args:
        path: the file. An older report there, page or picture, makes room for the new one.
        option: that gave the path, for errors.
        force: replace whatever regular file is there.

    Raises:
        OptionError: ``path`` cannot be written, or is something else's.
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
        OptionError: it cannot be written; what was there before is as it was.
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
