"""Heads that draft chains, against mlx-vlm's modules and transformers' with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxspec.errors import LoadError
from mlxspec.models.heads import ChainHead
from mlxspec.models.heads.chains import Eagle3

VOCABULARY = 64
WIDTH = 32
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
}
TARGET: dict[str, Any] = {**COMMON, "num_hidden_layers": 8}

Forward = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
"""From tokens and features to what is fed back and logits."""


def random_weights(module: nn.Module) -> dict[str, mx.array]:
    """For all parameters of a module; norms scatter around 1."""
    mx.random.seed(2)
    return {
        name: mx.random.normal(weight.shape) * 0.2 + ("norm" in name and weight.ndim == 1)
        for name, weight in tree_flatten(module.parameters())
    }


def load(head: ChainHead, weights: dict[str, mx.array], embedding: nn.Embedding) -> None:
    head.load_weights(list(head.sanitize(weights).items()))
    head.bind(embedding, embedding.as_linear)


def assert_equal(ours: mx.array, theirs: mx.array) -> None:
    """Equal to float32's rounding, and minus infinity at the same places."""
    assert ours.shape == theirs.shape
    finite = mx.isfinite(theirs)
    assert mx.array_equal(mx.isfinite(ours), finite).item()
    zero = mx.array(0.0)
    difference = mx.abs(mx.where(finite, ours, zero) - mx.where(finite, theirs, zero)).max()
    assert difference.item() <= 2e-5 * mx.abs(mx.where(finite, theirs, zero)).max().item()


def tokens_of(*tokens: int) -> mx.array:
    return mx.array([tokens])


def generation(
    states: mx.array, verified: Forward, chained: Forward, trim: Callable[[int], None]
) -> mx.array:
    """Logits of a prompt, a chain of 4, and, once that is cut, of two pairs and a chain of 2."""
    _, prompt = verified(tokens_of(5, 9, 2, 60, 33, 7), states[:, :6])
    rows = [prompt]
    fed, _ = verified(tokens_of(8), states[:, 6:7])
    for token in (11, 3, 62, 0):
        fed, logits = chained(tokens_of(token), fed)
        rows.append(logits)
    trim(4)
    fed, logits = verified(tokens_of(11, 40), states[:, 7:9])
    rows.append(logits)
    fed = fed[:, -1:]
    for token in (12, 13):
        fed, logits = chained(tokens_of(token), fed)
        rows.append(logits)
    return mx.concatenate(rows, axis=1)


def generation_of(head: ChainHead, states: mx.array, from_scratch: bool = False) -> mx.array:
    """The same of our head, each forward after the first in a new cache if from scratch."""
    cache = head.make_cache()
    pairs: list[tuple[mx.array, mx.array]] = []

    def chained(tokens: mx.array, features: mx.array) -> tuple[mx.array, mx.array]:
        pairs.append((tokens, features))
        if from_scratch:
            rows = tokens.shape[1]
            all_tokens, all_features = (
                mx.concatenate(list(each), axis=1) for each in zip(*pairs, strict=True)
            )
            fed, hidden = head(all_tokens, all_features, head.make_cache())
            return fed[:, -rows:], head.logits(hidden[:, -rows:])
        fed, hidden = head(tokens, features, cache)
        return fed, head.logits(hidden)

    def verified(tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        of_layers = mx.split(states[0], max(len(head.layers), 1), axis=-1)
        return chained(tokens, head.features(states[0], of_layers)[None])

    def trim(entries: int) -> None:
        del pairs[-entries:]
        for each in cache:
            each.trim(entries)

    return generation(states, verified, chained, trim)


def theirs_of(module: Any, states: mx.array, logits_of: Callable[[mx.array], mx.array]) -> mx.array:
    """The same of a module of mlx-vlm with a cache of its own."""

    def forward(tokens: mx.array, features: mx.array) -> tuple[mx.array, mx.array]:
        fed = module._forward_tokens(tokens, features, mx.int32)
        return fed, logits_of(fed)

    def trim(entries: int) -> None:
        for each in module._cache:
            each.trim(entries)
        module._next_position -= entries

    return generation(states, forward, forward, trim)


EAGLE_3 = {
    "sglang": {**COMMON, "draft_vocab_size": 24},
    "speculators": {
        "transformer_layer_config": {**COMMON, "rope_parameters": {"rope_theta": 5e5}},
        "draft_vocab_size": 24,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
    },
    "tied": {
        "transformer_layer_config": COMMON,
        "draft_vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("kind", EAGLE_3)
def test_eagle_3_is_mlx_vlm_s(kind: str) -> None:
    reference = pytest.importorskip(
        "mlx_vlm.speculative.drafters.eagle3", reason="compares with mlx-vlm"
    )
    config = EAGLE_3[kind]
    head = Eagle3(config, TARGET)
    theirs = reference.Model(
        reference.ModelConfig.from_dict({"transformer_layer_config": COMMON, **config})
    )
    weights = random_weights(theirs)
    ids = mx.arange(VOCABULARY)
    if "d2t" in weights:
        ids = mx.arange(24) * 2 + (mx.arange(24) > 9)
        weights["d2t"] = (ids - mx.arange(24)).astype(mx.int64)
    theirs.load_weights(list(theirs.sanitize(dict(weights)).items()))
    theirs._cache = theirs.make_cache()
    if kind == "sglang":
        weights = {name.replace("layers.0.", "midlayer."): each for name, each in weights.items()}
    load(head, {**weights, "t2d": mx.zeros(VOCABULARY)}, theirs.embed_tokens)

    def in_targets_vocabulary(hidden: mx.array) -> mx.array:
        logits = mx.full((*hidden.shape[:-1], VOCABULARY), -mx.inf)
        logits[..., ids] = theirs._logits(hidden)
        return logits

    states = mx.random.normal((1, 9, 3 * WIDTH))
    ours = generation_of(head, states)
    assert_equal(ours, theirs_of(theirs, states, in_targets_vocabulary))
    assert_equal(generation_of(head, states, from_scratch=True), ours)


def test_eagle_3_reads_the_layers_that_its_configuration_names() -> None:
    """vLLM's ids are those that states enter, SGLang's those that they come from."""
    flat = EAGLE_3["sglang"]
    ids = "eagle_aux_hidden_state_layer_ids"
    assert Eagle3(flat, TARGET).layers == (1, 3, 4)
    assert Eagle3({**flat, ids: [1, 8]}, TARGET).layers == (0, 7)
    assert Eagle3({**flat, "eagle_config": {ids: [1, 3, 4]}}, TARGET).layers == (1, 3, 4)
    assert Eagle3(flat, {"text_config": TARGET}).layers == (1, 3, 4)


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(LoadError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size"])
def test_eagle_3_without_a_size(name: str) -> None:
    config = {key: value for key, value in EAGLE_3["sglang"].items() if key != name}
    assert repr(name) in refused(lambda: Eagle3(config, TARGET))


def test_eagle_3_of_another_target() -> None:
    config = EAGLE_3["sglang"]
    message = refused(lambda: Eagle3(config, {**TARGET, "hidden_size": 40}))
    assert "hidden_size is 32, but this model's is 40" in message
    message = refused(lambda: Eagle3(config, {**TARGET, "vocab_size": 70}))
    assert "vocab_size is 64, but this model's is 70" in message
    message = refused(lambda: Eagle3(config, {**TARGET, "num_hidden_layers": 3}))
    assert "layers 1, 0, -1, but the model has 3" in message
    assert "several layers" in refused(lambda: Eagle3({**config, "num_hidden_layers": 2}, TARGET))


def test_eagle_3_with_ids_outside_the_vocabulary() -> None:
    head = Eagle3(EAGLE_3["sglang"], TARGET)
    head.d2t = mx.full(24, 41)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    assert "d2t" in refused(lambda: head.bind(embedding, embedding.as_linear))
