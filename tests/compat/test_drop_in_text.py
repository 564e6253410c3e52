"""Drop-in generation yields mlx-lm's text, whichever library loaded the tokenizer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
)
from mlx_lm.utils import load_tokenizer as load_as_mlx_lm

import mlxspec
from mlxspec.models.tokenizer import load_tokenizer
from tests.support.drop_in import (
    FREE,
    batch_generate,
    give_costs,
    stream_generate,
    write_float32_demo,
)
from tests.support.examples import examples
from tests.support.random_models import random_model
from tests.support.tokenizer_kinds import DEMO, byte_level, sentencepiece, word_piece

pytestmark = pytest.mark.slow

ROWS = 16
KINDS: dict[str, type[StreamingDetokenizer]] = {
    "sentencepiece": SPMStreamingDetokenizer,
    "sentencepiece without strip": SPMStreamingDetokenizer,
    "byte level": BPEStreamingDetokenizer,
    "word piece": NaiveStreamingDetokenizer,
}


class Dictated(nn.Module):
    """A model that generates given tokens for any input."""

    def __init__(self, model: nn.Module, tokens: list[int]) -> None:
        super().__init__()
        self.model = model
        self._tokens = tokens

    @property
    def layers(self) -> Any:
        return self.model.layers

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        offset = cache[0].offset
        logits = self.model(inputs, cache=cache)
        after = range(offset, offset + inputs.shape[1])
        tokens = mx.array([self._tokens[place % len(self._tokens)] for place in after])
        return logits + 1e6 * (mx.arange(logits.shape[-1]) == tokens[:, None])


def write_tokenizer(kind: str, directory: Path) -> None:
    if kind == "byte level":
        tokenizer = byte_level()
    elif kind == "word piece":
        tokenizer = word_piece()
    else:
        tokenizer = sentencepiece(DEMO)
    tokenizer.save_pretrained(directory)
    if kind == "sentencepiece without strip":
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text())
        del content["decoder"]["decoders"][-1]
        path.write_text(json.dumps(content))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_mlx_lm_s_with_every_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    """For random tokens, some of them single bytes that split characters."""
    write_tokenizer(kind, tmp_path)
    theirs, ours = load_as_mlx_lm(tmp_path), load_tokenizer(tmp_path, None)
    assert isinstance(theirs.detokenizer, KINDS[kind])
    size = len(theirs)
    inner = random_model("llama", vocab_size=size)
    drawn = Random(kind)
    for text in ("  two\n\n  lines 日本語 👩‍🚀 é\n", *[None] * examples(1)):
        if text is None:
            tokens = [drawn.randrange(size) for _ in range(40)]
            tokens += [drawn.randrange(min(size, 260)) for _ in range(40)]
        else:
            tokens = ours.encode(text, add_special_tokens=False)
        model = Dictated(inner, tokens)
        expected = [r.text for r in stream_generate(model, theirs, [5, 6], max_tokens=60)]
        for tokenizer in (ours, theirs):
            give_costs(model, tokenizer)
            actual = mlxspec.stream_generate(model, tokenizer, [5, 6], max_tokens=60)
            assert [r.text for r in actual] == expected
            with mlxspec.augment(), warnings.catch_warnings():
                warnings.simplefilter("error")
                text = mlx_lm.generate(model, tokenizer, [5, 6], max_tokens=60)
            assert text == "".join(expected)


@pytest.mark.nightly
def test_texts_of_the_demo_model_are_mlx_lm_s_however_it_was_loaded(tmp_path: Path) -> None:
    directory = write_float32_demo(tmp_path)
    model, tokenizer = mlx_lm.load(directory)
    loaded = mlxspec.load(directory)
    for prompt in (FREE, "[INST] Count to ten. [/INST]"):
        expected = [r.text for r in stream_generate(model, tokenizer, prompt, max_tokens=10)]
        ids = [tokenizer.encode(prompt)]
        texts = batch_generate(model, tokenizer, ids, max_tokens=10).texts
        for each in ((model, tokenizer), loaded):
            give_costs(*each)
            actual = mlxspec.stream_generate(*each, prompt, max_tokens=10)
            assert [r.text for r in actual] == expected
            assert mlxspec.generate(*each, prompt, max_tokens=10) == "".join(expected)
            assert mlxspec.batch_generate(*each, ids, max_tokens=10).texts == texts
