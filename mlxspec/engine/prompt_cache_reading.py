"""Reading prompt caches of mlx-lm's format from files that anybody may have made.

mlx-lm flattens a list of caches into a safetensors file. Arrays are named by their place in the
caches' states, ``3.1`` for the values of the fourth layer, and numbers, texts and None among the
states stand there as arrays too. The metadata is flat as well: ``0.model`` and so on for whoever
loads it, ``1.3`` for the class of the fourth cache, ``2.7.0`` and ``2.7.1`` for the place and the
type of the seventh value that is no array.

mlx-lm's own reader believes all of it: it makes lists as long as the largest number in a name,
and caches that go on at whatever offset they say. Here every name, number and shape is compared
with what caches of its class can be before a cache is made.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_caches
from safetensors import SafetensorError, safe_open

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 16 << 20  # of which the tokens take some seven each
_MAX_HEADER_ITEMS = 1_000_000
_MAX_DIMENSIONS = 8
_DEEPEST_NAME = 8  # numbers in the name of an array; a cache in a list of caches has 5
_MAX_POSITIONS = 2**31 - 1
_MAX_CLASS_NAME = 64
_FLOATS = {mx.float16, mx.bfloat16, mx.float32}
_SCALARS = {mx.int32, mx.int64, mx.uint32}
_BITS = {2, 3, 4, 5, 6, 8}
_GROUP_SIZES = {16, 32, 64, 128}

Tree = dict[str, Any]
"""The values of a state by the numbers in their names, one below the other."""


def read_caches(path: Path) -> tuple[list[Any], dict[str, str]]:
    """The caches and the metadata of a file; the caches' arrays are not evaluated.

    Raises:
        OSError: it cannot be read.
        SafetensorError, RuntimeError: it is truncated or no safetensors file.
        ValueError: it holds no caches, or some that cannot be.
    """
    _check_header(path)
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, flat = loaded
    classes = _listed(flat, "1.")
    types = _types(flat)
    tree: Tree = {}
    for name, array in arrays.items():
        _put(tree, name.split("."), _value(array, types.pop(name, "array")))
    if types:
        raise ValueError("a value is missing")
    states = _fields(tree, len(classes))
    caches = [_cache(name, state) for name, state in zip(classes, states, strict=True)]
    return caches, {key[2:]: value for key, value in flat.items() if key.startswith("0.")}


def holds_caches(path: Path) -> bool:
    """Whether a file's header says of which classes its caches are.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return "Cache" in _check_header(path).get("1.0", "")
    except (SafetensorError, ValueError):
        return False


def _check_header(path: Path) -> Mapping[str, str]:
    """Refuse what cannot be read in little time and memory; return the metadata.

    Raises:
        OSError, SafetensorError, ValueError: as for :func:`read_caches`.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        (length,) = _LENGTH.unpack(start) if len(start) == _LENGTH.size else (0,)
        header = file.read(min(length, _MAX_HEADER_BYTES))
    items = sum(map(header.count, (b'"', b"[", b"{")))
    if length > max(_MAX_HEADER_BYTES, os.stat(path).st_size):
        raise SafetensorError("the header is longer than the file")
    if length > _MAX_HEADER_BYTES or items > _MAX_HEADER_ITEMS:
        raise ValueError("its header is too large")
    with safe_open(path, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118  (no mapping)
            if len(opened.get_slice(name).get_shape()) > _MAX_DIMENSIONS:
                raise ValueError("an array has too many dimensions")
        return opened.metadata() or {}


def _listed(flat: Mapping[str, str], prefix: str) -> list[str]:
    """The values of keys that end in 0, 1, 2, ….

    Raises:
        ValueError: a number is missing or comes twice, or there is none.
    """
    found = {
        key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)
    }
    return _fields(found, len(found))


def _types(flat: Mapping[str, str]) -> dict[str, str]:
    """The types of the values that are no arrays, by their names.

    Raises:
        ValueError: what says so is incomplete.
    """
    tree: Tree = {}
    for key, value in flat.items():
        if key.startswith("2."):
            _put(tree, key.split(".")[1:], value)
    first, *pairs = _fields(tree, len(tree))
    if first != "":  # mlx-lm puts it there
        raise ValueError("it was not written by mlx-lm")
    types = [_fields(pair, 2) for pair in pairs]
    if not all(isinstance(text, str) for pair in types for text in pair):
        raise ValueError("a value's type is no text")
    return dict(types)


def _put(tree: Tree, numbers: list[str], value: Any) -> None:
    """Put a value where its name says.

    Raises:
        ValueError: something else stands there, or the name is too deep.
    """
    if len(numbers) > _DEEPEST_NAME:
        raise ValueError("a name is too long")
    for number in numbers[:-1]:
        tree = tree.setdefault(number, {})
        if not isinstance(tree, dict):
            raise ValueError("a name goes on behind a value")
    if tree.setdefault(numbers[-1], value) is not value:
        raise ValueError("two values have one name")


def _fields(tree: Any, count: int) -> list[Any]:
    """The values with the numbers from 0 on, of which there are so many and nothing else.

    Raises:
        ValueError: others are there.
    """
    numbers = list(map(str, range(count)))
    if not count or not isinstance(tree, dict) or tree.keys() != set(numbers):
        raise ValueError("values are missing, or too many")
    return [tree[number] for number in numbers]


def _count(tree: Any) -> int:
    return len(tree) if isinstance(tree, dict) else 0


def _value(array: mx.array, type: str) -> mx.array | int | str | None:
    """What an array of the file stands for.

    Raises:
        ValueError: it is not what its type says.
    """
    if type == "array":
        return array
    if type == "none" and array.shape == (0,):
        return None
    if type == "scalar" and array.shape == () and array.dtype in _SCALARS:
        return cast(int, array.item())
    is_text = array.ndim == 1 and array.dtype in _SCALARS and array.size <= _MAX_CLASS_NAME
    if type == "string" and is_text:
        return "".join(map(chr, cast(list[int], array.tolist())))
    raise ValueError("a value is not of its type")


def _cache(name: Any, state: Any) -> Any:
    """A cache of mlx-lm's.

    Raises:
        ValueError: there is no such class, or no cache of it has such a state.
    """
    if not isinstance(name, str):
        raise ValueError("it holds caches without a class")
    if name == "CacheList":
        found = [_fields(part, 2) for part in _fields(state, _count(state))]
        return mlx_lm_caches.CacheList(*(_cache(inner, part) for part, inner in found))
    if name not in _STATES:
        raise ValueError("it holds caches of an unknown class")
    return getattr(mlx_lm_caches, name).from_state(_STATES[name](state))


def _plain(state: Any) -> tuple[Any, ...]:
    keys, values, offset = _fields(state, 3)
    if keys is None:
        _check_empty(values, offset)
        return None, None, 0
    _check_offset(offset, _room(keys, values))
    return keys, values, offset


def _quantized(state: Any) -> tuple[Any, ...]:
    keys, values, offset, group_size, bits = _fields(state, 5)
    if not _is_one_of(group_size, _GROUP_SIZES) or not _is_one_of(bits, _BITS):
        raise ValueError("a cache is quantised in a way that does not exist")
    if keys is None:
        _check_empty(values, offset)
        return None, None, 0, group_size, bits
    rooms = set()
    for packed, scales, biases in (triple := (_fields(keys, 3), _fields(values, 3))):
        _check_arrays(packed, scales, biases)
        width = packed.shape[3] * 32
        if (
            packed.dtype != mx.uint32
            or not {scales.dtype, biases.dtype} <= _FLOATS
            or scales.shape != biases.shape
            or packed.shape[:3] != scales.shape[:3]
            or width != scales.shape[3] * group_size * bits
        ):
            raise ValueError("a quantised cache has arrays that do not belong together")
        rooms.add(packed.shape[:3])
    if len(rooms) > 1:
        raise ValueError("keys and values do not belong together")
    _check_offset(offset, rooms.pop()[2])
    return (*map(tuple, triple), offset, group_size, bits)


def _rotating(state: Any) -> tuple[Any, ...]:
    keys, values, offset, keep, max_size, index = _fields(state, 6)
    if not all(type(number) is int for number in (keep, max_size, index)):
        raise ValueError("a window has sizes that are no numbers")
    if not 0 <= keep < max_size <= _MAX_POSITIONS:
        raise ValueError(f"a window of {max_size} positions keeps the first {keep}")
    if keys is None:
        _check_empty(values, offset, index)
        return None, None, 0, keep, max_size, 0
    room = _room(keys, values)
    _check_offset(offset, _MAX_POSITIONS)
    # Until it is full positions stand where they are written; then the oldest make room.
    if index != offset if offset <= room else not keep <= index <= room:
        raise ValueError(f"a window of {room} entries is at {index} of them and {offset} positions")
    return keys, values, offset, keep, max_size, index


def _chunked(state: Any) -> tuple[Any, ...]:
    keys, values, offset, chunk_size, start = _fields(state, 5)
    if type(chunk_size) is not int or not 0 < chunk_size <= _MAX_POSITIONS:
        raise ValueError("a cache has chunks of a size that cannot be")
    if type(start) is not int or start < 0:
        raise ValueError("a cache begins nowhere")
    if keys is None:
        _check_empty(values, offset, start)
        return None, None, 0, chunk_size, 0
    _check_offset(offset, min(_MAX_POSITIONS, start + _room(keys, values)), start)
    return keys, values, offset, chunk_size, start


def _arrays(state: Any) -> tuple[Any, ...]:
    held, left_padding, lengths = _fields(state, 3)
    held = _fields(held, _count(held))
    if not all(array is None or isinstance(array, mx.array) for array in held):
        raise ValueError("a state is no array")
    if left_padding is not None or lengths is not None:
        raise ValueError("it holds several sequences")
    return held, None, None


_STATES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "KVCache": _plain,
    "QuantizedKVCache": _quantized,
    "RotatingKVCache": _rotating,
    "ChunkedKVCache": _chunked,
    "ArraysCache": _arrays,
}
"""By mlx-lm's class, what checks its state."""


def _room(keys: Any, values: Any) -> int:
    """The number of positions that keys and values, (batch, heads, positions, width), have."""
    _check_arrays(keys, values)
    if not {keys.dtype, values.dtype} <= _FLOATS or keys.shape[:3] != values.shape[:3]:
        raise ValueError("keys and values do not belong together")
    return keys.shape[2]


def _check_arrays(*arrays: Any) -> None:
    for array in arrays:
        # An index that picks keys has values of no width (MiniMax M3).
        if not isinstance(array, mx.array) or array.ndim != 4 or 0 in array.shape[:3]:
            raise ValueError("keys or values have no shape that keys or values can have")


def _check_offset(offset: Any, most: int, start: int = 0) -> None:
    if type(offset) is not int or not start < offset <= most:
        shown = offset if type(offset) is int else "something else than a number"
        raise ValueError(f"a cache that may end at {start + 1} to {most} positions ends at {shown}")


def _is_one_of(value: Any, allowed: set[int]) -> bool:
    return type(value) is int and value in allowed


def _check_empty(values: Any, *places: Any) -> None:
    if values is not None or not all(type(place) is int and place == 0 for place in places):
        raise ValueError("an empty cache says that it is not")
