"""Runs another Python program in this process, in place of the command line."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import TracebackType

import click

from ..compat.augmentation import augment
from .outcome import INTERRUPTED


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script, or a directory or an archive with a ``__main__.py``, as ``python`` does.

    Exits with status 1 after one line if there is no such file, otherwise as the program does.

    Raises:
        OSError: it cannot be read.
    """
    if not os.path.exists(path):
        raise click.ClickException(f"{path}: no such script; a module is run with -m")
    if not os.path.isdir(path):
        open(path, "rb").close()
    elif PathFinder.find_spec("__main__", [path]) is None:
        raise click.ClickException(f"{path}: a directory without __main__.py; name a script")
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    _run(lambda: runpy.run_path(path, run_name="__main__"))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module, or a package's ``__main__``, as ``python -m`` does.

    Exits with status 1 after one line if there is no such module, otherwise as the program does.
    """
    if name == "mlx_lm.generate":
        # Run as __main__ it would call its own functions, not those that speculate.
        name, arguments = "mlx_lm", ["generate", *arguments]
    sys.path[0] = os.getcwd()
    if not _is_there(name):
        raise click.ClickException(f"{name}: no such module; a script is run without -m")
    sys.argv = [name, *arguments]
    _run(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # not even the package that it should be in, or no name
        return False


def _run(program: Callable[[], object]) -> None:
    """Run it with speculation; what ends it ends this process as it would end the program's."""
    with augment():
        try:
            program()
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except Exception as error:
            # click would take some of them for its own.
            shown = error.with_traceback(_from_program(error.__traceback__))
            sys.excepthook(type(shown), shown, shown.__traceback__)
            sys.exit(1)


def _from_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without what runs the program."""
    while traceback and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback
