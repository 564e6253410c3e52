"""What mlxspec asks of the process that it runs in: its BLAS, descriptors, heap and variables."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def occupy_standard_descriptors() -> None:
    """Open the null device on each of the descriptors 0, 1 and 2 that is closed.

    The next file to be opened would get its number. MLX takes the number 0 for a failure, and
    what is written to standard output or error would end up in the file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(descriptor, True)


ENVIRONMENT_VARIABLE = "MLXSPEC_OPENBLAS"
_PACKAGE, _IN_PACKAGE = "scipy_openblas32", "lib/libopenblas_python.so"
_SYSTEM = ("libopenblas.so.0", "libopenblasp.so.0")

# Cycles, as a power of two, that OpenBLAS's threads spin for more work before they sleep: about
# what waking one takes. By default it is 2^26, many steps long, and through all of them they
# take cores from the thread that builds the next forward.
_SPINNING = "OPENBLAS_THREAD_TIMEOUT"
_SPINNING_CYCLES = "16"


def prefer_openblas() -> None:
    """Load OpenBLAS for MLX's CPU back end on Linux, whose wheel carries the reference BLAS.

    The library is that of the package ``scipy-openblas32``, which mlxspec installs, or else the
    system's. Works only before ``mlx.core`` is first imported; warns when that has happened
    already. ``MLXSPEC_OPENBLAS=0`` turns it off. Does nothing on other systems or back ends.
    """
    if sys.platform != "linux" or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return
    try:
        version("mlx-cpu")
    except PackageNotFoundError:
        return
    libraries = _libraries()
    if _load(libraries, os.RTLD_NOLOAD):
        return  # preloaded by the user, or by an earlier call
    if "mlx.core" not in sys.modules:
        os.environ.setdefault(_SPINNING, _SPINNING_CYCLES)  # read once, while it is loaded
        _load(libraries, ctypes.RTLD_GLOBAL)
    elif _load(libraries, ctypes.RTLD_LOCAL):
        warnings.warn(
            "mlx.core was imported before mlxspec, so its CPU back end runs without OpenBLAS, "
            "up to 8 times slower in float32: import mlxspec first "
            f"(or set {ENVIRONMENT_VARIABLE}=0 to do without it)",
            stacklevel=3,
        )


def _libraries() -> list[str]:
    """OpenBLAS's libraries, the one of the package first: its version is the one we test with."""
    package = find_spec(_PACKAGE)
    places = package.submodule_search_locations if package else None
    return [*(os.path.join(place, _IN_PACKAGE) for place in places or ()), *_SYSTEM]


def _load(libraries: Sequence[str], mode: int) -> bool:
    """Open the first of these libraries that is there."""
    for name in libraries:
        try:
            ctypes.CDLL(name, mode=mode)
        except OSError:
            continue
        return True
    return False


_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 128 << 10  # as glibc begins


def give_back_large_blocks() -> None:
    """Let glibc give memory blocks of 128 KiB and more back to the system once they are free.

    By itself it raises that bound, up to 32 MiB, with each larger block that is freed, and keeps
    smaller ones in its heap. The buffers of MLX's CPU back end, KV caches above all, come and go in
    all sizes, and the holes that they leave there grow for half an hour. Does nothing on other
    systems.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # another library than glibc
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


MLX_VARIABLES = {
    "MLX_METAL_FAST_SYNCH": 1,
    "MLX_MAX_MB_PER_BUFFER": 512,
    "MLX_MAX_OPS_PER_BUFFER": 100,
}
"""MLX's tuning variables, and values that others set on large Macs.

MLX reads each once, when it first uses a GPU: the first on Metal only, the others on CUDA, too.
"""


def variables_in(setting: str) -> dict[str, str]:
    """The variables in a text such as "NAME=1,OTHER=512"."""
    return dict(one.split("=") for one in setting.split(",") if one)


def mlx_settings() -> str:
    """The tuning variables that are set, in the form of :func:`variables_in`."""
    return ",".join(f"{name}={os.environ[name]}" for name in MLX_VARIABLES if name in os.environ)


INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells: 128 + SIGINT."""
