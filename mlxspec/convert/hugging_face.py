"""Hugging Face checkpoints of every architecture that mlx-lm knows, through its own classes."""

import shutil
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import ConversionError
from ..models.model import load_lazily
from ..models.model_files import find_directory, local_path, read_config

# Never *.py: what a repository's code does is its author's choice.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "generation_config.json", "LICENSE*"),
)


def open_hugging_face(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint, downloaded from the Hub if it is not a local one.

    Raises:
        ConversionError: a directory has no revisions.
        LoadError: there is no such directory or repository, or it cannot be downloaded.
    """
    if revision is not None and local_path(path_or_repo).is_dir():
        raise ConversionError(f"{path_or_repo}: is a directory, which has no --revision")
    return find_directory(path_or_repo, revision)


def load_hugging_face(directory: Path) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's model with the weights of a checkpoint, not evaluated yet, and its configuration.

    Raises:
        ConversionError: it is an original checkpoint.
        LoadError: a file is missing or damaged, or mlx-lm cannot load the checkpoint.
    """
    if not (directory / "config.json").is_file() and (directory / "params.json").is_file():
        raise ConversionError(f"{directory}: has no config.json; use --torch-path for an original")
    return load_lazily(directory, read_config(directory))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer as it is, or make ``tokenizer.json`` of SentencePiece's model.

    mlx-lm's ``save`` would write what transformers made of it instead, and copy Python files.
    """
    from ..models.tokenizer import load_tokenizer

    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, target / path.name)
    if (source / "tokenizer.model").is_file() and not (source / "tokenizer.json").is_file():
        load_tokenizer(source, None).save_pretrained(target)
