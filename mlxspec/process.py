"""Sets up the process: standard streams, BLAS, heap and environment variables."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next file to be opened would get the closed stream's descriptor. MLX treats
    descriptor 0 as a failure, and output to the stream would end up in that file.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8"))  # noqa: SIM115


ENVIRONMENT_VARIABLE = "MLXSPEC_OPENBLAS"
_PACKAGE, _IN_PACKAGE = "scipy_openblas32", "lib/libopenblas_python.so"


def prefer_openblas() -> None:
    """Load OpenBLAS for MLX's CPU back end on Linux, since MLX's wheel has the slow reference BLAS.

    OpenBLAS comes from the package ``scipy-openblas32``, which mlxspec installs. It must be loaded
    before ``mlx.core`` is first imported; after that, this function only warns. It does nothing on
    other systems or back ends, or if ``MLXSPEC_OPENBLAS=0`` is set.
    """
    if sys.platform != "linux" or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return
    try:
        version("mlx-cpu")
    except PackageNotFoundError:
        return
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return
    library = str(Path(package.origin).parent / _IN_PACKAGE)
    with suppress(OSError):
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
        return  # preloaded by the user, or by an earlier call
    if "mlx.core" in sys.modules:
        warnings.warn(
            "mlx.core was imported before mlxspec, so its CPU back end runs without OpenBLAS, "
            "up to 8 times slower in float32: import mlxspec first "
            f"(or set {ENVIRONMENT_VARIABLE}=0 to run without OpenBLAS)",
            stacklevel=3,
        )
        return
    # With this value, OpenBLAS's threads spin for 2^16 cycles before they sleep, about as long as
    # it takes to wake a thread. The default of 2^26 cycles lasts many steps, in which the spinning
    # threads take cores from the thread that builds the next forward. OpenBLAS reads the variable
    # when it is loaded.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")
    with suppress(OSError):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector.

    Building a tokenizer makes up to a million objects, all of which stay. The collector would scan
    them again and again, which takes a fifth of the time of loading a large one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_M_MMAP_THRESHOLD = -3  # from glibc's malloc.h
_LARGE = 128 << 10  # glibc's initial threshold


def give_back_large_blocks() -> None:
    """Make glibc return freed blocks of 128 KiB or more to the system.

    glibc keeps smaller blocks in its heap. By default it raises this threshold, up to 32 MiB, each
    time a larger block is freed. MLX's CPU back end allocates buffers of all sizes, above all for
    KV caches, and the holes that they leave in the heap grow for half an hour. This function does
    nothing on other systems.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as in shells."""
