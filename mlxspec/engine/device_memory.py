"""How much memory there is for MLX: on a GPU what its driver recommends, else the system's."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

_GROUP = Path("/sys/fs/cgroup")


def whole_memory() -> int:
    """How many bytes models and caches can take when nothing else runs."""
    if mx.default_device().type == mx.gpu:
        return _gpu_memory()
    whole = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if sys.platform == "linux":
        with suppress(OSError, ValueError):  # there is no group, or it is unbounded ("max")
            whole.append(int((_GROUP / "memory.max").read_text()))
    return min(whole)


def free_memory() -> int:
    """How many bytes MLX can still take: on a GPU of what its driver recommends.

    Elsewhere it is what the system, or the control group of this process, has left.
    """
    if mx.default_device().type == mx.gpu:
        return max(0, _gpu_memory() - mx.get_active_memory())
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - mx.get_active_memory()]
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            lines = Path("/proc/meminfo").read_text().splitlines()
            (available,) = (line for line in lines if line.startswith("MemAvailable:"))
            free.append(int(available.split()[1]) * 1024)
        with suppress(OSError, ValueError):  # as above
            most = int((_GROUP / "memory.max").read_text())
            free.append(most - int((_GROUP / "memory.current").read_text()))
    return max(0, min(free))


def _gpu_memory() -> int:
    info = mx.device_info(mx.default_device())
    return int(info.get("max_recommended_working_set_size") or info.get("memory_size") or 0)
