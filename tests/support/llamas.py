"""Llamas by name: a random one, and trained ones where the third-party data is available."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from tests.support.examples import LONG
from tests.support.llama2c import load_llama2c
from tests.support.random_models import random_model
from tests.support.shared import SHARED

_TRAINED = {
    "stories260K": "models/stories260K/stories260K.bin",
    "babyllama": "models/babyllama_tok105/model5000.bin",
}
LLAMAS = ["random"]
if SHARED.is_dir():
    LLAMAS += ["stories260K"]
    if LONG:
        LLAMAS += ["babyllama"]


@cache
def llama(name: str) -> nn.Module:
    """Return one of ``LLAMAS`` in float32. All tests share it."""
    return load_llama2c(SHARED / _TRAINED[name]) if name in _TRAINED else _random_llama()


def repetitive_llama(**config: object) -> nn.Module:
    """Return a random Llama that repeats itself and never ends, with the bundled vocabulary.

    Only 59 of its tokens ever win; none is a special token or a byte.

    Args:
        config: added to its configuration.
    """
    own = {"vocab_size": 4096, "head_dim": 32, "tie_word_embeddings": False}
    model = random_model("llama", **own, **config)
    tokens = mx.arange(4096)[:, None]
    model.lm_head.weight *= mx.where((tokens >= 300) & (tokens % 64 == 7), 8.0, 0.1)
    mx.eval(model.parameters())
    return model


def _random_llama() -> nn.Module:
    """Return a Llama with confident, repetitive output that depends on its context."""
    model = random_model("llama", vocab_size=512, num_hidden_layers=3, tie_word_embeddings=False)

    def livelier(name: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2 or "embed" in name:
            return weight
        return (8 if "lm_head" in name else 2) * weight

    model.update(tree_map_with_path(livelier, model.parameters()))
    mx.eval(model.parameters())
    return model
