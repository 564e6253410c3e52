"""Heads that draft blocks, compared with mlx-vlm's modules with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxspec.errors import LoadError
from mlxspec.models.heads.blocks import DFlash, DSpark
from tests.support.heads import dflash, dspark
from tests.support.random_models import random_model

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
LENGTHS = [3, 7, 20]  # less than a window, almost a window, and more

TARGET = random_model("qwen3", tie_word_embeddings=True)
EMBEDDING = TARGET.model.embed_tokens


def bound(head: Any) -> Any:
    head.bind(EMBEDDING, EMBEDDING.as_linear)
    return head


def states(rows: int, seed: int = 0) -> list[mx.array]:
    """Return random hidden states of the two layers that the heads read, (rows, width) each."""
    random = np.random.default_rng(seed)
    return [mx.array(random.normal(size=(rows, 32)).astype(np.float32)) for _ in range(2)]


def features(head: Any, of_layers: Sequence[mx.array]) -> mx.array:
    return head.features(of_layers)[None]


def part(of_layers: Sequence[mx.array], start: int, end: int) -> list[mx.array]:
    return [of_layer[start:end] for of_layer in of_layers]


def reference(head: Any, config: dict[str, Any]) -> Any:
    """Return mlx-vlm's module with our head's weights."""
    reason = "needs mlx-vlm as the reference"
    package = "mlx_vlm.speculative.drafters."
    if isinstance(head, DSpark):
        module = pytest.importorskip(package + "dspark", reason=reason)
        config = {**config, "dflash_config": {"projector_type": "dspark"}}
    else:
        module = pytest.importorskip(package + "qwen3_dflash", reason=reason)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.load_weights(tree_flatten(head.parameters()))
    model.embed_tokens, model.lm_head = EMBEDDING, EMBEDDING.as_linear
    causal = config.get("is_causal")
    for layer in model.layers:  # like z-lab's module; 0.7.10 treats an undeclared one as False
        layer.self_attn.is_causal = layer.self_attn.is_sliding if causal is None else causal
    return model


def expected(model: Any, token: int, depth: int, of_layers: Sequence[mx.array]) -> mx.array:
    """Return mlx-vlm's logits for a block after all these positions, without a cache."""
    first = 0 if hasattr(model, "markov_head") else 1
    block = mx.array([[token] + [model.config.mask_token_id] * (first + depth - 1)])
    context = mx.concatenate(list(of_layers), axis=-1)[None]
    return model(block, context, model.make_cache())[:, first:]


def drafted(
    head: Any, token: int, depth: int, new: Sequence[mx.array], cache: Sequence[Any]
) -> mx.array:
    hidden = head.block(mx.array([token]), depth, [features(head, new)], [cache])
    assert hidden.shape == (1, depth, 32)
    return head.logits(hidden)


def assert_close(logits: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(np.array(logits), np.array(expected), rtol=1e-5, atol=2e-6)


HEADS = pytest.mark.parametrize("make", [dflash, dspark])
SETTINGS = pytest.mark.parametrize(
    "settings", [{}, SLIDING, {"is_causal": True}, {**SLIDING, "is_causal": True}]
)


@HEADS
@SETTINGS
@pytest.mark.parametrize("length", LENGTHS)
def test_a_block_after_a_prompt(make: Any, settings: dict[str, Any], length: int) -> None:
    config, head = make(TARGET, **settings)
    prompt = states(length)
    for depth in (head.most, 2, 1):
        truth = expected(reference(bound(head), config), 9, depth, prompt)
        assert_close(drafted(head, 9, depth, prompt, head.make_cache()), truth)


@HEADS
@SETTINGS
def test_blocks_after_verified_positions_and_cuts(make: Any, settings: dict[str, Any]) -> None:
    config, head = make(TARGET, **settings)
    model, all_states, cache = reference(bound(head), config), states(24), head.make_cache()
    head.see([features(head, part(all_states, 0, 5))], [cache])
    for end in (7, 8, 15, 15, 16):  # the second 15: its cache is complete
        new = part(all_states, cache[0].offset, end)
        truth = expected(model, end, 4, part(all_states, 0, end))
        assert_close(drafted(head, end, 4, new, cache), truth)
        assert {of_layer.offset for of_layer in cache} == {end}
    for of_layer in cache:
        of_layer.trim(10)
    others = states(24, seed=1)
    text = [mx.concatenate(pair) for pair in zip(part(all_states, 0, 6), others, strict=True)]
    for end in (8, 30):
        truth = expected(model, end, 4, part(text, 0, end))
        assert_close(drafted(head, end, 4, part(text, cache[0].offset, end), cache), truth)


@HEADS
@SETTINGS
def test_sequences_together_equal_each_alone(make: Any, settings: dict[str, Any]) -> None:
    _, head = make(TARGET, **settings)
    bound(head)
    texts = [states(length, seed=length) for length in (4, 21, 9)]
    caches = [head.make_cache() for _ in texts]
    alone = [head.make_cache() for _ in texts]
    head.see([features(head, part(texts[2], 0, 9))], [caches[2]])  # this one is complete
    lacking = [features(head, part(t, c[0].offset, 99)) for t, c in zip(texts, caches, strict=True)]
    logits = head.logits(head.block(mx.array([1, 2, 3]), 4, lacking, caches))
    for i, text in enumerate(texts):
        assert_close(logits[i : i + 1], drafted(head, i + 1, 4, text, alone[i]))
        assert caches[i][1].offset == alone[i][1].offset == len(text[0])


@HEADS
@pytest.mark.parametrize("length", [7, 8, 9, 30])
def test_a_window_moves_along_a_block_that_sees_both_ways(make: Any, length: int) -> None:
    """mlx-vlm's window does not move: its slot i equals ours with a window that is i shorter.

    With one layer, a slot's prediction does not depend on what other slots see.
    """
    settings = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "is_causal": False}
    config, head = make(TARGET, **settings, sliding_window=12)
    text = states(length)
    logits = drafted(bound(head), 9, 4, text, head.make_cache())
    for i in range(4):
        slot = i if make is dspark else i + 1
        model = reference(head, {**config, "sliding_window": 12 - slot})
        assert_close(logits[:, i], expected(model, 9, 4, text)[:, i])


@HEADS
def test_a_block_after_nothing(make: Any) -> None:
    _, head = make(TARGET)
    nothing = drafted(bound(head), 9, 3, states(0), head.make_cache())
    cache = head.make_cache()
    head.see([features(head, states(2))], [cache])
    for of_layer in cache:
        of_layer.trim(2)
    assert_close(drafted(head, 9, 3, states(0), cache), nothing)


def test_a_chain_of_dspark() -> None:
    config, head = dspark(TARGET)
    head.markov_head["markov_w2"].weight *= 10  # so that it changes the tokens
    model, prompt = reference(bound(head), config), states(6)
    logits = drafted(head, 9, head.most, prompt, head.make_cache())
    chain = [mx.array([9])]
    for slot in range(head.most):
        chain.append(mx.argmax(head.after(logits[:, slot], chain[-1]), axis=-1))
    truth = model.markov_head.sample_block(
        expected(model, 9, head.most, prompt),
        first_prev_tokens=mx.array([9]),
        sampler=lambda step: mx.argmax(step, axis=-1),
    )
    assert mx.stack(chain[1:], axis=1).tolist() == truth.tolist()
    assert mx.stack(chain[1:], axis=1).tolist() != mx.argmax(logits, axis=-1).tolist()


def test_a_dflash_of_deepspec_has_no_markov_head() -> None:
    _, head = dspark(TARGET, markov_rank=0)
    logits = mx.array([[1.0, 2.0]])
    assert head.after(logits, mx.array([0])) is logits
    assert not [name for name, _ in tree_flatten(head.parameters()) if "markov" in name]


def test_what_heads_read_and_how_much_they_draft() -> None:
    _, head = dflash(TARGET, block_size=16)
    assert (head.reads, head.most, head.width) == ((0, 1), 15, 32)
    assert dspark(TARGET, block_size=7)[1].most == 7
    assert dspark(TARGET, block_size=8, dspark_bonus_anchor=True)[1].most == 7


def test_the_text_part_of_a_target() -> None:
    config, head = dflash(TARGET)
    nested = DFlash(config, {"hidden_size": 1, "text_config": vars(TARGET.args)})
    assert nested.reads == head.reads


@HEADS
def test_names_of_weights(make: Any) -> None:
    _, head = make(TARGET)
    weights = dict(tree_flatten(head.parameters()))
    names = ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"]
    assert {*names, "layers.0.mlp.gate_proj.weight"} < weights.keys()
    published = {f"model.{name}": weight for name, weight in weights.items()}
    more = ["confidence_head.proj.bias", "verifier_norm.weight", "t2d"]
    assert head.sanitize(published | dict.fromkeys(more, mx.zeros(1))) == weights
    assert head.sanitize(weights) == weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, but this model's is 32"),
        ({"vocab_size": 99}, "vocab_size is 99, but this model's is 64"),
        ({"num_target_layers": 36}, "num_hidden_layers is 36, but this model's is 2"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError) as caught:
        dflash(TARGET, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mask_token_outside_the_vocabulary() -> None:
    head = dflash(TARGET, dflash_config={"mask_token_id": 64, "target_layer_ids": [0]})[1]
    embedding = nn.Embedding(64, 32)
    with pytest.raises(LoadError, match="tokens outside the vocabulary of 64"):
        head.bind(embedding, embedding.as_linear)
