"""Prompt-cache files in mlx-lm's format; mlxspec and mlx-lm read each other's.

mlx-lm flattens a list of caches into a safetensors file. An array's name is its place in the
caches' states, such as ``3.1`` for the fourth layer's values. Numbers, texts and None in the states
are stored as arrays, too. The metadata is flat as well: ``0.model`` and so on for the reader,
``1.3`` for the fourth cache's class, ``2.7.0`` and ``2.7.1`` for the place and the type of the
seventh value that is not an array.

mlx-lm's own reader trusts all of it: it makes lists as long as the largest number in a name, and
accepts any offset. This module checks the names before it makes lists of them, and every number and
shape against what a cache of its class can hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast, overload

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from safetensors import SafetensorError

from ..errors import PromptCacheError
from ..files import check_writable, replaced
from ..models.model_files import check_safetensors
from .caches import cached_length, parts

_ATTENTION = {KVCache, QuantizedKVCache, RotatingKVCache}
_SUFFIX = ".safetensors"
_TOKENS = "tokens"  # a key of the metadata that mlx-lm's own files lack
_MAX_TOKEN = 2**31


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
    *,
    tokens: Sequence[int] = (),
) -> None:
    """Save a prompt cache for :func:`load_prompt_cache` and for mlx-lm.

    An existing file is replaced once the new one is complete.

    Args:
        file_name: ``.safetensors`` is appended if missing, as by mlx-lm.
        cache: mlx-lm's caches, as they are after a generation with ``prompt_cache``.
        metadata: for the reader. ``mlx_lm.generate`` expects "model", the model's
            directory or repository, and "tokenizer_config", a JSON object.
        tokens: the tokens that the cache holds, which later generations can draft from.

    Raises:
        PromptCacheError: the file cannot be written; an existing one is unchanged.
    """
    path = prompt_cache_path(file_name)
    held = dict(metadata or {})
    states = [layer.state for layer in cache]
    if tokens:
        held[_TOKENS] = json.dumps(list(tokens))
    kinds: list[Any] = [""]  # mlx-lm's begins so
    arrays = {}
    for place, value in tree_flatten(states):
        arrays[place], kind = _array(value)
        kinds += [(place, kind)] if kind else []
    classes = [type(layer).__name__ for layer in cache]
    try:
        with replaced(path, PromptCacheError) as file:
            described = dict(tree_flatten([held, classes, kinds]))
            mx.save_safetensors(cast(Any, file), arrays, described)
    except RuntimeError as error:  # MLX's
        reason = " ".join(str(error).split())[:150]
        raise PromptCacheError(f"{path}: cannot be written ({reason}); try again") from error


@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[False] = False
) -> list[Any]: ...
@overload
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: Literal[True]
) -> tuple[list[Any], dict[str, str]]: ...
def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Load a prompt cache that :func:`save_prompt_cache` or mlx-lm has saved.

    Args:
        file_name: the file.
        return_metadata: return its metadata as well.

    Returns:
        mlx-lm's caches, to pass as ``prompt_cache``.

    Raises:
        PromptCacheError: the file is missing, damaged, or not a prompt cache.
    """
    path = Path(file_name)
    with _unreadable(path):
        cache, metadata = _read_caches(path)
        if (named := _named_tokens(metadata)) and not tokens_in(cache, metadata):
            raise ValueError(f"it names {len(named)} tokens and holds {cached_length(cache)}")
        mx.eval([part.state for part in cache])
    return (cache, metadata) if return_metadata else cache


def read_prompt_cache_metadata(path: Path) -> tuple[list[int], dict[str, str]]:
    """The tokens that a prompt cache's metadata names, and the metadata; reads no caches.

    Raises:
        PromptCacheError: as for :func:`load_prompt_cache`.
    """
    with _unreadable(path):
        metadata = _below("0", _load(path)[1])
        return _named_tokens(metadata), metadata


@contextmanager
def _unreadable(file_name: Path) -> Iterator[None]:
    """Turn errors of reading into one line that names the file."""
    try:
        if not file_name.exists():
            raise PromptCacheError(
                f"{file_name}: no such file; make it with 'mlxspec cache-prompt'"
            )
        yield
    except OSError as error:
        raise PromptCacheError(
            f"{file_name} cannot be read ({error.strerror}): name a file that you can read"
        ) from error
    except (RuntimeError, SafetensorError) as error:
        raise PromptCacheError(
            f"{file_name} is truncated or damaged: make it again with 'mlxspec cache-prompt'"
        ) from error
    except ValueError as error:
        raise PromptCacheError(
            f"{file_name} holds no prompt cache that this version of mlx-lm reads ({error}): make "
            "it with 'mlxspec cache-prompt'"
        ) from error


def prompt_cache_path(file_name: str | os.PathLike[str]) -> Path:
    """The file that :func:`save_prompt_cache` will write; check it before the work begins.

    Raises:
        PromptCacheError: the file cannot be written.
    """
    path = Path(file_name)
    if path.suffix != _SUFFIX:
        path = path.with_name(path.name + _SUFFIX)
    check_writable(path, PromptCacheError)
    return path


def check_replaceable(path: Path, force: bool) -> None:
    """Refuse to overwrite a file that the user may need.

    Args:
        path: from :func:`prompt_cache_path`.
        force: whether an existing prompt cache may be replaced.

    Raises:
        PromptCacheError: the file is not a prompt cache, or it is one and ``force`` is off.
        OSError: the file cannot be read.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    try:
        is_cache = "Cache" in _load(path)[1].get("1.0", "")
    except (RuntimeError, ValueError, SafetensorError):
        is_cache = False
    if not is_cache:
        raise PromptCacheError(f"{path}: exists and is not a prompt cache; name another file")
    if not force:
        raise PromptCacheError(f"{path}: exists; name another file, or replace it with --force")


def tokens_in(cache: Sequence[Any], metadata: Mapping[str, str]) -> list[int]:
    """The tokens that a loaded cache holds; empty if its file, like mlx-lm's, names none."""
    tokens = _named_tokens(metadata)
    with_positions = [part for part in parts(cache) if hasattr(part, "offset")]
    known = not with_positions or cached_length(with_positions) == len(tokens)
    return tokens if known else []


def _named_tokens(metadata: Mapping[str, str]) -> list[int]:
    """The tokens that a file's metadata names; empty without valid ones."""
    try:
        tokens = json.loads(metadata.get(_TOKENS, "[]"))
    except (ValueError, RecursionError):
        return []
    known = isinstance(tokens, list) and all(
        type(token) is int and 0 <= token < _MAX_TOKEN for token in tokens
    )
    return tokens if known else []


def check_fits(cache: Sequence[Any], model: nn.Module, source: str) -> None:
    """Refuse a cache that the model could not have made.

    The graph of a small forward is built and never evaluated.

    Args:
        cache: from :func:`load_prompt_cache`.
        model: the model that will continue it.
        source: names the cache in errors.

    Raises:
        PromptCacheError: the number of layers or the shapes differ.
    """
    own = make_prompt_cache(model)
    if len(own) != len(cache):
        raise PromptCacheError(
            f"{source} is another model's: it caches {len(cache)} layers, the model has "
            f"{len(own)}; name the model that made it"
        )
    model(mx.array([[0]]), cache=own)
    try:
        fits = all(_fits(*pair) for pair in zip(parts(cache), parts(own), strict=True))
    except (ValueError, NotImplementedError):  # the model's cannot be quantised like that
        fits = False
    if not fits:
        raise PromptCacheError(
            f"{source} is another model's: its keys and values have other shapes; name the "
            "model that made it"
        )


def _fits(cache: Any, own: Any) -> bool:
    """Whether a cache can be the model's own after more tokens.

    Options can bound or quantise a plain cache; otherwise its layout is the same.
    """
    if isinstance(cache, QuantizedKVCache) and hasattr(own, "to_quantized"):
        own = own.to_quantized(cache.group_size, cache.bits)
    if type(cache) is type(own):
        bounds = ("max_size", "keep", "chunk_size")
        alike = all(getattr(cache, name, None) == getattr(own, name, None) for name in bounds)
    else:
        alike = {type(cache), type(own)} <= _ATTENTION
    return alike and _layout(cache) == _layout(own)


def _layout(cache: Any) -> dict[str, tuple[bool, tuple[int, ...]]]:
    """For each array in a cache: whether it holds fractions, and its shape.

    The shape omits the number of positions, and for a state the number of tokens that it keeps.
    """
    layout = {}
    for name, array in tree_flatten(cache.state):
        if isinstance(array, mx.array):
            fractions, shape = mx.issubdtype(array.dtype, mx.floating), array.shape
            if not isinstance(cache, ArraysCache):
                shape = (*shape[:2], *shape[3:])
            elif not fractions:
                shape = shape[:-1]
            layout[name] = fractions, shape
    return layout


def check_lengths(cache: Sequence[Any], source: str) -> None:
    """Refuse a cache whose layers hold different numbers of positions.

    Args:
        cache: one model's caches, outside a forward, since within one the layers differ.
        source: names the cache in errors.

    Raises:
        PromptCacheError: the lengths differ.
    """
    filled = [part for part in parts(cache) if hasattr(part, "offset") and not part.empty()]
    lengths = {part.offset for part in filled}
    if len(lengths) > 1:
        raise PromptCacheError(
            f"{source} is damaged: its layers end at different positions, such as {min(lengths)} "
            f"and {max(lengths)}; make it again"
        )


# --- reading ---

_MAX_HEADER_BYTES = 16 << 20  # a token takes some seven
_MAX_HEADER_ITEMS = 1_000_000
_DEEPEST_NAME = 8  # numbers in the name of an array; names in a list of caches have 5
_MAX_POSITIONS = 2**31 - 1
_MAX_CLASS_NAME = 64
_FLOATS = {mx.float16, mx.bfloat16, mx.float32}
_BITS = {2, 3, 4, 5, 6, 8}
_GROUP_SIZES = {16, 32, 64, 128}
_CLASSES = {
    one.__name__: one
    for one in (*_ATTENTION, mlx_lm_caches.ChunkedKVCache, ArraysCache, mlx_lm_caches.CacheList)
}


def _require(condition: bool, problem: str = "values are missing, or too many") -> None:
    if not condition:
        raise ValueError(problem)


def _load(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """A file's arrays and metadata, unless reading them would take much time or memory.

    Raises:
        OSError: the file cannot be read.
        SafetensorError, RuntimeError: it is truncated, or not a safetensors file.
        ValueError: its header is too large.
    """
    _require(path.is_file(), "it is not a regular file")  # reading a pipe would block
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER_BYTES + 1))
    items = sum(map(header.count, (b'"', b"[", b"{")))
    is_small = len(header) <= _MAX_HEADER_BYTES and items <= _MAX_HEADER_ITEMS
    _require(is_small, "its header is too large")
    check_safetensors(path)
    return cast(Any, mx.load(str(path), return_metadata=True))


def _read_caches(path: Path) -> tuple[list[Any], dict[str, str]]:
    """The caches and the metadata of a file; the arrays are not evaluated.

    Raises:
        OSError, SafetensorError, RuntimeError: as for :func:`_load`.
        ValueError: it holds no caches, or invalid ones.
    """
    arrays, flat = _load(path)
    try:
        classes = _unflattened(_below("1", flat))
        start, *pairs = _unflattened(_below("2", flat))
        _require(start == "", "it was not written by mlx-lm")  # which writes "" first
        values: dict[str, Any] = dict(arrays)
        for place, kind in pairs:
            values[place] = _value(arrays[place], kind)
        states = zip(classes, _unflattened(values), strict=True)
        cache = [_CLASSES[name].from_state(state) for name, state in states]
        for part in parts(cache):
            _check(part)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its caches are not of the classes that it names") from error
    return cache, _below("0", flat)


def _below(section: str, flat: Mapping[str, str]) -> dict[str, str]:
    """The entries in a section of the metadata, without its number in their names."""
    return {key[2:]: value for key, value in flat.items() if key.startswith(f"{section}.")}


def _unflattened(values: Mapping[str, Any]) -> list[Any]:
    """Build nested lists from values that are named by their places.

    Raises:
        ValueError: a name is not a place, or the place before it is missing.
    """
    places = set()
    for name in values:
        numbers = name.split(".")
        _require(len(numbers) <= _DEEPEST_NAME, "a name is too long")
        places |= {tuple(numbers[:depth]) for depth in range(1, len(numbers) + 1)}
    for *outer, last in places:
        _require(last.isdecimal() and last == str(int(last)), "a name is not a number")
        _require(last == "0" or (*outer, str(int(last) - 1)) in places)
    return cast(list[Any], tree_unflatten(dict(values)))


def _array(value: Any) -> tuple[mx.array, str]:
    """The array that encodes a value, and the value's type; "" for an array."""
    if isinstance(value, mx.array):
        return value, ""
    if value is None:
        return mx.array([]), "none"
    if isinstance(value, str):
        return mx.array([ord(letter) for letter in value]), "string"
    return mx.array(value), "scalar"


def _value(array: mx.array, kind: str) -> int | str | None:
    """The value that an array of the file encodes."""
    if kind == "none":
        return None
    if kind == "scalar" and array.ndim == 0:
        return cast(int, array.item())
    _require(kind == "string" and array.size <= _MAX_CLASS_NAME, "a value is not of its type")
    name = "".join(map(chr, cast(list[int], array.tolist())))
    _require(name in _CLASSES, "it holds caches of an unknown class")
    return name


def _check(cache: Any) -> None:
    """Raise ValueError for a cache with a state that no single sequence can have."""
    held = vars(cache).copy()
    if isinstance(cache, ArraysCache):
        arrays = isinstance(held["cache"], list)
        arrays = arrays and all(a is None or isinstance(a, mx.array) for a in held.pop("cache"))
        _require(arrays, "a state is not an array")
        _require(not any(held.values()), "it holds several sequences")
        return
    keys, values = held.pop("keys"), held.pop("values")
    numbers = all(type(number) is int and 0 <= number <= _MAX_POSITIONS for number in held.values())
    _require(numbers, "a cache has an impossible length or size")
    offset, start, index = (held.get(name, 0) for name in ("offset", "start_position", "_idx"))
    if isinstance(cache, RotatingKVCache):
        _require(cache.keep < cache.max_size, "a window keeps more than it holds")
    if keys is None:
        empty = values is None and not any((offset, start, index))
        _require(empty, "an empty cache claims to hold positions")
        return
    quantization = None
    if isinstance(cache, QuantizedKVCache):
        quantization = cache.group_size, cache.bits
        known = cache.group_size in _GROUP_SIZES and cache.bits in _BITS
        _require(known, "a cache has an unknown quantisation")
    room = _room(keys, values, quantization)
    if isinstance(cache, RotatingKVCache):
        # Until a window is full, its index is its length; then it wraps.
        fits = index == offset if offset <= room else cache.keep <= index <= room
        fits = fits and offset > 0
    else:
        fits = start < offset <= start + room
    _require(fits, f"a cache with room for {room} positions ends at {offset}")


def _room(keys: Any, values: Any, quantization: tuple[int, int] | None) -> int:
    """The number of positions in keys and values, (batch, heads, positions, width) each."""
    arrays = [keys, values] if quantization is None else [*keys, *values]
    for array in arrays:
        # MiniMax M3's index, which picks keys, has values of width 0.
        known = isinstance(array, mx.array) and array.ndim == 4 and 0 not in array.shape[:3]
        _require(known, "keys or values have an impossible shape")
        packed = quantization is not None and (array is keys[0] or array is values[0])
        known = array.dtype == mx.uint32 if packed else array.dtype in _FLOATS
        _require(known, "keys or values have an impossible type")
    if quantization is not None:
        group_size, bits = quantization
        for packed, scales, biases in (keys, values):
            fits = packed.shape[3] * 32 == scales.shape[3] * group_size * bits
            fits = fits and scales.shape == biases.shape
            _require(fits, "the arrays of a quantised cache do not match")
    _require(len({array.shape[:3] for array in arrays}) == 1, "keys and values do not match")
    return cast(int, keys[0].shape[2] if quantization else keys.shape[2])
