"""Llamas to decode with."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.support.llamas import LLAMAS, llama


@pytest.fixture(scope="session", params=LLAMAS[:2])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A random Llama, then stories260K where it is there; both have 512 tokens."""
    return llama(request.param)


@pytest.fixture(scope="session")
def tiny() -> nn.Module:
    """A random Llama with a vocabulary of 8: every distribution can be computed in full."""
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(5)
    args = ModelArgs(
        model_type="llama",
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=8,
        max_position_embeddings=512,
    )
    model = Model(args)
    model.update(
        {"model": {"embed_tokens": {"weight": 0.3 * mx.random.normal((8, 16))}}}
    )  # a lively distribution
    mx.eval(model.parameters())
    return model
