"""How a command ends: one line for what went wrong, and an exit status that says how."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from ..errors import MlxspecError, OptionError, shortened
from ..terminal import one_line
from .option_names import in_option_names
from .plain_characters import write_plainly

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""

_REMEDIES = {
    errno.EACCES: "give yourself the permission, or name another one",
    errno.ENAMETOOLONG: "name one with a shorter name",
    errno.ENOENT: "name one that is there",
}


def note(message: object) -> None:
    """Tell the user something, on one line of standard error."""
    click.echo(f"Note: {_told(message)}", err=True)


def say(message: object) -> None:
    """Tell what has been done, on one line of standard output."""
    click.echo(one_line(message))


@contextmanager
def reported() -> Iterator[None]:
    """Run a command's body: errors and warnings become lines, an interrupt an exit status.

    A reader that has seen enough and closes the pipe (``| head -1``) ends the command quietly
    and successfully.
    """
    if sys.stdout is None:  # closed by the shell: `>&-`
        _fail("standard output is closed: send it to a file, or to /dev/null")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # transformers would advise to install PyTorch, which nothing here needs, and warn of texts
    # beyond a model's context.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    write_plainly()
    with _failures_told(), _warnings_as_notes():
        yield
        sys.stdout.flush()


def run_command(command: click.Command, name: str) -> None:
    """Run a command as a process of its own and exit; a wrong use is one line and status 2.

    Args:
        command: what :func:`reported` did not catch in it ends in one line as well.
        name: what the user calls it.
    """
    with _failures_told():
        try:
            sys.exit(command.main(prog_name=name, standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            hint = f" ({error.ctx.command_path} --help)" if error.ctx else ""
            _fail(error.format_message().rstrip(".") + hint, error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort:  # click has ended the line in which Ctrl-C was pressed
            click.echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)


@contextmanager
def _failures_told() -> Iterator[None]:
    """End the process where its input is at fault, in one line."""
    try:
        yield
    except OptionError as error:
        _fail(in_option_names(str(error)))
    except MlxspecError as error:
        _fail(error)
    except KeyboardInterrupt:
        click.echo("\nInterrupted.", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        sys.exit(0)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_output()
            _fail("no space is left where the output goes: send it elsewhere")
        _fail(_complaint(error))


def _complaint(error: OSError) -> str:
    """What to tell of a file that cannot be read, written or found, and what helps.

    Raises:
        OSError: it names no file, so that it is told with all that is known of it.
    """
    if isinstance(error.filename, str):
        remedy = _REMEDIES.get(error.errno or 0, "name another one")
        return f"{error.filename}: {error.strerror}; {remedy}"
    if error.errno == errno.ENOENT:  # what os.getcwd() raises
        return "the working directory is gone: change to one that is there"
    raise error


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Show mlxspec's own warnings as notes, and others only if Python was asked to (``-W``)."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", module=r"mlxspec(\.|$)")
        warnings.showwarning = lambda message, *_: note(message)
        yield


def _fail(message: object, status: int = 1) -> NoReturn:
    click.echo(f"Error: {_told(message)}", err=True)
    sys.exit(status)


def _told(message: object) -> str:
    return shortened(one_line(message))


def _discard_output() -> None:
    """Lead what cannot be written to nowhere, or Python complains about it as it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
