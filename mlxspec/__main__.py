"""Entry point of ``mlxspec`` and ``python -m mlxspec``: imports a command and runs it.

The import takes a while. Without this module, Ctrl-C during the import would print a traceback.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module

from .distributed.launch import silence_followers
from .process import INTERRUPTED, open_standard_streams


def main() -> None:
    """The ``mlxspec`` command."""
    run("mlxspec.cli.main", "main", "mlxspec")


def run(module: str, command: str, name: str) -> None:
    """Import a click command and run it.

    Ctrl-C during the import prints one line, and exits with status 130.

    Args:
        name: the command's name on the command line.
    """
    open_standard_streams()
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not if SIGINT is ignored, as under nohup
        signal.signal(signal.SIGINT, _quit)
    silence_followers()  # if mlx.launch has started several ranks
    start = getattr(import_module(module), command)
    run_command = import_module("mlxspec.cli.common.notes").run_command
    signal.signal(signal.SIGINT, usual)
    run_command(start, name)


def _quit(*_: object) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
