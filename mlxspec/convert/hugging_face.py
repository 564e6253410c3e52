"""Loads Hugging Face checkpoints of all architectures in mlx-lm, with mlx-lm's classes."""

import shutil
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import ConversionError
from ..models.heads import named_kind
from ..models.model import load_lazily
from ..models.model_files import find_directory, local_path, read_config

# Never *.py, since a repository's code is not trusted.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "generation_config.json", "LICENSE*"),
)


def open_hugging_face(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint, downloaded from the Hub unless it is local.

    Raises:
        ConversionError: ``revision`` is given for a directory.
        LoadError: no directory or repository has this name, or the download fails.
    """
    check_revision(path_or_repo, revision)
    return find_directory(path_or_repo, revision)


def check_revision(path_or_repo: str | Path, revision: str | None) -> None:
    """Raise ConversionError if ``revision`` is given for a directory."""
    if revision is not None and local_path(path_or_repo).is_dir():
        raise ConversionError(
            f"--revision cannot be used with a directory ({path_or_repo}): leave it out"
        )


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
