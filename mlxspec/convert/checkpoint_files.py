"""What original and Hugging Face checkpoints share: settings in JSON, and safetensors files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConversionError, printable
from ..models.safetensors_header import DamagedHeader, Place, read_header

BFLOAT16 = np.dtype("<u2")
"""numpy has no bfloat16: arrays hold its bits as unsigned integers, which no other weights are."""

_FLOATS: dict[str, np.dtype] = {
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON file.

    Raises:
        ConversionError: it does not exist, cannot be read, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConversionError(f"{path}: does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds no settings")
    return content


def map_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory read-only."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ConversionError(f"{path}: cannot be read ({error})") from None


def view(
    name: str,
    mapped: np.ndarray,
    dtype: np.dtype,
    shape: tuple[int, ...],
    offset: int,
    strides: Sequence[int] | None = None,
) -> np.ndarray:
    """A tensor where it lies in a mapped file, without a copy.

    Args:
        name: the file's and the tensor's, for messages.
        mapped: the file.
        dtype: type of the elements.
        shape: lengths of the axes.
        offset: the first byte.
        strides: bytes between neighbours along each axis; in row-major order if None.

    Raises:
        ConversionError: it reaches beyond the file, or has more elements than can be counted.
    """
    try:
        return np.ndarray(shape, dtype, mapped, offset, strides)
    except ValueError as error:
        raise ConversionError(f"{name} cannot lie in the file ({error})") from None


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by name, as views of the mapped file; bfloat16 as its bits.

    Raises:
        ConversionError: the file is truncated or damaged, or holds other types than floats.
    """
    places = _places(path)
    mapped = map_file(path)
    tensors = {}
    for name, place in places.items():
        shown = f"{path}: {printable(name)}"
        if place.dtype not in _FLOATS:
            raise ConversionError(f"{shown} has the type {printable(place.dtype)}, not a float")
        tensors[name] = view(shown, mapped, _FLOATS[place.dtype], place.shape, place.begin)
    return tensors


def count_tensors(path: Path) -> int:
    """How many tensors a safetensors file has.

    Raises:
        ConversionError: it is damaged, or ends before its last tensor does.
    """
    return len(_places(path))


def _places(path: Path) -> dict[str, Place]:
    try:
        return read_header(path).tensors
    except DamagedHeader as error:
        raise ConversionError(f"{path}: {error}") from None
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None
