"""The end of threads that have run a model, just before the end of the process."""

from __future__ import annotations

import atexit
import threading
import time

_LONG_ENOUGH = 0.05  # seconds; a millisecond does it on an idle machine

_awaited = False


def await_at_exit() -> None:
    """Let the process, when it ends, wait until this thread has ended altogether.

    MLX frees what a thread has compiled when Python takes the thread for ended already, and
    needs the interpreter's lock for it. Up to Python 3.12 an interpreter that is ending refuses
    the lock, and the process is aborted ("terminate called without an active exception").
    """
    global _awaited
    if not _awaited and threading.current_thread() is not threading.main_thread():
        _awaited = True
        atexit.register(time.sleep, _LONG_ENOUGH)  # without the lock
