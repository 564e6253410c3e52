"""Llamas for the engine tests."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.support.llamas import LLAMAS, llama


@pytest.fixture(scope="session", params=LLAMAS[:2])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A random Llama, and stories260K where it is available. Both have 512 tokens."""
    return llama(request.param)


@pytest.fixture(scope="session")
def tiny() -> nn.Module:
    """A random Llama with a vocabulary of 8, so that tests can compute whole distributions."""
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
    )  # a distribution far from uniform
    mx.eval(model.parameters())
    return model
