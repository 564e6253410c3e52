"""The process that ``mlx.launch`` has started lets another one do the work, and watches over it.

MLX crashes now and then when a rank dies while others wait for it, and a process that crashes, or
is killed, says nothing. Its supervisor does, which has no MLX in it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from .ending import end_with
from .launch import launched_rank

_DESCRIPTOR = "MLXSPEC_SUPERVISOR"
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def supervisor_descriptor() -> int | None:
    """What a worker reads the end of a file from when its supervisor is gone; None without one."""
    descriptor = os.environ.get(_DESCRIPTOR)
    return int(descriptor) if descriptor else None


def supervise() -> None:
    """Run this process's command in a worker and end as it ends; in the worker, do nothing."""
    if supervisor_descriptor() is not None:
        return
    alive, held = os.pipe()
    # Ctrl-C reaches the worker as well. What it means rank 0 says; in the other ranks' workers it
    # stays ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN if launched_rank() else lambda *_: None)
    worker = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        env={**os.environ, _DESCRIPTOR: str(alive)},
        pass_fds=[alive],
    )
    os.close(alive)
    signal.signal(signal.SIGTERM, lambda *_: worker.terminate())
    status = worker.wait()
    os.close(held)
    if status >= 0:
        os._exit(status)
    death = signal.Signals(-status)
    reason = ", as MLX can be when another rank is gone" if death in _CRASHES else ""
    end_with(f"Error: rank {launched_rank()} was ended by {death.name}{reason}", 128 - status)
