"""Whether ``mlx.launch`` has started this process; asked before MLX is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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
