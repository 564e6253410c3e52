"""The standard streams as rich consoles."""

from __future__ import annotations

import os
import sys

from rich.console import Console

from ..terminal import wants_color

_UNLIMITED = 10_000  # columns


class _OutputConsole(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to :func:`.outcome.reported`, whatever writes to the pipe."""
        raise BrokenPipeError


def output_console(color: bool | None = None) -> Console:
    """Standard output; ``color`` as in :func:`mlxspec.terminal.wants_color`.

    As wide as the terminal, or as COLUMNS says; in a file or pipe without limit, so that a line
    stays a line for whatever reads it.
    """
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    in_color = wants_color(sys.stdout, color)
    return _OutputConsole(
        force_terminal=in_color or None,  # colours that are asked for go into a pipe, too
        width=None if limited else _UNLIMITED,
        no_color=not in_color,
        color_system="256" if in_color else None,  # None leaves out bold and dim, too
        highlight=False,
        markup=False,
        emoji=False,
    )


def error_console(color: bool | None) -> Console:
    """Standard error; ``color`` as in :func:`mlxspec.terminal.wants_color`."""
    in_color = wants_color(sys.stderr, color)
    return Console(
        stderr=True,
        no_color=not in_color,
        color_system="256" if in_color else None,
        force_terminal=sys.stderr.isatty() or in_color,
        highlight=False,
        markup=False,
        emoji=False,
    )
