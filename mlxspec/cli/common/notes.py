"""Notes on standard error, and the end of a command: an error in one line, and an exit status."""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from typing import NoReturn, TextIO, cast

import click
from click.exceptions import NoSuchCommand

from ...errors import MlxspecError, OptionError, shortened
from ...process import INTERRUPTED
from ...terminal import one_line

_QUIET = f"{__name__}.quiet"
_SHORT = 40  # characters; shorter prompts are repeated in messages


def silence_notes() -> None:
    """Print no notes until the running command ends."""
    click.get_current_context().meta[_QUIET] = True


def note(message: object) -> None:
    """Print a note on one line of standard error."""
    context = click.get_current_context(silent=True)
    if context and context.meta.get(_QUIET):
        return
    _write(f"Note: {in_one_line(message)}")


@contextmanager
def dispensable() -> Iterator[None]:
    """Run the body; if it cannot write to standard error, drop all further output there."""
    try:
        yield
    except OSError:  # such as a full disk, which is no reason to lose the answer
        _discard(sys.stderr)


def _write(line: str) -> None:
    with dispensable():
        click.echo(line, err=True)


def say(message: object) -> None:
    """Print one line on standard output."""
    click.echo(one_line(message))


@contextmanager
def reported() -> Iterator[None]:
    """Run a command's body: print errors and warnings as lines, and exit at an interrupt.

    When the reader of its output closes the pipe (``| head -1``), the command ends quietly with
    status 0.
    """
    if sys.stdout is None:  # closed by the shell: `>&-`
        _fail("standard output is closed: send it to a file, or to /dev/null")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    hush_transformers()
    write_plainly()
    with _errors_in_one_line(), _warnings_as_notes():
        yield
        sys.stdout.flush()


def hush_transformers() -> None:
    """Silence two messages of transformers: to install PyTorch, and that a text is too long.

    This works only before transformers is imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def run_command(command: click.Command, name: str) -> None:
    """Run a command as the whole process and exit; wrong usage prints one line, with status 2.

    Args:
        command: the command; errors outside :func:`reported` end in one line as well.
        name: what the user calls it.
    """
    with _errors_in_one_line():
        try:
            sys.exit(command.main(prog_name=name, standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())  # asked for, as with --help
            sys.exit(0)
        except click.UsageError as error:
            hint = f" ({error.ctx.command_path} --help)" if error.ctx else ""
            _fail(_misuse(error) + hint, error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort:  # click has already ended the line
            _write("Interrupted.")
            sys.exit(INTERRUPTED)


def _misuse(error: click.UsageError) -> str:
    """What is wrong with the arguments; for a mistyped option or command, the nearest one."""
    if isinstance(error, click.NoSuchOption):
        unknown, near = f"option {error.option_name}", error.possibilities
    elif isinstance(error, NoSuchCommand) and error.ctx:
        name, group = error.command_name, cast(click.Group, error.ctx.command)
        if len(name.split()) > 1 and error.ctx.parent is None:  # probably a prompt
            prompt = shlex.quote(name) if len(name) < _SHORT else '"..."'
            return f"unknown command {name!r}: to use it as a prompt, run mlxspec generate {prompt}"
        unknown, near = f"command {name!r}", get_close_matches(name, group.list_commands(error.ctx))
    else:
        return error.format_message().rstrip(".")
    return f"unknown {unknown}" + (f": did you mean {near[0]}?" if near else "")


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Exit with one line if the input is at fault."""
    try:
        yield
    except MlxspecError as error:
        _fail(in_option_names(str(error)) if isinstance(error, OptionError) else error)
    except KeyboardInterrupt:
        _write("\nInterrupted.")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        sys.exit(0)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            _discard_output()
            _fail("no space is left for the output: send it elsewhere")
        _fail(_complaint(error))


def _complaint(error: OSError) -> str:
    """The message for a file that cannot be read, written or found.

    Raises:
        OSError: the error names no file, so it is shown with its traceback.
    """
    if isinstance(error.filename, str):
        return f"{error.filename}: {error.strerror}; name another one"
    if error.errno == errno.ENOENT:  # raised by os.getcwd()
        return "the working directory is gone: change to another one"
    raise error


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Show mlxspec's warnings and log records as notes, and others only with ``python -W``."""
    log, handler = logging.getLogger("mlxspec"), _LoggedNotes(logging.WARNING)
    log.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
                # UserWarning only: when the garbage collector finds an open socket, Python blames
                # whichever line is running.
                warnings.filterwarnings("always", category=UserWarning, module=r"mlxspec(\.|$)")
            warnings.showwarning = lambda message, *_: note(message)
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


def _discard_output() -> None:
    """Drop output that cannot be written; otherwise Python complains about it at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def in_option_names(message: str) -> str:
    """Write ``top_k`` in an API's error as ``--top-k``, for all options of the running command.

    A name of a single word is replaced only at the beginning of the message.
    """
    context = click.get_current_context(silent=True)
    for option in context.command.params if context else ():
        if isinstance(option, click.Option) and option.name:
            spelled = next((name for name in option.opts if name.startswith("--")), None)
            place = rf"(?<![\w./'-]){option.name}(?![\w./'-])"
            if "_" not in option.name:
                place = rf"^{option.name}(?= is | holds )"
            message = re.sub(place, spelled or option.name, message)
    return message


def write_plainly() -> None:
    """Make the standard streams replace characters that they cannot encode, instead of failing.

    Standard error gets Python's escapes, which keep file names readable.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
