"""Loads a model's tokenizer, from Hugging Face's files or from SentencePiece's model alone.

A detokenizer turns token ids into pieces of text as they arrive. A loaded tokenizer has two: ours,
from this file, and mlx-lm's, for mlx-lm's functions and mlxspec's replacements for them. Ours holds
a character back until all of its tokens have arrived, and drops no space.

A SentencePiece decoder strips the space at the start of a text. Ours keeps it, since an output
always follows a prompt, even if that is only a BOS token. The text of a special token is its name.
An id beyond the vocabulary, which a padded output layer can produce, has no text. Tokenizers that
are neither byte-level nor of SentencePiece's kind use mlx-lm's detokenizer.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_lm.tokenizer_utils import (
    NaiveStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
    _is_bpe_decoder,
    _is_spm_decoder,
    _is_spm_decoder_no_space,
)
from mlx_lm.utils import load_tokenizer as load_hugging_face_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..drafting.p_accept import SPECIAL, class_of
from ..errors import LoadError, printable
from ..terminal import one_line
from .model_files import (
    find_directory,
    local_path,
    read_json_object,
)
from .sentencepiece_tokenizer import build_tokenizer

HUGGING_FACE_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
"""Files from which transformers can build a tokenizer without a repository's code."""
_KEPT_SETTINGS = {"bos_token", "eos_token", "pad_token", "chat_template"}


def load_tokenizer_of(source: str | Path) -> Any:
    """Load a model's tokenizer without the model.

    Args:
        source: a model as for :func:`mlxspec.load` (only its tokenizer is downloaded), a directory
            with a tokenizer's files, or a ``tokenizer.json`` or ``tokenizer.model``.

    Returns:
        mlx-lm's tokenizer wrapper, as :func:`mlxspec.load` returns it.

    Raises:
        LoadError: ``source`` has no tokenizer of a supported kind.
    """
    path = local_path(source)
    if path.name in ("tokenizer.json", "tokenizer.model") and path.is_file():
        source = path.parent
    directory = find_directory(source, None, weights=())
    return load_tokenizer(directory, None)


def has_chat_template(source: str | Path) -> bool:
    """Whether a model has a chat template; of a repository, only the tokenizer is downloaded.

    Raises:
        LoadError: as :func:`load_tokenizer_of`.
    """
    directory = find_directory(source, None, weights=())
    settings = directory / "tokenizer_config.json"
    if (
        (directory / "chat_template.jinja").is_file()
        or (settings.is_file() and read_json_object(settings).get("chat_template"))
        or _older_template(directory)
    ):
        return True  # without the second that it takes to build a tokenizer
    return bool(load_tokenizer(directory, None).has_chat_template)


def load_tokenizer(
    directory: Path,
    eos_token_ids: Collection[int] | int | None,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Load a tokenizer in mlx-lm's ``TokenizerWrapper``, with our streaming detokenizer.

    A ``tokenizer.model`` alone gives exactly SentencePiece's ids, unlike in transformers.

    Args:
        eos_token_ids: the EOS ids of the model's configuration, in addition to the tokenizer's own.
        settings: settings that override those in ``tokenizer_config.json``.

    Raises:
        LoadError: the tokenizer is missing, of an unsupported kind, or needs its repository's code.
    """
    with _errors_named(directory):
        if any((directory / name).is_file() for name in HUGGING_FACE_FILES):
            wrapper = _load(directory, eos_token_ids, settings or {})
        else:
            with TemporaryDirectory() as written:
                write_tokenizer(directory, Path(written))
                wrapper = _load(Path(written), eos_token_ids, settings or {})
        wrapper._tokenizer.name_or_path = str(directory)
        return wrapper


@contextmanager
def _errors_named(directory: Path) -> Iterator[None]:
    """Raise LoadError for any error of a library that reads a tokenizer."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:  # wrong settings make the libraries raise anything
        reason = one_line(error) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it needs Python code from its repository, which is never run"
        raise LoadError(f"{directory}: the tokenizer cannot be loaded: {reason}") from error


def _config_without_nulls(directory: Path) -> Any:
    """The model's settings for transformers, if it would refuse those that are null.

    It reads them to choose the tokenizer's class.
    """
    path = directory / "config.json"
    config = read_json_object(path) if path.is_file() else {}
    settings = {name: value for name, value in config.items() if value is not None}
    if len(settings) == len(config):
        return None
    try:
        AutoConfig.for_model(**config)
    except Exception:  # transformers' checks raise exceptions of any type
        try:
            return AutoConfig.for_model(**settings)
        except Exception:  # a type that transformers lacks
            return None
    return None


def _older_template(directory: Path) -> dict[str, Any]:
    """The setting ``chat_template`` from ``chat_template.json``, unless a newer file has one.

    transformers reads this file only for models with a processor, such as those of images.
    """
    older, settings = directory / "chat_template.json", directory / "tokenizer_config.json"
    if not older.is_file() or (directory / "chat_template.jinja").is_file():
        return {}
    if settings.is_file() and read_json_object(settings).get("chat_template"):
        return {}
    return {name: text for name, text in read_json_object(older).items() if name == "chat_template"}


def _load(
    directory: Path, eos_token_ids: Collection[int] | int | None, settings: Mapping[str, Any]
) -> TokenizerWrapper:
    ids = [eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids
    if not all(isinstance(token, int) for token in ids or ()):
        raise ValueError(f"eos_token_id is {ids!r}")
    how = {**settings, "trust_remote_code": False}
    if (config := _config_without_nulls(directory)) is not None:
        how["config"] = config
    how = {**_older_template(directory), **how}
    wrapper = load_hugging_face_tokenizer(directory, how, eos_token_ids=ids)
    wrapper._mlxspec_detokenizer = streaming_detokenizer(wrapper._tokenizer)
    return wrapper


def write_tokenizer(source: Path, target: Path) -> None:
    """Write ``tokenizer.json`` and its settings from SentencePiece's model.

    ``tokenizer_config.json`` adds the chat template, the special tokens and the tokens beyond the
    model's pieces.

    Args:
        source: a directory with ``tokenizer.model`` or, from Mistral, ``tokenizer.model.v3``.

    Raises:
        LoadError: the model is missing, of another kind, or its ids cannot be reproduced.
        OSError: ``target`` cannot be written.
    """
    paths = sorted(path for path in source.glob("tokenizer.model*") if path.is_file())
    if not paths:
        raise LoadError(
            f"{source}: no tokenizer.json or SentencePiece tokenizer.model, and Tekken's and "
            "tiktoken's files are not supported; use a version of the model with a tokenizer.json"
        )
    with _errors_named(source):
        tokenizer, settings = _with_added_tokens(source, paths[0])
        own = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    (target / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (target / "tokenizer_config.json").write_bytes(own)
    template = source / "chat_template.jinja"
    if template.is_file():
        shutil.copyfile(template, target / template.name)


def _with_added_tokens(source: Path, path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a SentencePiece model in ``source``, and its settings."""
    tokenizer, settings = build_tokenizer(path)
    own_settings = source / "tokenizer_config.json"
    given = read_json_object(own_settings) if own_settings.is_file() else {}
    settings |= {key: given[key] for key in _KEPT_SETTINGS & given.keys()} | _older_template(source)
    added = given.get("added_tokens_decoder") or {}
    for index in sorted(map(int, added)):
        token = added[str(index)]
        if index >= tokenizer.get_vocab_size():  # smaller ids are the model's own pieces
            tokenizer.add_tokens([AddedToken(token["content"], special=bool(token.get("special")))])
        if tokenizer.token_to_id(token["content"]) != index:
            raise LoadError(
                f"{own_settings}: the id {index} of an added token does not follow the other ids; "
                "use a version of the model with a tokenizer.json"
            )
    return tokenizer, settings


class VocabularyClasses(dict[int, int]):
    """The class of each token of a tokenizer, for :class:`.p_accept.AcceptanceModel`.

    A class is found on its first use, since large vocabularies take half a second.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer, self._size = tokenizer, len(tokenizer)
        self._special = {*tokenizer.all_special_ids}

    def __len__(self) -> int:
        return self._size

    def __missing__(self, token: int) -> int:
        token_class = SPECIAL
        if token not in self._special:
            token_class = class_of(self._tokenizer.convert_ids_to_tokens(token) or "")
        self[token] = token_class
        return token_class


def token_name(tokenizer: TokenizerWrapper, token: int) -> str | None:
    """A token's spelling and id, for messages; None if the tokenizer lacks it."""
    name = tokenizer.convert_ids_to_tokens(token) if 0 <= token < 1 << 31 else None
    return None if name is None else f"the token {printable(name)} (id {token})"


# --- detokenizers ---


class ByteDetokenizer(StreamingDetokenizer):
    """Collects the text of tokens that stand for the same bytes in every context.

    Bytes that are not UTF-8 become U+FFFD, as in ``bytes.decode("utf-8", "replace")``.

    Args:
        bytes_of: returns the bytes of a single token; empty for an id beyond the vocabulary.
        prefix_space: whether the tokenizer puts a space before every text. Then an output that is
            a separate text, such as an answer in a chat, starts with a spurious space.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], prefix_space: bool = False) -> None:
        self.token_bytes = bytes_of
        self.prefix_space = prefix_space
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and their text."""
        self.tokens: list[int] = []
        self.text = ""
        self.offset = 0  # the length of the text already read
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add_token(self, token: int) -> None:
        """Add the next token; its text may wait for later tokens."""
        self.tokens.append(token)
        self.text += self._decoder.decode(self.token_bytes(token))

    def finalize(self) -> None:
        """Release the held-back text, with U+FFFD for an incomplete character."""
        self.text += self._decoder.decode(b"", final=True)


# --- choosing a tokenizer's detokenizer ---

_BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}  # GPT-2's alphabet
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def detokenizer_of(wrapper: TokenizerWrapper) -> Any:
    """A new detokenizer without any text: ours, or mlx-lm's if mlx-lm loaded the tokenizer."""
    detokenizer = getattr(wrapper, "_mlxspec_detokenizer", None)
    if detokenizer is None:
        return wrapper.detokenizer
    fresh = copy.copy(detokenizer)
    fresh.reset()
    return fresh


def token_bytes(wrapper: TokenizerWrapper, token: int) -> bytes:
    """The bytes of a single token.

    They include leading spaces and incomplete characters, which decoding the token alone may drop.
    """
    detokenizer = getattr(wrapper, "_mlxspec_detokenizer", None) or getattr(
        wrapper, "_mlxspec_bytes", None
    )
    if detokenizer is None:  # mlx-lm loaded it, so its detokenizer makes the output's text
        detokenizer = wrapper._mlxspec_bytes = streaming_detokenizer(wrapper._tokenizer)
    if isinstance(detokenizer, ByteDetokenizer):
        return detokenizer.token_bytes(token)
    return str(wrapper.decode([token])).encode()


def streaming_detokenizer(tokenizer: PreTrainedTokenizerBase) -> StreamingDetokenizer:
    """The detokenizer for a transformers tokenizer, chosen by its kind of decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return NaiveStreamingDetokenizer(tokenizer)
    decoder = json.loads(backend.decoder.__getstate__())
    prefix_space = _is_spm_decoder(decoder)
    if _is_bpe_decoder(decoder):
        to_bytes = _byte_level_bytes
    elif prefix_space or _is_spm_decoder_no_space(decoder):
        to_bytes = _sentencepiece_bytes
    else:
        return NaiveStreamingDetokenizer(tokenizer)

    @cache
    def bytes_of(token: int) -> bytes:
        name = backend.id_to_token(token)
        return b"" if name is None else to_bytes(name)

    return ByteDetokenizer(bytes_of, prefix_space)


def _sentencepiece_bytes(name: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()


def _byte_level_bytes(name: str) -> bytes:
    # A name with a character outside GPT-2's alphabet belongs to an added token: plain text.
    try:
        return bytes(_BYTES[sign] for sign in name)
    except KeyError:
        return name.encode()
