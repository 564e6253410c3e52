"""mlx-lm's prompt caches: lent by callers to generations, and kept in files.

A file is a safetensors file in mlx-lm's format, with the states of a list of caches, and metadata.
mlxspec's files also list the tokens that the caches hold, so that later generations can draft from
these tokens. mlxspec and mlx-lm can read each other's files.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast, overload

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generation_stream
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from safetensors import SafetensorError, safe_open

from ..errors import FileError, OptionError
from ..files import check_writable, replaced
from ..terminal import one_line
from .caches import TreeKVCache, TreeQuantizedKVCache, WindowKVCache, cached_length, parts
from .capability import capability_with
from .loaded_model import LoadedModel
from .machine import model_identity
from .params import CacheOptions
from .target import Capability, Target, target_for

_MLX_LM_CLASSES: dict[type, Any] = {
    TreeKVCache: KVCache,
    TreeQuantizedKVCache: QuantizedKVCache,
    WindowKVCache: RotatingKVCache,
}
_JUDGED = {*_MLX_LM_CLASSES.values(), ArraysCache}
"""The classes whose arrays' shapes after any number of tokens follow from those after one token."""


def as_mlx_lms(cache: Any) -> Any:
    """Convert a target's cache to mlx-lm's class; the two share arrays."""
    if isinstance(cache, CacheList):
        return CacheList(*map(as_mlx_lms, cache.caches))
    if type(cache) not in _MLX_LM_CLASSES:
        return copy.copy(cache)  # since the target will restore its own state
    state = cache.rotating_state() if isinstance(cache, WindowKVCache) else cache.state
    return _MLX_LM_CLASSES[type(cache)].from_state(state)


class CacheLease:
    """A generation's use of the caller's caches, which are returned when the generation ends.

    Until then, only the target holds their arrays, since MLX writes into an array in place only if
    nothing else refers to it. Besides, the target may be ahead of the output that the caller has
    read.

    Args:
        caches: the caller's caches, from ``mlx_lm.models.cache.make_prompt_cache``, empty or not.
            They are not changed before :meth:`take`. A draft model's caches may come after the
            model's.
        model: the model that will continue them.

    Raises:
        OptionError: the caches were made for a model with fewer layers.
        FileError: the caches were filled by another model.
    """

    def __init__(self, caches: Sequence[Any], model: nn.Module) -> None:
        needed = len(make_prompt_cache(model))
        if len(caches) < needed:
            raise OptionError(
                f"prompt_cache has {len(caches)} caches, but the model needs {needed}: make it "
                "with make_prompt_cache(model)"
            )
        self._caches = list(caches[:needed])
        if all(type(part) in _JUDGED and not part.empty() for part in parts(self._caches)):
            check_fits(self._caches, model, "prompt_cache")
        self._target: Target | None = None

    def take(self, loaded: LoadedModel, capability: Capability, options: CacheOptions) -> Target:
        """Take the caches; the arguments are those of :class:`Target`.

        Raises:
            FileError: another generation has borrowed them.
        """
        if any(isinstance(cache, _LentCache) for cache in self._caches):
            raise FileError(_IN_USE)
        held = [copy.copy(cache) for cache in self._caches]
        able = capability_with(held, capability)
        target = target_for(loaded, able, options, held)
        self._start, self._target = target.length, target
        for cache in self._caches:
            cache.__class__ = _LentCache
            vars(cache).clear()
        return target

    def give_back(self, prompt: Sequence[int], context: Sequence[int]) -> None:
        """Return the caches after the generation has ended, for any reason.

        Args:
            prompt: token ids.
            context: the prompt, and the output that the consumer has read.
        """
        if not (target := self._target):
            return
        with mx.stream(generation_stream):
            target.truncate(min(target.length, self._start + len(context)))
            if len(context) > len(prompt):  # also run the tokens that the target has not run yet
                target.prefill(context[target.length - self._start :])
            returned = [as_mlx_lms(cache) for cache in target.cache]
            mx.eval([part.state for part in parts(returned)])
        for lent, cache in zip(self._caches, returned, strict=True):
            lent.__class__ = type(cache)
            vars(lent).update(vars(cache))
        self._target = None


_IN_USE = (
    "prompt_cache is in use by another generation: wait until that generation has ended, or close "
    "it"
)


class _LentCache:
    """The class of a caller's cache while a generation uses it: any other use is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks for these to copy an object
            raise AttributeError(name)
        raise FileError(_IN_USE)

    def __getitem__(self, index: int) -> Any:
        raise FileError(_IN_USE)


# --- files ---

_ATTENTION = {KVCache, QuantizedKVCache, RotatingKVCache}
_SUFFIX = ".safetensors"
_TOKENS = "tokens"  # the metadata's key for the tokens, which mlx-lm's own files lack


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
        cache: mlx-lm's caches, as a generation with ``prompt_cache`` leaves them.
        metadata: strings for whoever reads the file. ``mlx_lm.generate`` expects "model", the
            model's directory or repository, and "tokenizer_config", a JSON object.
        tokens: the tokens that the cache holds, which later generations can draft from.

    Raises:
        FileError: the file cannot be written; an existing one is unchanged.
        OptionError: the caches are of a kind that nothing could read from a file.
    """
    check_savable(cache)
    path = prompt_cache_path(file_name)
    held = dict(metadata or {})
    if tokens:
        held[_TOKENS] = json.dumps(list(tokens))
    try:
        with replaced(path) as file:
            mlx_lm_caches.save_prompt_cache(cast(Any, file), [*cache], held)
    except RuntimeError as error:  # MLX's
        raise FileError(f"{path}: cannot be written ({one_line(error)}); try again") from error


def check_savable(cache: Sequence[Any]) -> None:
    """Refuse caches of a model's own class, since mlx-lm reads only the classes that it shares."""
    for part in parts(cache):
        if type(as_mlx_lms(part)).__name__ not in vars(mlx_lm_caches):
            raise OptionError(
                f"the model's cache ({type(part).__name__}) cannot be kept in a file, since mlx-lm "
                "could not read it: process the prompt again instead"
            )


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
    """Load a prompt cache saved by :func:`save_prompt_cache` or mlx-lm.

    Args:
        file_name: the file.
        return_metadata: whether to return its metadata, too.

    Returns:
        mlx-lm's caches, to pass as ``prompt_cache``, or these and the metadata.

    Raises:
        FileError: the file is missing, damaged, or not a prompt cache.
    """
    with _read_errors(Path(file_name)):
        cache, metadata = mlx_lm_caches.load_prompt_cache(str(file_name), return_metadata=True)
        mx.eval([part.state for part in cache])
    return (cache, metadata or {}) if return_metadata else cache  # mlx-lm's "" is no metadata


def read_prompt_cache_metadata(path: Path) -> dict[str, str]:
    """The metadata of a prompt cache, without reading the caches.

    Raises:
        FileError: as for :func:`load_prompt_cache`.
    """
    with _read_errors(path):
        _, flat = cast(Any, mx.load(str(path), return_metadata=True))
        metadata, classes, _ = tree_unflatten(list(flat.items()))
        if "Cache" not in classes[0]:
            raise ValueError("the first class is not a cache")
    return metadata or {}


_DAMAGES = RuntimeError, SafetensorError, AttributeError, LookupError, TypeError, ValueError


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    """Check that a file is whole; turn errors in reading it into a FileError of one line."""
    try:
        if not file.is_file():  # opening a pipe would block
            raise FileError(f"{file}: no such file; make it with 'mlxspec cache-prompt'")
        with safe_open(file, "np"):  # checks the header and the length, unlike MLX
            yield
    except OSError as error:
        raise FileError(
            f"{file} cannot be read ({error.strerror}): name a file that you can read"
        ) from error
    except _DAMAGES as error:
        raise FileError(
            f"{file} is damaged, or not a prompt cache that this version of mlx-lm can read: make "
            "it again with 'mlxspec cache-prompt'"
        ) from error


_SAMPLES = 64  # about how many numbers of each array enter a digest


def digest_of_weights(model: nn.Module) -> str:
    """A digest that distinguishes models, fine-tuned ones included, wherever their files are.

    It covers the configuration, the shapes and data types, and samples of every array.
    """
    digest = hashlib.sha256(str(model_identity(model)["digest"]).encode())
    samples = []
    for _, weight in sorted(tree_flatten(model.parameters())):
        spread = weight.reshape(-1)[:: max(1, weight.size // _SAMPLES)]
        samples.append(mx.contiguous(spread).view(mx.uint8))
    mx.eval(samples)
    for sample in samples:
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def prompt_cache_path(file_name: str | os.PathLike[str]) -> Path:
    """The file that :func:`save_prompt_cache` will write; call this before the long work.

    Raises:
        FileError: the file cannot be written.
    """
    path = Path(file_name)
    if path.suffix != _SUFFIX:
        path = path.with_name(path.name + _SUFFIX)
    check_writable(path)
    return path


def check_replaceable(path: Path, force: bool) -> None:
    """Refuse to overwrite a file that the user may need.

    Args:
        path: from :func:`prompt_cache_path`.
        force: whether an existing prompt cache may be replaced.

    Raises:
        FileError: the file exists and is not a prompt cache, or is one and ``force`` is off.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        read_prompt_cache_metadata(path)
    except FileError as error:
        raise FileError(f"{path}: exists and is not a prompt cache; name another file") from error
    if not force:
        raise FileError(f"{path}: exists; name another file, or replace it with --force")


def tokens_in(metadata: Mapping[str, str], cache: Sequence[Any] | None = None) -> list[int]:
    """The tokens that a file lists; empty if it lists none, as mlx-lm's files do.

    Args:
        metadata: the file's metadata.
        cache: the file's caches. If they hold another number of tokens, the list is ignored.
            Caches that are only recurrent states are not checked.
    """
    try:
        tokens = json.loads(metadata.get(_TOKENS, "[]"))
        known = all(type(token) is int for token in tokens)
    except (TypeError, ValueError):
        return []
    return tokens if known and cached_length(cache or ()) in (0, len(tokens)) else []


def check_fits(cache: Sequence[Any], model: nn.Module, source: str) -> None:
    """Refuse a cache that the model could not have made.

    The graph of a small forward is built, but never evaluated.

    Args:
        cache: from :func:`load_prompt_cache`.
        model: the model that will continue it.
        source: the name of the cache in errors.

    Raises:
        FileError: the number of layers or the shapes differ.
    """
    fresh = make_prompt_cache(model)
    model(mx.array([[0]]), cache=fresh)
    with suppress(ValueError, NotImplementedError):  # another length, or a cache never quantised
        if all(_fits(*pair) for pair in zip(parts(cache), parts(fresh), strict=True)):
            return
    raise FileError(
        f"{source} was made by a different model: its shapes do not fit; name the model that made "
        "it"
    )


def _fits(cache: Any, fresh: Any) -> bool:
    """Whether a cache can be what the model's own cache becomes after more tokens.

    Options can bound or quantise a plain cache. Apart from that, the layouts must be the same.
    """
    if isinstance(cache, QuantizedKVCache) and hasattr(fresh, "to_quantized"):
        fresh = fresh.to_quantized(cache.group_size, cache.bits)
    alike = type(cache) is type(fresh) or {type(cache), type(fresh)} <= _ATTENTION
    return alike and _layout(cache) == _layout(fresh)


def _layout(cache: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each array in a cache, without the number of positions.

    Integer arrays in a recurrent state hold tokens of the context, whose number varies.
    """
    arrays = {
        name: array for name, array in tree_flatten(cache.state) if isinstance(array, mx.array)
    }
    if not isinstance(cache, ArraysCache):
        return {name: (*array.shape[:2], *array.shape[3:]) for name, array in arrays.items()}
    is_state = {name: mx.issubdtype(array.dtype, mx.floating) for name, array in arrays.items()}
    return {name: array.shape if is_state[name] else () for name, array in arrays.items()}
