"""Keeps threads that generate from aborting the process when it ends."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from traceback import walk_stack

_PATIENCE = 10.0  # seconds; a step, or a chunk of a prompt, takes less
_THREADS_END = 0.05  # seconds for a thread to end, or to return from its consumer

_other_threads = False
"""Whether a thread other than the main one has generated."""

_ending: tuple[int, float] | None = None
"""While the process ends: the thread that ends it, and the time until which other threads are
blocked.
"""


def hold_at_exit() -> None:
    """Block this thread if the process is ending; called before each step and chunk.

    Up to Python 3.13, a finalizing interpreter stops every other thread that requests its lock. MLX
    cannot be stopped like that: the process would be aborted ("terminate called without an active
    exception"). A blocked thread does not request the lock.
    """
    global _other_threads
    _other_threads |= threading.current_thread() is not threading.main_thread()
    if _ending and _ending[0] != threading.get_ident():
        # Not for ever: the ending program may join this thread.
        threading.Event().wait(max(0.0, _ending[1] - time.monotonic()))


@atexit.register  # after mlx_lm's handlers, so that it runs before them
def hold_other_threads() -> None:
    """Wait until no other thread generates; called when the process ends."""
    global _ending
    _ending = threading.get_ident(), time.monotonic() + _PATIENCE
    while _others_generate() and time.monotonic() < _ending[1]:
        time.sleep(0.001)
    if _other_threads:
        time.sleep(_THREADS_END)  # releases the interpreter's lock


_PACKAGES = "mlxspec.compat", "mlxspec.engine.", "mlxspec.generation."
_LOOP = "mlxspec.generation.asynchronous"  # runs nothing itself, and waits there for commands


def _others_generate() -> bool:
    """Whether another thread is in code that may run the model, and is not blocked."""
    tops = sys._current_frames()
    del tops[threading.get_ident()]
    for top in tops.values():
        stack = [frame for frame, _ in walk_stack(top)]
        names = {frame.f_globals.get("__name__", "") for frame in stack} - {_LOOP}
        is_held = any(frame.f_code is hold_at_exit.__code__ for frame in stack)
        if not is_held and any(name.startswith(_PACKAGES) for name in names):
            return True
    return False
