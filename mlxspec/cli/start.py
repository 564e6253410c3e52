"""Where the command lines start, before a command is imported, since that takes a while.

An interrupt during the import would otherwise end in a traceback.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module

from ..distributed.launch import silence_followers
from ..process import INTERRUPTED, occupy_standard_descriptors


def main() -> None:
    """The ``mlxspec`` command."""
    run("mlxspec.cli.main", "main", "mlxspec")


def run(module: str, command: str, name: str) -> None:
    """Import a click command and run it; Ctrl-C ends the import with one line and status 130.

    Args:
        module: where the command is.
        command: its name there.
        name: what the user calls it.
    """
    occupy_standard_descriptors()
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # and not ignored, as behind nohup
        signal.signal(signal.SIGINT, _quit)
    silence_followers()  # if mlx.launch has started several ranks
    start = getattr(import_module(module), command)
    import_module("mlxspec.cli.settings").apply_mlx_settings()
    run_command = import_module("mlxspec.cli.common.notes").run_command
    signal.signal(signal.SIGINT, usual)
    run_command(start, name)


def _quit(*_: object) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(INTERRUPTED)
