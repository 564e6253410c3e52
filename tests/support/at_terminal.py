"""Run the ``mlxspec`` command at a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys


def at_terminal(typed: bytes, *arguments: str, columns: str = "40") -> tuple[int, str]:
    """Return the exit status and everything that the terminal shows."""
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
        except OSError:  # Linux reports the end of the output this way
            break
        if not part:
            break
        shown += part
    os.close(ours)
    return process.wait(60), shown.decode()
