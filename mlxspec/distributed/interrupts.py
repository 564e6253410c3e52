"""Keeping Ctrl-C out of what all ranks must do together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold an interrupt back until the block has ended.

    A forward that the followers were told and the leader then does not run would have them wait
    for it for ever. Threads other than the main one are never interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        if usual is not None:  # as when the interpreter shuts down and collects a generation
            signal.signal(signal.SIGINT, usual)
        if held:
            signal.raise_signal(signal.SIGINT)
