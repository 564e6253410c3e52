"""How a command ends: one line for what went wrong, and an exit status that says how."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

import click

from ..errors import MlxspecError
from ..terminal import visible

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


def note(message: object) -> None:
    """Tell the user something, on one line of standard error."""
    click.echo(f"Note: {_one_line(message)}", err=True)


@contextmanager
def reported() -> Iterator[None]:
    """Run a command's body: errors and warnings become lines, an interrupt an exit status.

    A reader that has seen enough and closes the pipe (``| head -1``) ends the command quietly
    and successfully.
    """
    # transformers would advise to install PyTorch, which nothing here needs, and warn of texts
    # beyond a model's context.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if sys.stdout is None:  # closed by the shell: `>&-`
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, TextIOWrapper):
        # A character that the terminal's encoding lacks is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    try:
        with _warnings_as_notes():
            yield
        sys.stdout.flush()
    except MlxspecError as error:
        _fail(error)
    except KeyboardInterrupt:
        click.echo("\nInterrupted.", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        _fail("no space is left where the output goes: send it elsewhere")


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Show mlxspec's own warnings as notes, and others only if Python was asked to (``-W``)."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=r"mlxspec(\.|$)")
        warnings.showwarning = lambda message, *_: note(message)
        yield


def _fail(message: object) -> None:
    click.echo(f"Error: {_one_line(message)}", err=True)
    sys.exit(1)


def _one_line(message: object) -> str:
    return visible(" ".join(str(message).split()))


def _discard_output() -> None:
    """Lead what cannot be written to nowhere, or Python complains about it as it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
