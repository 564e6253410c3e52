"""A tokenizer without its model, from wherever a user may have one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..errors import LoadError
from .detokenizer import wrap
from .hub import download, is_repository_name
from .loading import DEMO, DEMO_DIRECTORY
from .model_files import check_name, check_readable, local_path
from .sentencepiece_tokenizer import build_tokenizer, tokenizer_config
from .tokenizer_loading import load_tokenizer


def load_tokenizer_of(source: str | Path, *, revision: str | None = None) -> Any:
    """Load a model's tokenizer and nothing else of the model.

    Args:
        source: whatever :func:`mlxspec.load` takes (of a repository on the Hub only the
            tokenizer is downloaded), a directory with no more than a tokenizer's files, a
            ``tokenizer.json``, or SentencePiece's model in a file of any name.
        revision: branch, tag or commit of the repository.

    Returns:
        mlx-lm's tokenizer wrapper, as :func:`mlxspec.load` gives it.

    Raises:
        LoadError: there is no tokenizer, or one of a kind that is not read.
    """
    path = DEMO_DIRECTORY if source == DEMO else local_path(source)
    check_name(path)
    if path.is_file():
        return _from_file(path)
    if not path.is_dir():
        if not is_repository_name(os.fspath(source)):
            raise LoadError(
                f"{source}: no such file or directory, and no name of a Hub repository (owner/name)"
            )
        path = download(os.fspath(source), revision, weights=False)
    check_readable(path)
    return load_tokenizer(path, None)


def _from_file(path: Path) -> TokenizerWrapper:
    # tokenizer.json and tokenizer.model are called after where they are.
    name = str(path.parent if path.stem == "tokenizer" else path)
    if path.suffix == ".json":
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise LoadError(f"{path}: no tokenizer of Hugging Face's ({error})") from error
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=name)
    else:
        settings = tokenizer_config(path)
        del settings["tokenizer_class"]
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=build_tokenizer(path), name_or_path=name, **settings
        )
    return wrap(wrapped)
