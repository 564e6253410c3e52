"""Whether this machine has what the OpenBLAS path needs."""

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest


def openblas_is_installed() -> bool:
    if sys.platform != "linux":
        return False
    try:
        version("mlx-cpu")
        ctypes.CDLL("libopenblas.so.0")
    except (OSError, PackageNotFoundError):
        return False
    return True


needs_openblas = pytest.mark.skipif(
    not openblas_is_installed(), reason="needs Linux, MLX's CPU wheel and libopenblas.so.0"
)
