"""Safetensors files: a JSON header that says where each tensor lies, then the bytes."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ConversionError
from ..loading.safetensors_header import LENGTH, DamagedHeader, Place, read_header
from .messages import printable
from .stored_tensor import StoredTensor, contiguous_strides, item_size, map_file

_READABLE = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_WRITABLE = {
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.bool_: "BOOL",
}


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor before its values are there."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @classmethod
    def of(cls, array: mx.array) -> "TensorSpec":
        """The spec of an array, which is not evaluated."""
        return cls(tuple(array.shape), array.dtype)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.size


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, as views of the mapped file.

    Raises:
        ConversionError: the file is truncated or damaged, or has a type that is no plain
            number's.
    """
    places = _places(path)
    mapped = map_file(path)
    tensors = {}
    for name, place in places.items():
        if place.dtype not in _READABLE:
            kind = printable(place.dtype)
            raise ConversionError(f"{path}: {printable(name)} has the type {kind}, not a number's")
        dtype = _READABLE[place.dtype]
        strides = contiguous_strides(place.shape, item_size(dtype))
        tensors[name] = StoredTensor(mapped, dtype, place.shape, strides, place.begin)
    return tensors


def count_tensors(path: Path) -> int:
    """How many tensors a file has.

    Raises:
        ConversionError: it is damaged, or ends before its last tensor does.
    """
    return len(_places(path))


def _places(path: Path) -> dict[str, Place]:
    try:
        return read_header(path)
    except DamagedHeader as error:
        raise ConversionError(f"{path}: {error}") from None
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None


def write_safetensors(
    path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, mx.array]]
) -> None:
    """Write a file tensor by tensor, so that one of them is in memory at a time.

    ``tensors`` come in the order of ``specs``, and are what these say.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.nbytes
        header[name] = {
            "dtype": _WRITABLE[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned to 8 bytes
    with open(path, "wb") as file:
        file.write(LENGTH.pack(len(text)))
        file.write(text)
        for name, array in tensors:
            assert TensorSpec.of(array) == specs[name]
            file.write(numpy_bits(array).reshape(-1).view(np.uint8).data)
            del array  # not while the next one is made


def numpy_bits(array: mx.array) -> np.ndarray:
    """The elements of an array, without a copy where they are contiguous; bfloat16 as uint16."""
    array = mx.contiguous(array)
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
