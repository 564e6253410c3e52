"""Prompt caches in files, in mlx-lm's format: what either writes, both read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

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
from .caches import cached_length, parts
from .prompt_cache_reading import holds_caches, read_caches, read_metadata

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
        cache: mlx-lm's caches, as they stand after a generation with ``prompt_cache``.
        metadata: for whoever loads it. ``mlx_lm.generate`` wants "model", the model's
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
        cache, metadata = read_caches(path)
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
        metadata = read_metadata(path)
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
    if not holds_caches(path):
        raise PromptCacheError(f"{path}: exists and is no prompt cache; name another file")
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
        model: that is to go on with it.
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
