"""Whether ``mlx.launch`` has started this process; asked before MLX is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


def launched_rank() -> int | None:
    """The rank that ``mlx.launch`` gave this process; None without it, or with one rank only."""
    rank = os.environ.get("MLX_RANK", "")
    return int(rank) if rank.isdecimal() and not _is_alone() else None


def _is_alone() -> bool:
    """Whether this is the only rank: the file of hosts is empty then, and MLX stumbles over it."""
    hosts = Path(os.environ.get("MLX_HOSTFILE") or os.devnull)
    return hosts.is_file() and not hosts.read_bytes().strip()


def let_rank_0_speak() -> None:
    """Lead the standard streams of the other ranks to nowhere.

    What they have to say of themselves goes to the file descriptor; see :func:`.ending.say`.
    """
    if launched_rank():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


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
