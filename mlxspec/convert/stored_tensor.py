"""Tensors where they lie in a memory-mapped checkpoint file."""

import math
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import ConversionError

# bfloat16, which numpy lacks, is carried as its 16 bits.
_NUMPY_TYPES: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a mapped file: reading costs no memory before :meth:`bits` is used.

    ``offset`` and ``strides`` count bytes.
    """

    mapped: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def bits(self) -> np.ndarray:
        """The elements without a copy; bfloat16 ones as ``uint16``."""
        return np.ndarray(
            self.shape, _NUMPY_TYPES[self.dtype], self.mapped, self.offset, self.strides
        )


def item_size(dtype: str) -> int:
    """Bytes of an element."""
    return _NUMPY_TYPES[dtype].itemsize


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory read-only."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ConversionError(f"{path}: cannot be read ({error})") from None


def mlx_array(bits: np.ndarray, dtype: str) -> mx.array:
    """A copy in MLX of what :meth:`StoredTensor.bits` gave, of a float type."""
    if dtype == "bfloat16":
        return mx.array(bits).view(mx.bfloat16)
    # MLX has float64 on the CPU only, and no checkpoint needs more than float32.
    return mx.array(bits.astype(np.float32) if dtype == "float64" else bits)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of an array in row-major order."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
