"""The ``mlxspec`` command at a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys


def at_terminal(typed: bytes, *arguments: str, columns: str = "40") -> tuple[int, str]:
    """The exit status, and all that a terminal shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from mlxspec.__main__ import main; main()"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": columns, "TERM": "xterm"},
    )
    os.close(theirs)
    os.write(ours, typed)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux says that nobody writes there any more
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(60), shown.decode()
