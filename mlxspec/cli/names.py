"""Types of options and arguments that name a file, a directory or a model."""

from __future__ import annotations

import os
from pathlib import Path

import click


class _Name(click.Path):
    """A name, which is not empty: as a path that would be the working directory."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        if value == "" and param is not None:
            label = (
                param.opts[0]
                if isinstance(param, click.Option)
                else param.human_readable_name.rstrip(".")
            )
            raise click.UsageError(f"{label} is empty: give a name, or leave it out", ctx)
        return super().convert(value, param, ctx)


# What cannot be read is told by what reads it.
NAME = _Name(readable=False)
"""A model, a file or a directory, as the text that it is."""
FILE = _Name(readable=False, path_type=Path)
"""A file, as a path."""
FORCE_HELP = "Let the report replace whatever file is there, not only an older report."
"""What --force does where an option writes a report."""
