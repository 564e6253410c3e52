"""``mlxspec run``: runs a Python program unchanged, with speculation in mlx-lm's functions."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec

import click

from ..process import INTERRUPTED
from .common.options import NO_SAVED_ANSWERS, command, option
from .memory import Memories


# The program's warnings and errors must stay as they are, so this is a plain click command.
@command(
    "run",
    short_help="Run a program that uses mlx-lm, with speculation.",
    cls=click.Command,
    options_metavar=f"[{NO_SAVED_ANSWERS[0]}] [-m]",
    context_settings={"allow_interspersed_args": False},
)
@option("-m", "PROGRAM is a module, as with python -m.", "is_module")
@option(*NO_SAVED_ANSWERS)
@click.argument("program", help="A script, or a directory with __main__.py.")
@click.argument("arguments", help="The program's arguments.", nargs=-1, type=click.UNPROCESSED)
def run_command(
    is_module: bool, no_saved_answers: bool, program: str, arguments: tuple[str, ...]
) -> None:
    """Run a Python program that generates with mlx-lm, with speculation.

    Arguments, exit status and output of the program stay the same.

    \b
    Examples:
      mlxspec run -m mlx_lm.chat --model mlx-community/Qwen3-4B-4bit
      mlxspec run -m mlx_lm generate --prompt "How tall is Mt Everest?"
      mlxspec run my_script.py --its-own-option

    mlx_lm.server puts most requests into batches of its own, which run without speculation.
    """
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(program))
    if not (_has_module(program) if is_module else _is_script(program)):
        kind, other = ("module", "script") if is_module else ("script", "module")
        hint = "leave out -m" if is_module else "add -m"
        raise click.ClickException(f"{program}: no such {kind}; to run a {other}, {hint}")
    if is_module and program == "mlx_lm.generate":
        # As __main__, mlx_lm.generate would call its own functions instead of those that speculate.
        program, arguments = "mlx_lm", ("generate", *arguments)
    sys.argv = [program, *arguments]
    from ..compat import augment, remembering

    with (
        Memories(not no_saved_answers) as memories,
        augment(),
        remembering(memories.of, memories.keeps),
    ):
        try:
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except Exception as error:
            # Show the traceback here, since click would treat some exceptions as its own.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.exit(1)


def _is_script(path: str) -> bool:
    return os.path.exists(os.path.join(path, "__main__.py") if os.path.isdir(path) else path)


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # its package does not exist, or the name is invalid
        return False
