"""The tokenizer of a model directory: Hugging Face's files, or SentencePiece's model alone."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer as load_hugging_face_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ..errors import LoadError
from .detokenizer import with_own_detokenizer, wrap
from .model import DEMO, DEMO_DIRECTORY
from .model_files import check_name, check_readable, download, is_repository_name, local_path
from .sentencepiece_tokenizer import build_tokenizer, tokenizer_config

# Besides SentencePiece's model, what transformers builds a tokenizer from without further code.
_HUGGING_FACE_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
_OTHER_FILES = {
    "tekken.json": "a Tekken tokenizer",
    "*.tiktoken": "a tiktoken tokenizer",
    "tiktoken.model": "a tiktoken tokenizer",
}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


def load_tokenizer(
    directory: Path,
    eos_token_ids: Collection[int] | int | None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """mlx-lm's ``TokenizerWrapper``, with this package's streaming detokenizer beside its own.

    ``tokenizer.json`` comes first. A ``tokenizer.model`` without it gives SentencePiece's ids,
    which transformers would not; ``tokenizer_config.json`` adds the chat template, the special
    tokens and the tokens beyond the model's pieces.

    Args:
        directory: where the tokenizer's files are.
        eos_token_ids: what ends an output according to the model's configuration, besides the
            tokenizer's own EOS.
        settings: go before those of ``tokenizer_config.json``.

    Raises:
        LoadError: no tokenizer, one of a kind that is not read, or one that needs its
            repository's code.
    """
    settings = {**(settings or {})}
    settings.pop("trust_remote_code", None)
    has_own = (directory / "tokenizer.json").is_file()
    sentencepiece = not has_own and (directory / "tokenizer.model").is_file()
    try:
        if isinstance(eos_token_ids, int):
            eos_token_ids = [eos_token_ids]
        if not all(isinstance(token, int) for token in eos_token_ids or ()):
            raise ValueError(f"eos_token_id is {eos_token_ids!r}")
        load = _load_sentencepiece if sentencepiece else _load_hugging_face
        tokenizer = load(directory, eos_token_ids, settings)
        _check_template(tokenizer.chat_template)
    except LoadError:
        raise
    except Exception as error:  # whatever wrong settings make the libraries raise
        if "trust_remote_code" in str(error):
            reason = "it needs Python code from its repository, which is never run"
        else:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise LoadError(f"{directory}: the tokenizer cannot be loaded: {reason}") from error
    return tokenizer


def _load_hugging_face(
    directory: Path, eos_token_ids: Collection[int] | None, settings: dict[str, Any]
) -> TokenizerWrapper:
    if not any((directory / name).is_file() for name in _HUGGING_FACE_FILES):
        raise LoadError(_no_tokenizer(directory))
    wrapper = load_hugging_face_tokenizer(
        directory, settings | {"trust_remote_code": False}, eos_token_ids=eos_token_ids
    )
    return with_own_detokenizer(wrapper)


def _check_template(template: object) -> None:
    """Raise ValueError for a chat template that is no text, nor several by name."""
    texts = template.values() if isinstance(template, dict) else [template]
    if template is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError("its chat template is no text")


def _no_tokenizer(directory: Path) -> str:
    for pattern, kind in _OTHER_FILES.items():
        if found := sorted(directory.glob(pattern)):
            return (
                f"{found[0]}: {kind} is not read; use a version of the model that has a "
                "tokenizer.json"
            )
    return f"{directory}: no tokenizer.json and no tokenizer.model; copy the model's own there"


def _load_sentencepiece(
    directory: Path, eos_token_ids: Collection[int] | None, given: dict[str, Any]
) -> TokenizerWrapper:
    path = directory / "tokenizer.model"
    tokenizer = build_tokenizer(path)
    settings = tokenizer_config(path)
    own = _read_json(directory / "tokenizer_config.json") | given
    try:
        _add_tokens(tokenizer, own.get("added_tokens_decoder") or {}, path)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise LoadError(
            f"{directory}: tokenizer_config.json has a damaged added_tokens_decoder ({error})"
        ) from error
    for key in _SPECIAL_TOKENS:
        token = own.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None:
            if not isinstance(name, str) or tokenizer.token_to_id(name) is None:
                raise LoadError(f"{directory}: the tokenizer's {key} {name!r} is no token of it")
            settings[key] = name
    for key in ("chat_template", "add_bos_token"):
        if own.get(key) is not None:
            settings[key] = own[key]
    template = directory / "chat_template.jinja"
    if template.is_file() and "chat_template" not in given:
        settings["chat_template"] = template.read_text(encoding="utf-8")
    del settings["tokenizer_class"]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, name_or_path=str(directory), **(given | settings)
    )
    return wrap(wrapped, eos_token_ids=eos_token_ids)


def _add_tokens(tokenizer: Tokenizer, added: dict[str, Any], path: Path) -> None:
    """Add the tokens beyond SentencePiece's pieces, whose ids must follow on."""
    for index, token in sorted((int(key), value) for key, value in added.items()):
        if tokenizer.id_to_token(index) == token["content"]:
            continue
        if index != tokenizer.get_vocab_size():
            raise LoadError(
                f"{path}: the added token {token['content']!r} cannot have the id {index}; use a "
                "version of the model that has a tokenizer.json"
            )
        tokenizer.add_tokens(
            [AddedToken(token["content"], special=bool(token.get("special")), normalized=True)]
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: no valid JSON ({error})") from error
    return content if isinstance(content, dict) else {}


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
