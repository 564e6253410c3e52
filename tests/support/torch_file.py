"""Write ``.pth`` files opcode by opcode, in PyTorch's format but without PyTorch.

Where PyTorch is installed, a test checks that it reads them back.
"""

import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STORAGE_TYPES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}


@dataclass(frozen=True)
class Global:
    """A name in the pickle."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A function applied in the pickle."""

    function: Any
    arguments: tuple


@dataclass(frozen=True)
class Persistent:
    """An object stored outside the pickle."""

    identifier: tuple


@dataclass(frozen=True)
class Raw:
    """Opcodes to write unchanged."""

    code: bytes


def dumps(value: Any) -> bytes:
    """Return a complete pickle of protocol 2."""
    return b"\x80\x02" + _encode(value) + b"."


def _encode(value: Any) -> bytes:
    match value:
        case Raw(code):
            return code
        case Global(module, name):
            return f"c{module}\n{name}\n".encode()
        case Call(function, arguments):
            return _encode(function) + _encode(arguments) + b"R"
        case Persistent(identifier):
            return _encode(identifier) + b"Q"
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        case int():
            digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(digits)]) + digits
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(_encode, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_encode, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_encode(k) + _encode(v) for k, v in value.items()) + b"u"
    raise TypeError(value)


def storage(dtype: str, record: str, numel: int) -> Persistent:
    """Return the reference to a record of the archive."""
    return Persistent(("storage", Global("torch", STORAGE_TYPES[dtype]), record, "cpu", numel))


def tensor(
    place: Persistent, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> Call:
    """Return a view of a storage as ``torch.save`` writes it."""
    hooks = Call(Global("collections", "OrderedDict"), ())
    return Call(
        Global("torch._utils", "_rebuild_tensor_v2"),
        (place, offset, shape, strides, False, hooks),
    )


def write_archive(
    path: Path,
    pickle: bytes,
    records: Mapping[str, bytes],
    *,
    byteorder: str = "little",
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Write the zip archive of a pickle and its storages' bytes."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", byteorder)
        for name, content in records.items():
            archive.writestr(f"archive/data/{name}", content)
        archive.writestr("archive/version", "3\n")


def save(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Save a state dict of contiguous tensors; ``uint16`` arrays are bits of bfloat16 tensors."""
    state, records = {}, {}
    for index, (name, array) in enumerate(arrays.items()):
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        strides = tuple(stride // array.itemsize for stride in np.empty_like(array).strides)
        state[name] = tensor(storage(dtype, str(index), array.size), array.shape, strides)
        records[str(index)] = np.ascontiguousarray(array).tobytes()
    write_archive(path, dumps(state), records)


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Truncate float32 numbers to their upper 16 bits; exact for numbers with short mantissas."""
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """Return the float32 numbers with these upper 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
