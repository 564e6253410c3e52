"""The rank, output, end and signals of a process that ``mlx.launch`` has started.

Importing this module does not import MLX.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ..terminal import one_line


def launched_rank() -> int | None:
    """The rank that ``mlx.launch`` gave this process; None without ``mlx.launch``."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdecimal() else None


def silence_followers() -> None:
    """Silence the standard streams of all ranks except 0; they write only with :func:`end_with`."""
    if launched_rank():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def end_with(line: str) -> NoReturn:
    """Write a line to standard error and end the process, from any thread of any rank.

    An exception would not reach the main thread while it waits inside MLX for a rank that will
    never answer.
    """
    os.write(2, f"{one_line(line)}\n".encode(errors="replace"))
    os._exit(1)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt until the block has ended.

    Otherwise the followers would wait for ever for a forward that the leader announced but did not
    run. Python interrupts only the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        if usual is not None:  # None if a generation is collected at the interpreter's exit
            signal.signal(signal.SIGINT, usual)
        if held:
            signal.raise_signal(signal.SIGINT)
