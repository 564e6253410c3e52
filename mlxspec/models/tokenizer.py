"""Loads a model's tokenizer, from Hugging Face's files or from SentencePiece's model alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer as load_hugging_face_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ..drafting.acceptance import token_classes
from ..errors import LoadError
from .detokenizer import with_own_detokenizer, wrap
from .model_files import (
    check_readable,
    find_directory,
    local_path,
    one_line,
    read_json_object,
)
from .sentencepiece_tokenizer import build_tokenizer

# Files from which transformers builds a tokenizer without further code, besides SentencePiece's.
_HUGGING_FACE_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
_OTHER_FILES = ("tekken.json", "*.tiktoken", "tiktoken.model")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


def load_tokenizer_of(source: str | Path) -> Any:
    """Load a model's tokenizer without the model.

    Args:
        source: a model as for :func:`mlxspec.load`, of which only the tokenizer is downloaded, a
            directory with a tokenizer's files, or the ``tokenizer.json`` or ``tokenizer.model`` in
            it.

    Returns:
        mlx-lm's tokenizer wrapper, as :func:`mlxspec.load` returns it.

    Raises:
        LoadError: ``source`` has no tokenizer of a supported kind.
    """
    path = local_path(source)
    if path.name in ("tokenizer.json", "tokenizer.model") and path.is_file():
        source = path.parent
    directory = find_directory(source, None, weights=())
    check_readable(directory)
    return load_tokenizer(directory, None)


def load_tokenizer(
    directory: Path,
    eos_token_ids: Collection[int] | int | None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Load a tokenizer in mlx-lm's ``TokenizerWrapper``, with our streaming detokenizer.

    ``tokenizer.json`` comes first. A ``tokenizer.model`` alone gives SentencePiece's ids, which
    transformers does not. ``tokenizer_config.json`` adds the chat template, the special tokens and
    the tokens beyond the model's pieces.

    Args:
        directory: the directory of the tokenizer's files.
        eos_token_ids: the EOS ids of the model's configuration, in addition to the tokenizer's own.
        settings: override those of ``tokenizer_config.json``.

    Raises:
        LoadError: the tokenizer is missing, of an unsupported kind, or needs its repository's code.
    """
    given = {**(settings or {})}
    given.pop("trust_remote_code", None)
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
    try:
        if not all(isinstance(token, int) for token in ids or ()):
            raise ValueError(f"eos_token_id is {ids!r}")
        if (
            not (directory / "tokenizer.json").is_file()
            and (directory / "tokenizer.model").is_file()
        ):
            wrapper = wrap(_sentencepiece(directory, given), eos_token_ids=ids)
        elif any((directory / name).is_file() for name in _HUGGING_FACE_FILES):
            wrapper = with_own_detokenizer(
                load_hugging_face_tokenizer(
                    directory, given | {"trust_remote_code": False}, eos_token_ids=ids
                )
            )
        else:
            raise LoadError(_no_tokenizer(directory))
        template = wrapper.chat_template
        texts = template.values() if isinstance(template, dict) else [template or ""]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its chat template must be text")
    except LoadError:
        raise
    except Exception as error:  # whatever wrong settings make the libraries raise
        reason = one_line(error) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it needs Python code from its repository, which is never run"
        raise LoadError(f"{directory}: the tokenizer cannot be loaded: {reason}") from error
    return wrapper


def _no_tokenizer(directory: Path) -> str:
    for path in (path for pattern in _OTHER_FILES for path in directory.glob(pattern)):
        kind = "Tekken" if path.suffix == ".json" else "tiktoken"
        return f"{path}: a {kind} tokenizer; use a version of the model with a tokenizer.json"
    return f"{directory}: no tokenizer.json or tokenizer.model; copy the model's own there"


def _sentencepiece(directory: Path, given: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SentencePiece's model with the settings of ``tokenizer_config.json`` next to it."""
    path, own_settings = directory / "tokenizer.model", directory / "tokenizer_config.json"
    tokenizer, settings = build_tokenizer(path)
    own = (read_json_object(own_settings) if own_settings.is_file() else {}) | given
    try:
        _add_tokens(tokenizer, own.get("added_tokens_decoder") or {}, path)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise LoadError(f"{directory}: its added_tokens_decoder is damaged ({error})") from error
    for key in _SPECIAL_TOKENS:
        token = own.get(key)
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None:
            if not isinstance(name, str) or tokenizer.token_to_id(name) is None:
                raise LoadError(f"{own_settings}: its {key} {name!r} is not in the vocabulary")
            settings[key] = name
    for key in ("chat_template", "add_bos_token"):
        if own.get(key) is not None:
            settings[key] = own[key]
    template = directory / "chat_template.jinja"
    if template.is_file() and "chat_template" not in given:
        settings["chat_template"] = template.read_text(encoding="utf-8")
    del settings["tokenizer_class"]
    settings |= {"name_or_path": str(directory)} | given
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)


def _add_tokens(tokenizer: Tokenizer, added: dict[str, Any], path: Path) -> None:
    """Add the tokens beyond SentencePiece's pieces, whose ids must continue those of the pieces."""
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


def vocabulary_classes(tokenizer: Any) -> bytes:
    """The class of each token, for :class:`mlxspec.drafting.acceptance.AcceptanceModel`."""
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return token_classes([piece or "" for piece in pieces], set(tokenizer.all_special_ids))
