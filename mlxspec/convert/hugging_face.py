"""Loads Hugging Face checkpoints with mlx-lm's classes, or only the trained heads in them."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ConversionError
from ..models.heads import Head, named_kind
from ..models.heads import loading as heads
from ..models.heads.chains import QwenMTP, norms_centred_at_zero
from ..models.model import load_lazily
from ..models.model_files import find_directory, local_path, read_config

# Never *.py, since a repository's code is not trusted.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "generation_config.json", "LICENSE*"),
)


def open_hugging_face(
    path_or_repo: str | Path, revision: str | None = None, head: bool = False
) -> Path:
    """The directory of a checkpoint, downloaded from the Hub unless it is local.

    Args:
        path_or_repo: a directory or a repository on the Hub.
        revision: branch, tag or commit of the repository.
        head: download only the files with a trained head.

    Raises:
        ConversionError: ``revision`` is given for a directory.
        LoadError: no directory or repository has this name, or the download fails.
    """
    if revision is not None and local_path(path_or_repo).is_dir():
        raise ConversionError(
            f"--revision cannot be used with a directory ({path_or_repo}): leave it out"
        )
    find = heads.head_directory if head else find_directory
    return find(path_or_repo, revision)


def load_hugging_face(directory: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load mlx-lm's model with a checkpoint's unevaluated weights, and its configuration.

    Raises:
        ConversionError: the directory has an original checkpoint, or a trained head.
        LoadError: a file is missing or damaged, or mlx-lm cannot load the checkpoint.
    """
    if not (directory / "config.json").is_file() and (directory / "params.json").is_file():
        raise ConversionError(f"{directory}: is an original checkpoint; use --torch-path for it")
    config = read_config(directory)
    if named_kind(config):
        raise ConversionError(f"{directory}: a trained head, not a model; convert it with --head")
    return load_lazily(directory, config)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files unchanged, or make ``tokenizer.json`` from SentencePiece's model.

    mlx-lm's ``save`` would write transformers' version of them, and copy Python files.
    """
    from ..models.tokenizer import load_tokenizer

    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, target / path.name)
    if (source / "tokenizer.model").is_file() and not (source / "tokenizer.json").is_file():
        load_tokenizer(source, None).save_pretrained(target)


# --- trained heads ---


def load_head_alone(directory: Path) -> tuple[Head, dict[str, Any], str]:
    """Load a head with unevaluated weights.

    Args:
        directory: a head's folder, or that of a model which carries one.

    Returns:
        the head, its configuration, and in words its kind and which of its norms were changed:
        a checkpoint's norms may be centred at zero, and those that the head applies are not.

    Raises:
        LoadError: there is no head of a kind that is supported, or a file is damaged.
    """
    found = heads.find_head(directory)
    head, tensors = heads.load_lazily(found)
    config = dict(found.config)
    about = found.kind.title
    if found.kind is QwenMTP and not config.get(heads.CONVERTED):
        about += f", {_norms(tensors)}"
    return head, {**config, heads.CONVERTED: True}, about


def _norms(tensors: dict[str, mx.array]) -> str:
    """What :meth:`QwenMTP.sanitize` does to the norms of a checkpoint with these tensors."""
    norms = sum("norm" in name and array.ndim == 1 for name, array in tensors.items())
    centred = len(norms_centred_at_zero(tensors))
    changes = (
        f"{centred} centred at zero, 1.0 added" if centred else "",
        f"{norms - centred} as they are" if norms > centred else "",
    )
    return f"norms: {'; '.join(filter(None, changes))}"
