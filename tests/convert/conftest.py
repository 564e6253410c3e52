"""Fixtures of the conversion tests."""

import io
from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer

from tests.support import original


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 320 pieces, of the same kind as Mistral's and Llama's."""
    text = (
        "a model reads words and the words that follow them\nso that it can write more of them\n"
        * 20
    )
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer_model: Path) -> Path:
    """An original checkpoint in bfloat16, with an untied output layer."""
    weights = original.as_bfloat16(original.random_weights())
    return original.write_checkpoint(
        tmp_path_factory.mktemp("original") / "checkpoint", tokenizer_model, weights
    )
