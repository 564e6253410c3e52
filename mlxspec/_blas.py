"""Puts OpenBLAS in front of the BLAS that MLX's Linux CPU wheel carries.

The wheel carries the reference BLAS, whose float32 products run at some 6 GFLOP/s on one core
and whose forwards over M rows cost M times one row. With OpenBLAS's symbols loaded first the
same calls are an order of magnitude faster, and wide forwards nearly as cheap as narrow ones.
"""

import ctypes
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

ENVIRONMENT_VARIABLE = "MLXSPEC_OPENBLAS"
_LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0")

# Cycles, as a power of two, that OpenBLAS's threads spin for more work before they sleep: about
# what waking one takes. By default it is 2^26, many steps long, and through all of them they
# take cores from the thread that builds the next forward.
_SPINNING = "OPENBLAS_THREAD_TIMEOUT"
_SPINNING_CYCLES = "16"


def prefer_openblas() -> None:
    """Load OpenBLAS for MLX's CPU back end on Linux, where it is installed.

    Works only before ``mlx.core`` is first imported; warns when that has happened already.
    ``MLXSPEC_OPENBLAS=0`` turns it off. Does nothing on other systems or back ends.
    """
    if sys.platform != "linux" or os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return
    try:
        version("mlx-cpu")
    except PackageNotFoundError:
        return
    if _load(os.RTLD_NOLOAD):
        return  # preloaded by the user, or by an earlier call
    if "mlx.core" not in sys.modules:
        os.environ.setdefault(_SPINNING, _SPINNING_CYCLES)  # read once, while it is loaded
        _load(ctypes.RTLD_GLOBAL)
    elif _load(ctypes.RTLD_LOCAL):
        warnings.warn(
            "mlx.core was imported before mlxspec, so its CPU back end runs without OpenBLAS, "
            "about 16 times slower in float32: import mlxspec first "
            f"(or set {ENVIRONMENT_VARIABLE}=0 to do without it)",
            stacklevel=3,
        )


def _load(mode: int) -> bool:
    """Open the first OpenBLAS that is there."""
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name, mode=mode)
        except OSError:
            continue
        return True
    return False
