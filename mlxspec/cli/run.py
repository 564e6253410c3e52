"""``mlxspec run``: runs a Python program unchanged, with speculation in mlx-lm's functions."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import takewhile
from types import TracebackType
from typing import Any

import click

from ..process import INTERRUPTED
from .common.options import NO_MEMORY, NO_MEMORY_HELP, Command, argument, command, option
from .memory import Memories


class ProgramCommand(Command):
    """A command that passes everything after the program's name on to the program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Like ``python``: all options after ``-m MODULE`` belong to the module."""
        own = [*takewhile(lambda arg: arg == NO_MEMORY, args)]
        args = args[len(own) :]
        if args[:1] == ["-m"] and len(args) > 1:
            args = [*args[:2], "--", *args[2:]]
        elif args and args[0].startswith("-m") and args[0] != "-m":
            args = ["-m", args[0][2:], "--", *args[1:]]
        return super().parse_args(ctx, [*own, *args])

    def invoke(self, ctx: click.Context) -> Any:
        """Like click's: warnings and errors of the program are its own."""
        return click.Command.invoke(self, ctx)


@command(
    "run",
    short_help="Run a program that uses mlx-lm, with speculation.",
    cls=ProgramCommand,
    options_metavar=f"[{NO_MEMORY}] [-m MODULE | SCRIPT]",
    context_settings={"allow_interspersed_args": False},
)
@option("-m MODULE", "Run a module instead of a script.", "module")
@option(NO_MEMORY, NO_MEMORY_HELP)
@argument("arguments", "The program's arguments.", nargs=-1, type=click.UNPROCESSED)
def run_command(module: str | None, no_memory: bool, arguments: tuple[str, ...]) -> None:
    """Run a Python program that generates with mlx-lm, with speculation.

    Arguments, exit status and output of the program stay the same.

    \b
    Examples:
      mlxspec run -m mlx_lm.chat --model mlx-community/Qwen3-4B-4bit
      mlxspec run -m mlx_lm generate --prompt "How tall is Mt Everest?"
      mlxspec run my_script.py --its-own-option

    mlx_lm.server batches most requests itself, and generates these without speculation.
    """
    if module is None and not arguments:
        raise click.UsageError("name a script, or a module with -m")
    program = _module(module, arguments) if module else _script(arguments[0], arguments[1:])
    from ..compat import augment, remembering

    with Memories(not no_memory) as memories, augment(), remembering(memories.of):
        try:
            program()
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except Exception as error:
            # Shown here, since click would handle some of these exceptions as its own.
            shown = error.with_traceback(_from_program(error.__traceback__))
            sys.excepthook(type(shown), shown, shown.__traceback__)
            sys.exit(1)


def _script(path: str, arguments: Sequence[str]) -> Callable[[], object]:
    """Prepare to run a script, or a directory or archive with ``__main__.py``, as ``python`` does.

    Raises:
        click.ClickException: there is no such script.
        OSError: it cannot be read.
    """
    if not os.path.exists(path):
        raise click.ClickException(f"{path}: no such script; to run a module, use -m")
    if not os.path.isdir(path):
        open(path, "rb").close()
    elif PathFinder.find_spec("__main__", [path]) is None:
        raise click.ClickException(f"{path}: a directory without __main__.py; name a script")
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    return partial(runpy.run_path, path, run_name="__main__")


def _module(name: str, arguments: Sequence[str]) -> Callable[[], object]:
    """Prepare to run a module, or a package's ``__main__``, as ``python -m`` does.

    Raises:
        click.ClickException: there is no such module.
    """
    if name == "mlx_lm.generate":
        # Run as __main__, it would call its own functions instead of those that speculate.
        name, arguments = "mlx_lm", ["generate", *arguments]
    sys.path[0] = os.getcwd()
    try:
        found = find_spec(name)
    except (ImportError, ValueError):  # its package does not exist, or the name is invalid
        found = None
    if found is None:
        raise click.ClickException(f"{name}: no such module; to run a script, leave out -m")
    sys.argv = [name, *arguments]
    return partial(runpy.run_module, name, run_name="__main__", alter_sys=True)


def _from_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that run the program."""
    while traceback and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback
