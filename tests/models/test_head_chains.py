"""Heads that draft chains, compared with mlx-vlm's and transformers' with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxspec.errors import LoadError
from mlxspec.models.heads import Head
from mlxspec.models.heads.chains import (
    Eagle3,
    Gemma4Assistant,
    QwenMTP,
    norms_centred_at_zero,
)

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
"""A function from tokens and features to the next features and logits."""


def random_weights(module: nn.Module) -> dict[str, mx.array]:
    """Return random weights for a module; those of norms scatter around 1."""
    mx.random.seed(2)
    return {
        name: mx.random.normal(weight.shape) * 0.2 + ("norm" in name and weight.ndim == 1)
        for name, weight in tree_flatten(module.parameters())
    }


def load(head: Head, weights: dict[str, mx.array], embedding: nn.Embedding) -> None:
    weights = head.sanitize(weights)
    head.fit(weights.keys())
    head.load_weights(list(weights.items()))
    head.bind(embedding, embedding.as_linear)


def assert_equal(ours: mx.array, theirs: mx.array, tolerance: float = 2e-5) -> None:
    """Assert equality up to float32 rounding, with minus infinity at the same places."""
    assert ours.shape == theirs.shape
    finite = mx.isfinite(theirs)
    assert mx.array_equal(mx.isfinite(ours), finite).item()
    zero = mx.array(0.0)
    difference = mx.abs(mx.where(finite, ours, zero) - mx.where(finite, theirs, zero)).max()
    assert difference.item() <= tolerance * mx.abs(mx.where(finite, theirs, zero)).max().item()


def tokens_of(*tokens: int) -> mx.array:
    return mx.array([tokens])


def generation(
    states: mx.array, verified: Forward, chained: Forward, trim: Callable[[int], None]
) -> mx.array:
    """Return the logits of a prompt, a chain of 4 and, after trimming it, two pairs and 2 more."""
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


def generation_of(head: Head, states: mx.array, from_scratch: bool = False) -> mx.array:
    """Run :func:`generation` with our head; from scratch means a new cache for each forward."""
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
        of_layers = mx.split(states[0], max(len(head.reads), 1), axis=-1)
        return chained(tokens, head.features(of_layers)[None])

    def trim(entries: int) -> None:
        del pairs[-entries:]
        for each in cache:
            each.trim(entries)

    return generation(states, verified, chained, trim)


def theirs_of(module: Any, states: mx.array, logits_of: Callable[[mx.array], mx.array]) -> mx.array:
    """Run :func:`generation` with an mlx-vlm module and its own cache."""

    def forward(tokens: mx.array, features: mx.array) -> tuple[mx.array, mx.array]:
        fed = module._forward_tokens(tokens, features, mx.int32)
        return fed, logits_of(fed)

    def trim(entries: int) -> None:
        for each in module._cache:
            each.trim(entries)
        module._next_position -= entries

    return generation(states, forward, forward, trim)


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(LoadError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    """vLLM's ids name the layers that take the states, SGLang's those that produce them."""
    flat = EAGLE_3["sglang"]
    ids = "eagle_aux_hidden_state_layer_ids"
    assert Eagle3(flat, TARGET).reads == (1, 3, 4)
    assert Eagle3({**flat, ids: [1, 8]}, TARGET).reads == (0, 7)
    assert Eagle3({**flat, "eagle_config": {ids: [1, 3, 4]}}, TARGET).reads == (1, 3, 4)
    assert Eagle3(flat, {"text_config": TARGET}).reads == (1, 3, 4)


def test_eagle_3_of_another_target() -> None:
    config = EAGLE_3["sglang"]
    message = refused(lambda: Eagle3(config, {**TARGET, "hidden_size": 40}))
    assert "hidden_size is 32, but this model's is 40" in message
    message = refused(lambda: Eagle3(config, {**TARGET, "vocab_size": 70}))
    assert "vocab_size is 64, but this model's is 70" in message


def test_eagle_3_with_ids_outside_the_vocabulary() -> None:
    head = Eagle3(EAGLE_3["sglang"], TARGET)
    head.d2t = mx.full(24, 41)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    assert "outside the vocabulary" in refused(lambda: head.bind(embedding, embedding.as_linear))


QWEN = {
    **COMMON,
    "head_dim": 16,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 5e4,
        "partial_rotary_factor": 0.25,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
QWEN_OF_TARGET = {
    "model_type": "qwen3_5",
    "num_hidden_layers": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
}
"""Settings of the target in a head's configuration, which have no effect."""

QWEN_KINDS = {"dense": QWEN, "experts": {**QWEN, **EXPERTS}, "fused experts": {**QWEN, **EXPERTS}}


def original(weights: dict[str, mx.array], fused: bool) -> dict[str, mx.array]:
    """Return weights in original checkpoints' layout, with norms centred at zero."""
    renamed = {}
    for name, weight in weights.items():
        name, _, projection = f"mtp.{name}".partition("switch_mlp.")
        if not projection:
            renamed[name] = weight - ("norm" in name)
        elif not fused:
            renamed |= {f"{name}experts.{i}.{projection}": each for i, each in enumerate(weight)}
        elif projection == "down_proj.weight":
            renamed[f"{name}experts.down_proj"] = weight
        elif projection == "gate_proj.weight":
            up = weights[f"{name.removeprefix('mtp.')}switch_mlp.up_proj.weight"]
            renamed[f"{name}experts.gate_up_proj"] = mx.concatenate([weight, up], axis=1)
    return renamed


@pytest.mark.parametrize("kind", QWEN_KINDS)
def test_the_mtp_of_qwen_is_mlx_vlm_s(kind: str) -> None:
    reference = pytest.importorskip(
        "mlx_vlm.speculative.drafters.qwen3_5_mtp", reason="compares with mlx-vlm"
    )
    text = {**QWEN_OF_TARGET, **QWEN_KINDS[kind]}
    config = {"model_type": "qwen3_5_mtp", "text_config": text}
    theirs = reference.Model(reference.ModelConfig.from_dict(config))
    weights = original(random_weights(theirs), fused=kind.startswith("fused"))
    theirs.load_weights(list(theirs.sanitize(dict(weights)).items()))
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    theirs._input_embed = embedding
    theirs._cache = theirs.make_cache()
    head = QwenMTP(config, TARGET)
    load(head, weights, embedding)
    states = mx.random.normal((1, 9, WIDTH))
    ours = generation_of(head, states)
    assert_equal(ours, theirs_of(theirs, states, embedding.as_linear))
    assert_equal(generation_of(head, states, from_scratch=True), ours)


def test_qwen_3_next_has_the_mtp_of_later_ones_with_another_configuration() -> None:
    rope = QWEN["rope_parameters"]
    names = ("rope_theta", "partial_rotary_factor")
    config = {
        **{name: value for name, value in QWEN.items() if name != "rope_parameters"},
        **{name: rope[name] for name in names},
        "num_nextn_predict_layers": 1,
        **EXPERTS,
    }
    later = QwenMTP({**QWEN, **EXPERTS}, TARGET)
    weights = dict(tree_flatten(later.parameters()))
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    states = mx.random.normal((1, 9, WIDTH))
    generations = []
    for head in (later, QwenMTP(config, TARGET)):
        load(head, original(weights, fused=False), embedding)
        generations.append(generation_of(head, states))
    assert mx.array_equal(*generations).item()


def test_the_final_norm_of_qwen_s_mtp_decides_for_itself() -> None:
    weights = random_weights(QwenMTP(QWEN, TARGET))
    mixed = {name.removeprefix("mtp."): each for name, each in original(weights, False).items()}
    mixed["norm.weight"] = weights["norm.weight"]
    centred = norms_centred_at_zero(mixed)
    assert "pre_fc_norm_hidden.weight" in centred
    assert "layers.0.self_attn.q_norm.weight" in centred
    assert "norm.weight" not in centred
    assert len(centred) == 6
    sanitized = QwenMTP.sanitize(mixed)
    assert sanitized.keys() == weights.keys()
    for name, weight in weights.items():
        assert mx.allclose(sanitized[name], weight, atol=1e-6).item(), name


def test_mtp_of_another_target() -> None:
    for name in ("hidden_size", "vocab_size"):
        target = {"text_config": {**TARGET, name: 8}}
        assert f"{name} is" in refused(lambda target=target: QwenMTP(QWEN, target))


class View(NamedTuple):
    """A view of a layer's keys and values."""

    keys: mx.array
    values: mx.array
    offset: int

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


WINDOW = 6
GEMMA_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": WINDOW,
    "use_double_wide_mlp": False,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA = {
    "backbone_hidden_size": WIDTH,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 3,
    "text_config": GEMMA_TEXT,
}
GEMMA_TARGET = {
    "text_config": {**TARGET, "head_dim": 8, "global_head_dim": 16, "model_type": "gemma4_text"}
}


def gemma_weights(masked: bool) -> dict[str, mx.array]:
    config = {**GEMMA, "use_ordered_embeddings": masked}
    weights = random_weights(Gemma4Assistant(config, GEMMA_TARGET))
    if masked:
        weights["masked_embedding.token_ordering"] = mx.random.permutation(VOCABULARY).astype(
            mx.int64
        )
    return weights


def gemma_generation(
    forward: Callable[[mx.array, dict[str, tuple[mx.array, mx.array]], int], tuple[Any, Any]],
    states: mx.array,
    embedding: nn.Embedding,
) -> mx.array:
    """Return the logits of chains of 4 after 3 entries, after 9, and after 7 with 2 rejected."""
    mx.random.seed(3)
    entries = [tuple(mx.random.normal((1, 2, 9, size)) for _ in range(2)) for size in (8, 16)]
    rows = []
    for seen in (3, 9, 7):
        first = max(seen - WINDOW, 0)
        shared = {
            "sliding_attention": tuple(each[:, :, first:seen] for each in entries[0]),
            "full_attention": tuple(each[:, :, :seen] for each in entries[1]),
        }
        fed = states[:, seen - 1 : seen]
        for token in (5, 62, 0, 17):
            inputs = mx.concatenate([embedding(tokens_of(token)), fed], axis=-1)
            fed, logits = forward(inputs, shared, seen)
            rows.append(logits)
    return mx.concatenate(rows, axis=1)


def gemma_generation_of(
    masked: bool, states: mx.array, embedding: nn.Embedding, window: int
) -> mx.array:
    """Run :func:`gemma_generation` with our head; sliding layers see ``window`` entries."""
    head = Gemma4Assistant({**GEMMA, "use_ordered_embeddings": masked}, GEMMA_TARGET)
    load(head, gemma_weights(masked), embedding)
    assert head.make_cache() == []

    def forward(
        inputs: mx.array, shared: dict[str, tuple[mx.array, mx.array]], position: int
    ) -> tuple[mx.array, mx.array]:
        keys, values = shared["sliding_attention"]
        cache = [
            View(*shared["full_attention"], position),
            View(keys[:, :, -window:], values[:, :, -window:], position),
        ]
        embedded, features = mx.split(inputs, 2, axis=-1)
        distances = mx.abs(embedding.weight - embedded[0]).sum(axis=-1)
        fed, hidden = head(mx.argmin(distances)[None, None], features, cache)
        return fed, head.logits(hidden)

    return gemma_generation(forward, states, embedding)


def scored_only(logits: mx.array, masked: bool) -> mx.array:
    """Replace logits that are 1 below the lowest score by minus infinity."""
    least = logits.min(axis=-1, keepdims=True)
    return mx.where(logits == least, -mx.inf, logits) if masked else logits


@pytest.mark.parametrize("masked", [False, True])
def test_the_assistant_of_gemma_4_is_mlx_vlm_s(masked: bool) -> None:
    reference = pytest.importorskip(
        "mlx_vlm.speculative.drafters.gemma4_assistant", reason="compares with mlx-vlm"
    )
    theirs = reference.Model(
        reference.ModelConfig.from_dict({**GEMMA, "use_ordered_embeddings": masked})
    )
    theirs.load_weights(list(theirs.sanitize(gemma_weights(masked)).items()))
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    theirs.bind(None)

    def forward(inputs: mx.array, shared: Any, position: int) -> tuple[mx.array, mx.array]:
        theirs.set_shared_kv(shared, position)
        fed, logits = theirs(inputs, shared, mx.array([[position]]))
        return fed, scored_only(logits, masked)

    states = mx.random.normal((1, 9, WIDTH))
    # The query follows the entries, so it sees one fewer than the window.
    ours = gemma_generation_of(masked, states, embedding, window=WINDOW - 1)
    assert_equal(ours, gemma_generation(forward, states, embedding))
    assert mx.isfinite(ours).sum(axis=-1).max().item() == (24 if masked else VOCABULARY)


@pytest.mark.parametrize("masked", [False, True])
def test_the_assistant_of_gemma_4_is_transformers_s(masked: bool) -> None:
    torch = pytest.importorskip("torch", reason="compares with transformers on PyTorch")
    numpy = pytest.importorskip("numpy")
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    config = Gemma4AssistantConfig(**{**GEMMA, "use_ordered_embeddings": masked})
    theirs = Gemma4AssistantForCausalLM(config).eval()
    weights = gemma_weights(masked)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(
        {name: torch.from_numpy(numpy.array(weight)) for name, weight in weights.items()}
    )
    embedding = nn.Embedding(VOCABULARY, WIDTH)

    def forward(inputs: mx.array, shared: Any, position: int) -> tuple[mx.array, mx.array]:
        def in_torch(array: mx.array) -> Any:
            return torch.from_numpy(numpy.array(array))

        with torch.no_grad():
            out = theirs(
                inputs_embeds=in_torch(inputs),
                position_ids=torch.tensor([[position]]),
                shared_kv_states={
                    kind: tuple(in_torch(each) for each in both) for kind, both in shared.items()
                },
            )
        fed, logits = (mx.array(each.numpy()) for each in (out.last_hidden_state, out.logits))
        return fed, scored_only(logits, masked)

    states = mx.random.normal((1, 9, WIDTH))
    ours = gemma_generation_of(masked, states, embedding, window=WINDOW)
    # PyTorch rounds differently, and a chain multiplies the difference.
    assert_equal(ours, gemma_generation(forward, states, embedding), tolerance=1e-4)


def test_an_assistant_that_does_not_work() -> None:
    def with_text(**text: Any) -> dict[str, Any]:
        return {**GEMMA, "text_config": {**GEMMA_TEXT, **text}}

    def message_of(config: dict[str, Any]) -> str:
        return refused(lambda: Gemma4Assistant(config, GEMMA_TARGET))

    assert "hidden_size is 48" in message_of({**GEMMA, "backbone_hidden_size": 48})
    assert "vocab_size is 80" in message_of(with_text(vocab_size=80))
    masked = {**GEMMA, "use_ordered_embeddings": True}
    head = Gemma4Assistant(masked, GEMMA_TARGET)
    head.masked_embedding.token_ordering = mx.full(VOCABULARY, -1)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    assert "outside the vocabulary" in refused(lambda: head.bind(embedding, embedding.as_linear))
