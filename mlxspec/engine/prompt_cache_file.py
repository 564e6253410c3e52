"""Prompt-cache files in mlx-lm's format; mlxspec and mlx-lm read each other's.

A file is a safetensors file with the states of a list of caches, and metadata for the reader. Those
of mlxspec name the tokens that the caches hold, so that later generations can draft from them.
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
    held = {**(metadata or {}), **({_TOKENS: json.dumps(list(tokens))} if tokens else {})}
    try:
        with replaced(path, PromptCacheError) as file:
            mlx_lm_caches.save_prompt_cache(cast(Any, file), list(cache), held)
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
    with _read_errors(Path(file_name)):
        cache, metadata = mlx_lm_caches.load_prompt_cache(str(file_name), return_metadata=True)
        mx.eval([part.state for part in cache])
    metadata = metadata or {}  # "" if the file has none
    return (cache, metadata) if return_metadata else cache


def read_prompt_cache_metadata(path: Path) -> dict[str, str]:
    """The metadata of a prompt cache, without reading the caches.

    Raises:
        PromptCacheError: as for :func:`load_prompt_cache`.
    """
    with _read_errors(path):
        _, flat = cast(Any, mx.load(str(path), return_metadata=True))
        metadata, *_ = tree_unflatten(list(flat.items()))
    return metadata or {}


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    """Check that a file is whole; turn errors of reading it into one line that names it."""
    try:
        if not file.exists():
            raise PromptCacheError(f"{file}: no such file; make it with 'mlxspec cache-prompt'")
        check_safetensors(file)
        yield
    except OSError as error:
        raise PromptCacheError(
            f"{file} cannot be read ({error.strerror}): name a file that you can read"
        ) from error
    except (RuntimeError, SafetensorError) as error:
        raise PromptCacheError(
            f"{file} is truncated or damaged: make it again with 'mlxspec cache-prompt'"
        ) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise PromptCacheError(
            f"{file} holds no prompt cache that this version of mlx-lm reads: make it with "
            "'mlxspec cache-prompt'"
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
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        read_prompt_cache_metadata(path)
    except PromptCacheError as error:
        raise PromptCacheError(
            f"{path}: exists and is not a prompt cache; name another file"
        ) from error
    if not force:
        raise PromptCacheError(f"{path}: exists; name another file, or replace it with --force")


def tokens_in(metadata: Mapping[str, str], cache: Sequence[Any] | None = None) -> list[int]:
    """The tokens that a file names; empty if it, like mlx-lm's, names none.

    Args:
        metadata: the file's.
        cache: the file's, to make sure that it holds as many tokens, unless it holds only states.
    """
    try:
        tokens = json.loads(metadata.get(_TOKENS, "[]"))
        known = all(type(token) is int for token in tokens)
    except (TypeError, ValueError):
        return []
    return tokens if known and cached_length(cache or ()) in (0, len(tokens)) else []


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
    alike = type(cache) is type(own) or {type(cache), type(own)} <= _ATTENTION
    return alike and _layout(cache) == _layout(own)


def _layout(cache: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each array in a cache, without the number of positions.

    Integers in a state are tokens of the context, of any number.
    """
    arrays = {name: one for name, one in tree_flatten(cache.state) if isinstance(one, mx.array)}
    if not isinstance(cache, ArraysCache):
        return {name: (*one.shape[:2], *one.shape[3:]) for name, one in arrays.items()}
    is_state = {name: mx.issubdtype(one.dtype, mx.floating) for name, one in arrays.items()}
    return {name: one.shape if is_state[name] else () for name, one in arrays.items()}
