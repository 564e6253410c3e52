"""Skip tests of the OpenBLAS path on machines without its requirements."""

import sys
from importlib.metadata import PackageNotFoundError, version

import pytest


def openblas_is_installed() -> bool:
    if sys.platform != "linux":
        return False
    try:
        version("mlx-cpu")
        version("scipy-openblas32")
    except PackageNotFoundError:
        return False
    return True


needs_openblas = pytest.mark.skipif(
    not openblas_is_installed(), reason="needs Linux, MLX's CPU wheel and scipy-openblas32"
)
