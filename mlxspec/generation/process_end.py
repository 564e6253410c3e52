"""The end of the process while other threads generate."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from types import FrameType

PATIENCE = 10.0  # seconds; a step, or a chunk of a prompt, takes less
THREADS_END = 0.05  # seconds for a thread to end, or to come back from its consumer

_other_threads = False
"""Whether a thread besides the main one has generated."""

_ending: tuple[int, float] | None = None
"""Once the process ends: the thread that ends it, and until when others are held."""


def hold_at_exit() -> None:
    """Hold this thread here once the process ends; called before each step and chunk.

    Up to Python 3.13 an interpreter that ends stops every other thread that asks for its lock. MLX
    cannot be stopped like that: the process would be aborted ("terminate called without an active
    exception"). A thread that waits here does not ask for the lock.
    """
    global _other_threads
    if not _other_threads and threading.current_thread() is not threading.main_thread():
        _other_threads = True
    if _ending and _ending[0] != threading.get_ident():
        # Not for ever: what the program does at its end may be to wait for this thread.
        threading.Event().wait(max(0.0, _ending[1] - time.monotonic()))


@atexit.register
def _hold_threads() -> None:
    """Wait until no other thread generates."""
    global _ending, _other_threads
    until = time.monotonic() + PATIENCE
    _ending = threading.get_ident(), until
    while _others_generate() and time.monotonic() < until:
        _other_threads = True
        time.sleep(0.001)
    if _other_threads:
        time.sleep(THREADS_END)  # without the interpreter's lock


_ROOMS = "mlxspec.compat.", "mlxspec.engine.", "mlxspec.generation."


def _others_generate() -> bool:
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return any(map(_generates, frames.values()))


def _generates(frame: FrameType | None) -> bool:
    """Whether the thread of this frame is in code that may run the model, and is not held."""
    while frame:
        if frame.f_code is hold_at_exit.__code__:
            return False
        if frame.f_globals.get("__name__", "").startswith(_ROOMS):
            return True
        frame = frame.f_back
    return False
