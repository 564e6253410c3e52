"""Prompt caches in files, in mlx-lm's format: what either writes, both read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from ..errors import PromptCacheError
from ..files import check_writable, replaced
from .step_caches import cached_length, parts

_SUFFIX = ".safetensors"
_FIRST_CLASS = "1.0"  # a metadata key of mlx-lm's
_TOKENS = "tokens"  # a metadata key that mlx-lm's own files lack


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
    try:
        if not Path(file_name).is_file():
            raise PromptCacheError(
                f"{file_name}: there is no such file; make it with 'mlxspec cache-prompt'"
            )
        open(file_name, "rb").close()  # MLX would not say why it cannot
        cache, metadata = mlx_lm_caches.load_prompt_cache(str(file_name), return_metadata=True)
        mx.eval([part.state for part in cache])
    except OSError as error:
        raise PromptCacheError(
            f"{file_name} cannot be read ({error.strerror}): name a file that you can read"
        ) from error
    except RuntimeError as error:
        raise PromptCacheError(
            f"{file_name} is truncated or damaged: make it again with 'mlxspec cache-prompt'"
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise PromptCacheError(
            f"{file_name} holds no prompt cache that this version of mlx-lm reads: make it with "
            "'mlxspec cache-prompt'"
        ) from error
    # Nothing at all is flattened to an empty list.
    return (cache, dict(metadata or {})) if return_metadata else cache


def prompt_cache_path(file_name: str | os.PathLike[str]) -> Path:
    """The file that :func:`save_prompt_cache` will write, before there is anything to write.

    Raises:
        PromptCacheError: it cannot be written.
    """
    path = Path(file_name)
    if path.suffix != _SUFFIX:
        path = path.with_name(path.name + _SUFFIX)
    check_writable(path, PromptCacheError)
    return path


def check_replaceable(path: Path, force: bool) -> None:
    """Refuse to write over what is not to be lost.

    Args:
        path: from :func:`prompt_cache_path`.
        force: whether a prompt cache that is there may be replaced.

    Raises:
        PromptCacheError: there is a prompt cache, or even something else.
        OSError: what is there cannot be read.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return
    if not _is_prompt_cache(path):
        raise PromptCacheError(f"{path}: exists and is no prompt cache; name another file")
    if not force:
        raise PromptCacheError(f"{path}: exists; name another file, or replace it with --force")


def _is_prompt_cache(path: Path) -> bool:
    """Whether the file's header says of which classes its caches are."""
    open(path, "rb").close()  # MLX would not say why it cannot
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except RuntimeError:
        return False
    return "Cache" in loaded[1].get(_FIRST_CLASS, "")


def tokens_in(cache: Sequence[Any], metadata: Mapping[str, str]) -> list[int]:
    """What a loaded cache holds; nothing where its file does not say so, as mlx-lm's."""
    try:
        tokens = json.loads(metadata.get(_TOKENS, "[]"))
    except ValueError:
        return []
    known = isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
    return tokens if known and cached_length(cache) in (0, len(tokens)) else []


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
        fits = _layout(_quantized_like(cache, own)) == _layout(parts(cache))
    except (ValueError, NotImplementedError):  # the model's cannot be quantised like that
        fits = False
    if not fits:
        raise PromptCacheError(
            f"{source} is another model's: its keys and values have other shapes; name the "
            "model that made it"
        )


def _quantized_like(cache: Iterable[Any], own: Iterable[Any]) -> list[Any]:
    return [
        mine.to_quantized(theirs.group_size, theirs.bits)
        if isinstance(theirs, QuantizedKVCache) and hasattr(mine, "to_quantized")
        else mine
        for theirs, mine in zip(parts(cache), parts(own), strict=True)
    ]


def _layout(caches: Iterable[Any]) -> list[list[tuple[int, ...]]]:
    """The shapes of what caches hold, without the number of positions."""
    return [
        [
            (*array.shape[:2], *array.shape[3:]) if array.ndim == 4 else array.shape
            for _, array in tree_flatten(cache.state)
            if isinstance(array, mx.array)
        ]
        for cache in caches
    ]
