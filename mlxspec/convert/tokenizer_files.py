"""The tokenizer of an original checkpoint, and the files that mlx-lm wants of it."""

import json
import re
import shutil
from pathlib import Path

from ..errors import ConversionError

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")


def find_tokenizer_model(directory: Path, vocab_size: int) -> Path:
    """The checkpoint's SentencePiece model (``tokenizer.model``, ``tokenizer.model.v3``).

    Raises:
        ConversionError: there is none, it is of another kind, or has more pieces than the
            model has embeddings.
    """
    candidates = [directory / "tokenizer.model", *sorted(directory.glob("tokenizer.model.v*"))]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        if (directory / "tekken.json").is_file():
            raise ConversionError(
                f"{directory / 'tekken.json'}: Tekken tokenizers are not converted; "
                "use the model's Hugging Face version with --hf-path"
            )
        raise ConversionError(f"{candidates[0]}: does not exist")
    if _TIKTOKEN_LINE.match(_first_bytes(path)):
        raise ConversionError(
            f"{path}: tiktoken tokenizers (Llama 3) are not converted; "
            "use the model's Hugging Face version with --hf-path"
        )
    pieces = _sentencepiece(path).vocab_size()
    if pieces > vocab_size:
        raise ConversionError(f"{path}: has {pieces} pieces, the model {vocab_size} embeddings")
    return path


def _first_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1000)
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None


def special_token_ids(tokenizer_model: Path) -> dict[str, int]:
    """The ids of a text's begin and end, for ``config.json``."""
    processor = _sentencepiece(tokenizer_model)
    ids = {"bos_token_id": processor.bos_id(), "eos_token_id": processor.eos_id()}
    return {name: number for name, number in ids.items() if number >= 0}


def write_sentencepiece_files(tokenizer_model: Path, directory: Path) -> None:
    """Write ``tokenizer.json``, whose ids are SentencePiece's, its settings and the original."""
    from ..loading.sentencepiece_tokenizer import build_tokenizer, tokenizer_config

    build_tokenizer(tokenizer_model).save(str(directory / "tokenizer.json"))
    config = json.dumps(tokenizer_config(tokenizer_model), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    generation = json.dumps(special_token_ids(tokenizer_model), indent=2)
    (directory / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
    copy_tokenizer_model(tokenizer_model, directory)


def copy_tokenizer_model(tokenizer_model: Path, directory: Path) -> None:
    """Copy the SentencePiece model under its usual name."""
    shutil.copyfile(tokenizer_model, directory / "tokenizer.model")


def _sentencepiece(path: Path):  # type: ignore[no-untyped-def]  # the library has no types
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        raise ConversionError(f"{path}: is no SentencePiece model") from None
