"""How a rank ends when another one is gone: one line, and at once."""

from __future__ import annotations

import os
import threading
from typing import NoReturn

_ending = threading.Lock()


def say(line: str) -> None:
    """Write a line to standard error, whether this rank prints or not."""
    os.write(2, f"{' '.join(line.split())}\n".encode(errors="replace"))


def end_with(line: str, status: int = 1) -> NoReturn:
    """Say why, and end the process from any thread.

    The main thread may be waiting inside MLX for a rank that will never answer, where no
    exception reaches it. Several threads may find the same rank gone: one of them says so.
    """
    _ending.acquire()
    say(line)
    os._exit(status)
