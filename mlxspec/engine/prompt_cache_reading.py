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

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_caches

from ..models.model_files import check_safetensors

_MAX_HEADER_BYTES = 16 << 20  # of which the tokens take some seven each
_MAX_HEADER_ITEMS = 1_000_000
_DEEPEST_NAME = 8  # numbers in the name of an array; a cache in a list of caches has 5
_MAX_POSITIONS = 2**31 - 1
_MAX_CLASS_NAME = 64
_FLOATS = {mx.float16, mx.bfloat16, mx.float32}
_SCALARS = {mx.int32, mx.int64, mx.uint32}
_BITS = {2, 3, 4, 5, 6, 8}
_GROUP_SIZES = {16, 32, 64, 128}
_STATE_LENGTHS = {
    "KVCache": 3,  # keys, values, offset
    "QuantizedKVCache": 5,  # these, group size and bits
    "RotatingKVCache": 6,  # these, positions kept, the window's size and the place in it
    "ChunkedKVCache": 5,  # these, the chunks' size and the first position that is held
    "ArraysCache": 3,  # arrays, and what only batches have
}
"""How many values the state of one of mlx-lm's caches has, by its class."""


def read_caches(path: Path) -> tuple[list[Any], dict[str, str]]:
    """The caches and the metadata of a file; the caches' arrays are not evaluated.

    Raises:
        OSError: it cannot be read.
        SafetensorError, RuntimeError: it is truncated or no safetensors file.
        ValueError: it holds no caches, or some that cannot be.
    """
    arrays, flat = _load(path)
    classes = _nested(_below("1", flat))
    start, *pairs = _nested(_below("2", flat)) or [None]
    if start != "":  # mlx-lm puts it there
        raise ValueError("it was not written by mlx-lm")
    if not all(isinstance(text, str) for pair in pairs for text in _fields(pair, 2)):
        raise ValueError("a value's type is no text")
    types = dict(pairs)
    values = {name: _value(array, types.pop(name, "array")) for name, array in arrays.items()}
    if types:
        raise ValueError("a value is missing")
    states = _nested(values)
    if not classes or len(classes) != len(states):
        raise ValueError("its caches are not those that it names")
    return [*map(_cache, classes, states)], _below("0", flat)


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file.

    Raises:
        OSError, SafetensorError, RuntimeError, ValueError: as for :func:`read_caches`.
    """
    return _below("0", _load(path)[1])


def holds_caches(path: Path) -> bool:
    """Whether a file's header says of which classes its caches are.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return "Cache" in _load(path)[1].get("1.0", "")
    except (RuntimeError, ValueError):
        return False


def _load(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What MLX reads in a file, unless that would take much time or memory.

    Raises:
        OSError, SafetensorError, RuntimeError, ValueError: as for :func:`read_caches`.
    """
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER_BYTES + 1))
    items = sum(map(header.count, (b'"', b"[", b"{")))
    if len(header) > _MAX_HEADER_BYTES or items > _MAX_HEADER_ITEMS:
        raise ValueError("its header is too large")
    check_safetensors(path)
    return cast(Any, mx.load(str(path), return_metadata=True))


def _below(section: str, flat: Mapping[str, str]) -> dict[str, str]:
    """The entries of a section of the metadata, by what follows its number."""
    return {key[2:]: value for key, value in flat.items() if key.startswith(f"{section}.")}


def _nested(values: Mapping[str, Any]) -> list[Any]:
    """Lists of lists from values that are named by their place in them.

    Raises:
        ValueError: a place is missing or taken twice, or no place.
    """
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *numbers, last = name.split(".")
        if len(numbers) >= _DEEPEST_NAME:
            raise ValueError("a name is too long")
        inner = tree
        for number in numbers:
            inner = inner.setdefault(number, {})
            if not isinstance(inner, dict):
                raise ValueError("a name goes on behind a value")
        if last in inner:
            raise ValueError("two values have one name")
        inner[last] = value
    return cast(list[Any], _as_lists(tree))


def _as_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    numbers = [str(number) for number in range(len(tree))]
    if tree.keys() != set(numbers):
        raise ValueError("values are missing, or too many")
    return [_as_lists(tree[number]) for number in numbers]


def _fields(values: Any, count: int) -> list[Any]:
    """The values of a list that has so many.

    Raises:
        ValueError: it is no list, or another one.
    """
    if not isinstance(values, list) or len(values) != count:
        raise ValueError("values are missing, or too many")
    return values


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
    if name == "CacheList" and isinstance(state, list):
        inner = [_fields(part, 2) for part in state]
        return mlx_lm_caches.CacheList(*(_cache(kind, part) for part, kind in inner))
    if not isinstance(name, str) or name not in _STATE_LENGTHS:
        raise ValueError("it holds caches of an unknown class")
    fields = _fields(state, _STATE_LENGTHS[name])
    if name == "ArraysCache":
        _check_arrays(*fields)
    else:
        _check_attention(name, *fields)
    return getattr(mlx_lm_caches, name).from_state(fields)


def _check_arrays(held: Any, left_padding: Any, lengths: Any) -> None:
    """Raise ValueError for what is no state of a layer."""
    known = isinstance(held, list) and all(a is None or isinstance(a, mx.array) for a in held)
    if not known:
        raise ValueError("a state is no array")
    if left_padding is not None or lengths is not None:
        raise ValueError("it holds several sequences")


def _check_attention(name: str, keys: Any, values: Any, offset: Any, *settings: Any) -> None:
    """Raise ValueError for what cannot be the state of a cache of keys and values."""
    if not all(type(number) is int for number in (offset, *settings)):
        raise ValueError("a cache has a length or a size that is no number")
    start = index = keep = 0
    if name == "QuantizedKVCache":
        group_size, bits = settings
        if group_size not in _GROUP_SIZES or bits not in _BITS:
            raise ValueError("a cache is quantised in a way that does not exist")
    elif name == "RotatingKVCache":
        keep, max_size, index = settings
        if not 0 <= keep < max_size <= _MAX_POSITIONS:
            raise ValueError(f"a window of {max_size} positions keeps the first {keep}")
    elif name == "ChunkedKVCache":
        chunk_size, start = settings
        if not 0 < chunk_size <= _MAX_POSITIONS or start < 0:
            raise ValueError("a cache has chunks of a size that cannot be")
    if keys is None:
        if values is not None or any((offset, start, index)):
            raise ValueError("an empty cache says that it is not")
        return
    quantization = settings if name == "QuantizedKVCache" else None
    room = most = _room(keys, values, quantization)
    if name == "RotatingKVCache":
        most = _MAX_POSITIONS
        # Until it is full positions stand where they are written; then the oldest make room.
        if index != offset if offset <= room else not keep <= index <= room:
            raise ValueError(
                f"a window of {room} entries is at {index} of them and {offset} positions"
            )
    most = min(start + most, _MAX_POSITIONS)
    if not start < offset <= most:
        raise ValueError(
            f"a cache that may end at {start + 1} to {most} positions ends at {offset}"
        )


def _room(keys: Any, values: Any, quantization: tuple[int, int] | None) -> int:
    """How many positions keys and values have, (batch, heads, positions, width) each.

    Raises:
        ValueError: they are not of that shape, or do not belong together.
    """
    shapes = set()
    for held in (keys, values):
        if quantization is None:
            shapes.add(_leading(held, _FLOATS))
            continue
        packed, scales, biases = _fields(held, 3)
        shapes |= {
            _leading(packed, {mx.uint32}),
            _leading(scales, _FLOATS),
            _leading(biases, _FLOATS),
        }
        group_size, bits = quantization
        width = scales.shape[3] * group_size * bits
        if scales.shape != biases.shape or packed.shape[3] * 32 != width:
            raise ValueError("a quantised cache has arrays that do not belong together")
    if len(shapes) > 1:
        raise ValueError("keys and values do not belong together")
    return shapes.pop()[2]


def _leading(array: Any, dtypes: set[mx.Dtype]) -> tuple[int, ...]:
    """The sizes of keys or values without their width."""
    # An index that picks keys has values of no width (MiniMax M3).
    if not isinstance(array, mx.array) or array.ndim != 4 or 0 in array.shape[:3]:
        raise ValueError("keys or values have no shape that keys or values can have")
    if array.dtype not in dtypes:
        raise ValueError("keys or values are of a type that they cannot be")
    return array.shape[:3]
