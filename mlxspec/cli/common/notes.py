"""Notes on standard error, one-line errors, and exit statuses."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from textwrap import fill
from typing import NoReturn

import click

from ...errors import MlxspecError, shortened
from ...process import INTERRUPTED
from ...terminal import columns_of, one_line

_QUIET = f"{__name__}.quiet"


def silence_notes() -> None:
    """Print no notes until the running command ends."""
    click.get_current_context().meta[_QUIET] = True


def note(message: object) -> None:
    """Print a note on one line of standard error."""
    context = click.get_current_context(silent=True)
    if not (context and context.meta.get(_QUIET)):
        _write(f"Note: {in_one_line(message)}")


def _write(line: str) -> None:
    with suppress(OSError):  # such as a full disk, which is no reason to lose the answer
        if sys.stderr.isatty():  # a terminal would break words
            width = columns_of(sys.stderr)
            fit = partial(fill, width=width, break_long_words=False, break_on_hyphens=False)
            line = "\n".join(map(fit, line.split("\n")))
        print(line, file=sys.stderr, flush=True)  # click would write past a progress bar


def say(message: object) -> None:
    """Print one line on standard output."""
    click.echo(one_line(message))


@contextmanager
def reported() -> Iterator[None]:
    """Run a command's body: print errors and warnings as single lines, and exit after Ctrl-C.

    If the reader of the command's output closes the pipe, as in ``| head -1``, the command ends
    quietly with status 0.
    """
    # Set before transformers is imported, which otherwise suggests PyTorch and warns of long texts.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if isinstance(sys.stdout, TextIOWrapper):  # to replace characters that its encoding lacks
        sys.stdout.reconfigure(errors="replace")
    with _ended_by_sigterm(), _errors_in_one_line(), _log_as_notes():
        yield
        sys.stdout.flush()


class _Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM remove half-written files before it ends the process."""

    def unwind(*_: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, usual)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, usual)


def run_command(command: click.Command, name: str) -> None:
    """Run a command as the whole process, then exit; wrong usage prints one line, with status 2.

    Args:
        command: the command; its errors outside :func:`reported` are printed on one line as well.
        name: the command's name on the command line.
    """
    with _errors_in_one_line():
        try:
            sys.exit(command.main(prog_name=name, standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())  # requested, as with --help
            sys.exit(0)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            hint = f" ({context.command_path} --help)" if context else ""
            _fail(error.format_message().rstrip(".") + hint, error.exit_code)
        except click.Abort as error:  # click has printed a newline, but not after its own question
            _write("Interrupted." if error.__cause__ else "\nInterrupted.")
            sys.exit(INTERRUPTED)


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Exit with a one-line error if the input caused it."""
    try:
        yield
    except MlxspecError as error:
        _fail(error)
    except KeyboardInterrupt:
        _write("\nInterrupted.")
        sys.exit(INTERRUPTED)
    except OSError as error:
        if isinstance(error.filename, str):
            _fail(f"{error.filename}: {error.strerror}; name another one")
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Otherwise Python would complain at exit about output that it cannot write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        _fail("no space left for the output: write it elsewhere")


@contextmanager
def _log_as_notes() -> Iterator[None]:
    """Show mlxspec's log records as notes, and warnings only with ``python -W``."""
    log, handler = logging.getLogger("mlxspec"), _LoggedNotes(logging.WARNING)
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        log.removeHandler(handler)


class _LoggedNotes(logging.Handler):
    """Shows log records as notes, and records of exceptions with their tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            _write(self.format(record))
        else:
            note(record.getMessage())


def _fail(message: object, status: int = 1) -> NoReturn:
    _write(f"Error: {in_one_line(message)}")
    sys.exit(status)


def in_one_line(message: object) -> str:
    """Make a message safe to print: on one line, and not too long."""
    return shortened(one_line(message))
