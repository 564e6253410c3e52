"""Drop-in generation keeps one decoder per model, and frees it with the model."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

import mlxspec
from mlxspec.compat import decoder_of
from tests.support.drop_in import FREE, demo_with_costs, give_costs
from tests.support.random_models import random_model


@pytest.fixture
def tokenizer() -> Any:
    return demo_with_costs()[1]


def used_model(tokenizer: Any) -> nn.Module:
    """Return a model that has generated."""
    model = random_model("llama", vocab_size=4096)
    give_costs(model, tokenizer)
    mlxspec.generate(model, tokenizer, FREE, max_tokens=2)
    return model


def unpickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, unpickled])
@pytest.mark.parametrize("original_lives", [True, False])
def test_a_copy_generates_with_its_own_weights(
    tokenizer: Any, copied: Callable[[nn.Module], nn.Module], original_lives: bool
) -> None:
    model = used_model(tokenizer)
    other = copied(model)
    # A shallow copy with its own modules and other weights.
    other.model = copy.deepcopy(model.model)
    other.apply(lambda weight: weight + 0.1 * mx.random.normal(weight.shape))
    if not original_lives:
        del model
    expected = mlx_lm.generate(other, tokenizer, FREE, max_tokens=8)
    give_costs(other, tokenizer)
    assert mlxspec.generate(other, tokenizer, FREE, max_tokens=8) == expected
    if original_lives:
        assert expected != mlxspec.generate(model, tokenizer, FREE, max_tokens=8)


def test_layers_of_other_sizes_have_costs_of_their_own(tokenizer: Any) -> None:
    model = used_model(tokenizer)
    before = decoder_of(model, tokenizer)
    model.apply(lambda weight: weight * 1.5)
    assert decoder_of(model, tokenizer) is before
    nn.quantize(model, group_size=32)
    assert decoder_of(model, tokenizer) is not before
    expected = mlx_lm.generate(model, tokenizer, FREE, max_tokens=8)
    give_costs(model, tokenizer)
    assert mlxspec.generate(model, tokenizer, FREE, max_tokens=8) == expected


def test_threads_share_one_decoder_from_the_first_call_on(tokenizer: Any) -> None:
    model, found = random_model("llama", vocab_size=4096), []
    start = threading.Barrier(8)

    def find() -> None:
        start.wait()
        found.append(decoder_of(model, tokenizer))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
