"""Real tokenizers of every kind."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.sentencepiece_tokenizer import build_tokenizer
from mlxspec.models.tokenizer import streaming_detokenizer
from tests.support.shared import SHARED

DEMO = DEMO_DIRECTORY / "tokenizer.model"
SENTENCEPIECE = {"demo": DEMO}
"""SentencePiece models by name: the bundled one, and published ones where available."""
if SHARED.is_dir():
    SENTENCEPIECE |= {
        "mistral v1": SHARED / "tokenizers/mistral/tokenizer.model.v1",
        "mistral v3": SHARED / "tokenizers/mistral/mistral_instruct_tokenizer_240323.model.v3",
        "llama 2": SHARED / "tokenizers/llama2/tokenizer.model",
        "babyllama": SHARED / "models/babyllama_tok105/tok105.model",
    }
_SAMPLE = Path(__file__).with_name("random_models.py").read_text() + "日本語 👩‍🚀 é ñ привет"


@cache
def sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer rebuilt from a SentencePiece model."""
    return PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(path)[0], bos_token="<s>", eos_token="</s>"
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer like GPT-2's, with two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<｜user▁turn｜>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@cache
def word_piece() -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer like BERT's."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    tokenizer.train_from_iterator([_SAMPLE], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[CLS]")


def wrap(tokenizer: PreTrainedTokenizerFast, **settings: Any) -> TokenizerWrapper:
    """Wrap a tokenizer as loading does: in mlx-lm's wrapper, with our detokenizer."""
    wrapper = TokenizerWrapper(tokenizer, **settings)
    wrapper._mlxspec_detokenizer = streaming_detokenizer(tokenizer)
    return wrapper
