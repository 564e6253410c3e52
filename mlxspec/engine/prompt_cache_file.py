"""Prompt caches in files, in mlx-lm's format: what either writes, both read.

mlx-lm flattens a list of caches into a safetensors file. Arrays are named by their place in the
caches' states, ``3.1`` for the values of the fourth layer, and numbers, texts and None among the
states are arrays too. The metadata is flat as well: ``0.model`` and so on for the reader,
``1.3`` for the class of the fourth cache, ``2.7.0`` and ``2.7.1`` for the place and the type of the
seventh value that is not an array.

mlx-lm's own reader believes all of it: it makes lists as long as the largest number in a name, and
caches that go on at whatever offset they say. Here every name, number and shape is compared with
what caches of its class can be before a cache is made.
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
from mlx.utils import tree_flatten
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
_TOKENS = "tokens"  # a metadata key that mlx-lm's own files lack
_MAX_TOKEN = 2**31


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
    *,
    tokens: Sequence[int] = (),
) -> None:
    """Save a prompt cache for :func:`load_prompt_cache` and for mlx-lm.

    A file that is there already is replaced once the new one is complete.

    Args:
        file_name: ``.safetensors`` is appended where it is missing, as by mlx-lm.
        cache: mlx-lm's caches, as they are after a generation with ``prompt_cache``.
        metadata: for the reader. ``mlx_lm.generate`` expects "model", the model's
            directory or repository, and "tokenizer_config", a JSON object.
        tokens: what the cache holds, so that drafts can be taken from it later.

    Raises:
        PromptCacheError: the file cannot be written; what was there before is as it was.
    """
    path = prompt_cache_path(file_name)
    held = {**(metadata or {}), **({_TOKENS: json.dumps(list(tokens))} if tokens else {})}
    try:
        with replaced(path, PromptCacheError) as file:
            mlx_lm_caches.save_prompt_cache(file, list(cache), held)
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
        mlx-lm's caches, to be passed as ``prompt_cache``.

    Raises:
        PromptCacheError: there is no such file, or it is damaged or of another kind.
    """
    path = Path(file_name)
    with _unreadable(path):
        cache, metadata = _read_caches(path)
        if (named := _named_tokens(metadata)) and not tokens_in(cache, metadata):
            raise ValueError(f"it names {len(named)} tokens and holds {cached_length(cache)}")
        mx.eval([part.state for part in cache])
    return (cache, metadata) if return_metadata else cache


def read_prompt_cache_metadata(path: Path) -> tuple[list[int], dict[str, str]]:
    """The tokens that a prompt cache names, and its metadata; the cache itself is not read.

    Raises:
        PromptCacheError: as :func:`load_prompt_cache`.
    """
    with _unreadable(path):
        metadata = _below("0", _load(path)[1])
        return _named_tokens(metadata), metadata


@contextmanager
def _unreadable(file_name: Path) -> Iterator[None]:
    """Say what is wrong with a file in one line that names it."""
    try:
        if not file_name.exists():
            raise PromptCacheError(
                f"{file_name}: there is no such file; make it with 'mlxspec cache-prompt'"
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
    """The file that :func:`save_prompt_cache` will write; asked before the work begins.

    Raises:
        PromptCacheError: it cannot be written.
    """
    path = Path(file_name)
    if path.suffix != _SUFFIX:
        path = path.with_name(path.name + _SUFFIX)
    check_writable(path, PromptCacheError)
    return path


def check_replaceable(path: Path, force: bool) -> None:
    """Refuse to write over what the user would miss.

    Args:
        path: from :func:`prompt_cache_path`.
        force: whether a prompt cache that is there may be replaced.

    Raises:
        PromptCacheError: there is a prompt cache, or a file of another kind.
        OSError: what is there cannot be read.
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
    """The tokens that a loaded cache holds; none where its file, like mlx-lm's, names none."""
    tokens = _named_tokens(metadata)
    with_positions = [part for part in parts(cache) if hasattr(part, "offset")]
    known = not with_positions or cached_length(with_positions) == len(tokens)
    return tokens if known else []


def _named_tokens(metadata: Mapping[str, str]) -> list[int]:
    """The tokens that a file's metadata names, if it does."""
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
        PromptCacheError: layers or shapes are others.
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

    One that a model did not ask for, bounded or quantised, holds what the plain one does.
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
    """For each array that a cache holds: whether it holds fractions, and its shape.

    The number of positions is left out, and so is how many of the last tokens a state keeps.
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
        cache: of one model, which is not running: in the middle of a forward layers differ.
        source: names the cache in errors.

    Raises:
        PromptCacheError: they do.
    """
    filled = [part for part in parts(cache) if hasattr(part, "offset") and not part.empty()]
    lengths = {part.offset for part in filled}
    if len(lengths) > 1:
        raise PromptCacheError(
            f"{source} is damaged: its layers end at {min(lengths)} and at {max(lengths)} "
            "positions; make it again"
        )


# --- reading ---

_MAX_HEADER_BYTES = 16 << 20  # tokens take some seven each
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


def _require(condition: bool, problem: str = "values are missing, or too many") -> None:
    if not condition:
        raise ValueError(problem)


def _load(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What MLX reads in a file, unless that would take much time or memory.

    Raises:
        OSError: it cannot be read.
        SafetensorError, RuntimeError: it is truncated or no safetensors file.
        ValueError: its header is too large.
    """
    _require(path.is_file(), "it is not a regular file")  # a pipe would be waited for
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MAX_HEADER_BYTES + 1))
    items = sum(map(header.count, (b'"', b"[", b"{")))
    is_small = len(header) <= _MAX_HEADER_BYTES and items <= _MAX_HEADER_ITEMS
    _require(is_small, "its header is too large")
    check_safetensors(path)
    return cast(Any, mx.load(str(path), return_metadata=True))


def _read_caches(path: Path) -> tuple[list[Any], dict[str, str]]:
    """The caches and the metadata of a file; the caches' arrays are not evaluated.

    Raises:
        OSError, SafetensorError, RuntimeError: as for :func:`_load`.
        ValueError: it holds no caches, or some that cannot be.
    """
    arrays, flat = _load(path)
    classes = _nested(_below("1", flat))
    start, *pairs = _nested(_below("2", flat)) or [None]
    _require(start == "", "it was not written by mlx-lm")  # which puts it there
    for pair in pairs:
        texts = all(isinstance(text, str) for text in _fields(pair, 2))
        _require(texts, "a value's type is not a text")
    types = dict(pairs)
    values = {name: _value(array, types.pop(name, "array")) for name, array in arrays.items()}
    _require(not types, "a value is missing")
    states = _nested(values)
    same = bool(classes) and len(classes) == len(states)
    _require(same, "its caches are not those that it names")
    return [*map(_cache, classes, states)], _below("0", flat)


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
        _require(len(numbers) < _DEEPEST_NAME, "a name is too long")
        inner = tree
        for number in numbers:
            inner = inner.setdefault(number, {})
            _require(isinstance(inner, dict), "a name continues below a value")
        _require(last not in inner, "two values have one name")
        inner[last] = value
    return cast(list[Any], _as_lists(tree))


def _as_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    numbers = [str(number) for number in range(len(tree))]
    _require(tree.keys() == set(numbers))
    return [_as_lists(tree[number]) for number in numbers]


def _fields(values: Any, count: int) -> list[Any]:
    """The values of a list, which must have ``count``."""
    _require(isinstance(values, list) and len(values) == count)
    return cast(list[Any], values)


def _value(array: mx.array, type: str) -> mx.array | int | str | None:
    """The value that an array of the file encodes."""
    if type == "array":
        return array
    if type == "none" and array.shape == (0,):
        return None
    if type == "scalar" and array.shape == () and array.dtype in _SCALARS:
        return cast(int, array.item())
    is_text = array.ndim == 1 and array.dtype in _SCALARS and array.size <= _MAX_CLASS_NAME
    _require(type == "string" and is_text, "a value is not of its type")
    return "".join(map(chr, cast(list[int], array.tolist())))


def _cache(name: Any, state: Any) -> Any:
    """A cache of mlx-lm's, of a class that has such a state."""
    if name == "CacheList" and isinstance(state, list):
        inner = [_fields(part, 2) for part in state]
        return mlx_lm_caches.CacheList(*(_cache(kind, part) for part, kind in inner))
    known = isinstance(name, str) and name in _STATE_LENGTHS
    _require(known, "it holds caches of an unknown class")
    fields = _fields(state, _STATE_LENGTHS[name])
    if name == "ArraysCache":
        held, left_padding, lengths = fields
        arrays = isinstance(held, list) and all(a is None or isinstance(a, mx.array) for a in held)
        _require(arrays, "a state is not an array")
        _require(left_padding is None and lengths is None, "it holds several sequences")
    else:
        _check_attention(name, *fields)
    return getattr(mlx_lm_caches, name).from_state(fields)


def _check_attention(name: str, keys: Any, values: Any, offset: Any, *settings: Any) -> None:
    """Raise ValueError for what cannot be the state of a cache of keys and values."""
    numbers = all(type(number) is int for number in (offset, *settings))
    _require(numbers, "a cache has a length or a size that is not a number")
    start = index = keep = 0
    quantization = None
    if name == "QuantizedKVCache":
        quantization = group_size, bits = settings
        known = group_size in _GROUP_SIZES and bits in _BITS
        _require(known, "a cache is quantised in a way that does not exist")
    elif name == "RotatingKVCache":
        keep, max_size, index = settings
        possible = 0 <= keep < max_size <= _MAX_POSITIONS
        _require(possible, f"a window of {max_size} positions keeps the first {keep}")
    elif name == "ChunkedKVCache":
        chunk_size, start = settings
        possible = 0 < chunk_size <= _MAX_POSITIONS and start >= 0
        _require(possible, "a cache has chunks of an impossible size")
    if keys is None:
        empty = values is None and not any((offset, start, index))
        _require(empty, "an empty cache says that it is not")
        return
    room = most = _room(keys, values, quantization)
    if name == "RotatingKVCache":
        most = _MAX_POSITIONS
        # Until it is full positions stand where they are written; then the oldest make room.
        _require(
            index == offset if offset <= room else keep <= index <= room,
            f"a window of {room} entries is at {index} of them and {offset} positions",
        )
    most = min(start + most, _MAX_POSITIONS)
    _require(
        start < offset <= most,
        f"a cache that may end at {start + 1} to {most} positions ends at {offset}",
    )


def _room(keys: Any, values: Any, quantization: tuple[int, int] | None) -> int:
    """How many positions keys and values have, (batch, heads, positions, width) each."""
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
        fits = packed.shape[3] * 32 == scales.shape[3] * group_size * bits
        fits = fits and scales.shape == biases.shape
        _require(fits, "a quantised cache has arrays that do not belong together")
    _require(len(shapes) == 1, "keys and values do not belong together")
    return shapes.pop()[2]


def _leading(array: Any, dtypes: set[mx.Dtype]) -> tuple[int, ...]:
    """The sizes of keys or values without their width."""
    # An index that picks keys has values of no width (MiniMax M3).
    known = isinstance(array, mx.array) and array.ndim == 4 and 0 not in array.shape[:3]
    _require(known, "keys or values have no shape that keys or values can have")
    _require(array.dtype in dtypes, "keys or values are of a type that they cannot be")
    return cast(tuple[int, ...], array.shape[:3])
