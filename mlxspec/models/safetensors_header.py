"""The header of a safetensors file: a JSON object that says where each tensor lies.

It is checked before MLX sees the file: MLX believes what it reads there.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import printable

LENGTH = struct.Struct("<Q")
"""How many bytes the JSON text has; it comes first."""

_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
_MOST_DIMENSIONS = 32
_LARGEST_SIZE = 2**31 - 1  # of MLX's dimensions
_LARGEST_FILE = 2**63 - 1
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16},
    **{"U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64, "C64": 64},
}


class DamagedHeader(ValueError):
    """What is wrong with a file, in words that follow its name."""


@dataclass(frozen=True)
class Place:
    """A tensor's type, shape, and first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Header:
    """Where each tensor of a file lies, by name, and what its writer noted beside them."""

    tensors: dict[str, Place]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """What the header of a file says, checked against the file's size.

    Raises:
        DamagedHeader: it is no safetensors file, cut short, or says what cannot be.
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():  # a pipe would wait for somebody to write into it
        raise OSError(errno.EINVAL, "no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(LENGTH.size)
        length = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else size
        start = LENGTH.size + length
        header = None
        if length <= _MAX_HEADER_BYTES and start <= size:
            header = _parsed(file.read(length))
    if not isinstance(header, dict):
        raise DamagedHeader("is truncated or no safetensors file")
    metadata = header.pop("__metadata__", None)
    notes = metadata.items() if isinstance(metadata, dict) else ()
    return Header(
        tensors={name: _place(name, entry, start, size) for name, entry in header.items()},
        metadata={key: value for key, value in notes if isinstance(value, str)},
    )


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None


def _place(name: str, entry: Any, start: int, size: int) -> Place:
    shown = printable(name)
    try:
        dtype, shape = entry["dtype"], _sizes(entry["shape"], _LARGEST_SIZE)
        if not isinstance(dtype, str):
            raise TypeError
        begin, end = _sizes(entry["data_offsets"], _LARGEST_FILE)
    except (KeyError, TypeError, ValueError):
        raise DamagedHeader(f"has no possible type, shape and place for {shown}") from None
    bits = 8 * (end - begin)
    if bits < 0 or (dtype in _BITS and bits != _BITS[dtype] * math.prod(shape)):
        raise DamagedHeader(f"has a place for {shown} that it does not fill; it is damaged")
    if start + end > size:
        raise DamagedHeader(f"is truncated within {shown}")
    return Place(dtype, shape, start + begin)


def _sizes(values: Any, largest: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        raise TypeError
    if not all(type(value) is int and 0 <= value <= largest for value in values):
        raise ValueError
    return tuple(values)
