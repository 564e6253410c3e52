"""Rendering a page, and writing it so that nothing half-written is left behind."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import OptionError


def render(template: str, **values: Any) -> str:
    """Fill a template; every value is escaped.

    Args:
        template: a file of ``templates/``.
        values: what the template shows.
    """
    return _environment().get_template(template).render(**values)


def check_writable(path: Path, option: str) -> None:
    """Find out that a page cannot be written before the work for it begins.

    Raises:
        OptionError: naming the option that gave the path.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OptionError(f"{option} {path} cannot be written: name a file in a directory of yours")


def write_page(path: Path, html: str) -> None:
    """Write a page; a file of that name is replaced as a whole.

    Raises:
        OptionError: it cannot be written; what was there before is as it was.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(html)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OptionError(
                f"{path} cannot be written ({error.strerror}): name a file in a directory with room"
            ) from error
        raise


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
