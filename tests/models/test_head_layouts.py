"""Heads in published layouts, compared with NumPy formulas.

Each layout has the keys of a published ``config.json`` and its tensors' names, with small sizes.
Settings and tensors that do not affect the head's output are included.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.convert.conversion import convert
from mlxspec.errors import LoadError
from mlxspec.models.heads import Head
from mlxspec.models.heads.blocks import DFlash
from mlxspec.models.heads.loading import find_head, load_head, own_head
from tests.support import torch_file
from tests.support.head_files import GEMMA, GEMMA_TARGET, QWEN_TARGET, random_weights, write
from tests.support.head_formulas import (
    Array,
    block,
    eagle3,
    eagle3_features,
    gemma4_assistant,
    linear,
    numpy_of,
    qwen_mtp,
    rms,
)

Config = dict[str, Any]
Tensors = dict[str, Array]

WIDTH, VOCABULARY, OWN = 32, 64, 24
SIZES: Config = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
}
TARGET: Config = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 8, "head_dim": 8}

RANDOM = np.random.default_rng(5)
EMBEDDING = RANDOM.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
OUTPUT = RANDOM.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
STATES = [RANDOM.normal(size=(7, WIDTH)).astype(np.float32) for _ in range(3)]
PROMPT = (5, 9, 2, 60, 33, 7, 8)
CHAIN = (11, 3, 62)


def tensors(**shapes: tuple[int, ...]) -> Tensors:
    """Return random tensors; norms' gains scatter around 1. A double underscore means a dot."""
    random = np.random.default_rng(6)
    return {
        name.replace("__", "."): (
            random.normal(size=shape) * 0.2 + (len(shape) == 1 and "bias" not in name)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def layer_of(at: str, inputs: int = WIDTH, norms: bool = False) -> Tensors:
    """Return a Llama layer, or a Qwen 3 layer with norms of queries and keys."""
    made = tensors(
        input_layernorm__weight=(WIDTH,),
        post_attention_layernorm__weight=(WIDTH,),
        self_attn__q_proj__weight=(32, inputs),
        self_attn__k_proj__weight=(16, inputs),
        self_attn__v_proj__weight=(16, inputs),
        self_attn__o_proj__weight=(WIDTH, 32),
        mlp__gate_proj__weight=(48, WIDTH),
        mlp__up_proj__weight=(48, WIDTH),
        mlp__down_proj__weight=(WIDTH, 48),
        **({"self_attn__q_norm__weight": (8,), "self_attn__k_norm__weight": (8,)} if norms else {}),
    )
    return {f"{at}{name}": array for name, array in made.items()}


D2T = np.array([i + (i > 9) for i in range(OWN)], np.int64)
T2D = np.isin(np.arange(VOCABULARY), np.arange(OWN) + D2T)


def eagle3_tensors(layers: int = 1, norms: bool = False) -> Tensors:
    """Return EAGLE-3 tensors with the speculators library's names."""
    made = tensors(
        fc__weight=(WIDTH, 3 * WIDTH),
        norm__weight=(WIDTH,),
        lm_head__weight=(OWN, WIDTH),
        layers__0__hidden_norm__weight=(WIDTH,),
    )
    made |= {"d2t": D2T, "t2d": T2D} | layer_of("layers.0.", 2 * WIDTH, norms)
    for i in range(1, layers):
        made |= layer_of(f"layers.{i}.", norms=norms)
    return made


def without(made: Tensors, *names: str) -> Tensors:
    return {name: array for name, array in made.items() if name not in names}


def own_embedding() -> Tensors:
    return tensors(embed_tokens__weight=(VOCABULARY, WIDTH))


class Layout(NamedTuple):
    """A published layout.

    Attributes:
        config: its ``config.json``.
        weights: its tensors, by the names of the formulas.
        settings: the formulas' settings.
        rename: from the formulas' names to the published ones.
    """

    config: Config
    weights: Tensors
    settings: Config
    rename: Callable[[str], str] = str


EAGLE_3_OF_LLAMA: Config = {
    **SIZES,
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "draft_vocab_size": OWN,
}
EAGLE_3_OF_QWEN: Config = {
    **EAGLE_3_OF_LLAMA,
    "architectures": ["Eagle3LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "max_window_layers": 36,
    "rope_scaling": None,
    "rope_theta": 5e5,
    "sliding_window": None,
    "use_sliding_window": False,
}
SPECULATORS: Config = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": OWN,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "embed_requires_grad": False,
    "fc_norm": False,
    "has_no_defaults_at_init": None,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "norm_output": True,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **SIZES,
        "_attn_implementation": "simple_flex_attention",
        "attention_bias": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "pretraining_tp": 1,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    "transformers_version": "5.1.0",
}
MODEL_OPT: Config = {
    **EAGLE_3_OF_LLAMA,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_theta": 5e5,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    },
}


def speculators(layer: Config | None = None, **settings: object) -> Config:
    of_layer = {**SPECULATORS["transformer_layer_config"], **(layer or {})}
    return {**SPECULATORS, "transformer_layer_config": of_layer, **settings}


ROPE = {"head_dim": 8, "theta": 5e5}
INPUT_NORM = tensors(input_norm__weight=(3 * WIDTH,))
FC_NORMS = {
    f"fc_norm.{i}.weight": array
    for i, array in enumerate(tensors(**dict.fromkeys("abc", (WIDTH,))).values())
}

EAGLE_3 = {
    "SGLang": Layout(
        EAGLE_3_OF_LLAMA,
        eagle3_tensors(),
        {"head_dim": 8, "theta": 1e4},
        lambda name: name.replace("layers.0.", "midlayer."),
    ),
    "AngelSlim, with model. in its names": Layout(
        EAGLE_3_OF_QWEN,
        eagle3_tensors(),
        ROPE,
        lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}",
    ),
    "ModelOpt": Layout(MODEL_OPT, eagle3_tensors(), ROPE),
    "EAGLE-3.1": Layout(
        SPECULATORS,
        eagle3_tensors() | INPUT_NORM,
        {**ROPE, "norm_before_residual": True, "norm_output": True},
    ),
    "a norm of each state": Layout(
        speculators(fc_norm=True, norm_before_fc=False, norm_before_residual=False),
        eagle3_tensors() | FC_NORMS,
        {**ROPE, "norm_output": True},
    ),
    "its own embedding": Layout(
        speculators(norm_output=False),
        eagle3_tensors() | INPUT_NORM | own_embedding(),
        {**ROPE, "norm_before_residual": True},
    ),
    "an embedding that is its output layer, too": Layout(
        {**EAGLE_3_OF_QWEN, "draft_vocab_size": VOCABULARY, "tie_word_embeddings": True},
        without(eagle3_tensors(), "lm_head.weight", "d2t", "t2d") | own_embedding(),
        ROPE,
    ),
    "no output layer": Layout(
        {**EAGLE_3_OF_QWEN, "draft_vocab_size": VOCABULARY},
        without(eagle3_tensors(), "lm_head.weight", "d2t", "t2d"),
        ROPE,
    ),
    "no output layer, and a vocabulary of its own": Layout(
        EAGLE_3_OF_QWEN, without(eagle3_tensors(), "lm_head.weight"), ROPE
    ),
    "a bias of fc, and another name of the vocabulary's size": Layout(
        {
            **{k: v for k, v in EAGLE_3_OF_QWEN.items() if k != "draft_vocab_size"},
            "truncated_vocab_size": OWN,
        },
        eagle3_tensors() | tensors(fc__bias=(WIDTH,)),
        ROPE,
    ),
    "two layers like Qwen 3's": Layout(
        speculators({"model_type": "qwen3", "num_hidden_layers": 2}),
        eagle3_tensors(2, norms=True) | INPUT_NORM,
        {**ROPE, "layers": 2, "norm_before_residual": True, "norm_output": True},
    ),
    "a sliding window": Layout(
        speculators({"layer_types": ["sliding_attention"], "sliding_window": 3}),
        eagle3_tensors() | INPUT_NORM,
        {**ROPE, "window": 3, "norm_before_residual": True, "norm_output": True},
    ),
    "a sliding window in a flat configuration": Layout(
        {**EAGLE_3_OF_QWEN, "sliding_window": 3, "use_sliding_window": None},
        eagle3_tensors(),
        {**ROPE, "window": 3},
    ),
}


def publish(directory: Path, layout: Layout, torch: bool = False) -> Path:
    published = {layout.rename(name): array for name, array in layout.weights.items()}
    if not torch:
        named = {name: mx.array(array) for name, array in published.items()}
        return write(directory, layout.config, named)
    (directory / "config.json").write_text(json.dumps(layout.config))
    torch_file.save(directory / "pytorch_model.bin", published)
    return directory


def loaded(directory: Path, target: Config) -> Head:
    head = load_head(find_head(directory), target)
    embedding, output = mx.array(EMBEDDING), mx.array(OUTPUT)
    head.bind(lambda tokens: embedding[tokens], lambda hidden: hidden @ output.T)
    return head


def logits_of(layout: Layout, hidden: Array) -> Array:
    """Return logits over the target's vocabulary from normed states."""
    w, config = layout.weights, layout.config
    tied = config.get("tie_word_embeddings") and w.get("embed_tokens.weight")
    own = w.get("lm_head.weight", OUTPUT if tied is None or tied is False else tied)
    logits = hidden @ own.T
    if "d2t" not in w:
        return logits
    ids = np.arange(len(w["d2t"])) + w["d2t"]
    logits = logits[..., ids] if len(own) == VOCABULARY else logits
    scattered = np.full((*logits.shape[:-1], VOCABULARY), -np.inf, np.float32)
    scattered[..., ids] = logits
    return scattered


def assert_close(found: mx.array, expected: Array) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("how", ["safetensors", "torch", "converted"])
@pytest.mark.parametrize("name", EAGLE_3)
def test_eagle_3(tmp_path: Path, name: str, how: str) -> None:
    layout = EAGLE_3[name]
    directory = publish(tmp_path, layout, torch=how == "torch")
    if how == "converted":
        convert(hf_path=directory, mlx_path=tmp_path / "mlx", head=True, dtype="float32")
        directory = tmp_path / "mlx"
    head = loaded(directory, TARGET)
    assert head.reads == (1, 3, 4)
    cache = head.make_cache()
    features = head.features([mx.array(each) for each in STATES])
    fed, hidden = head(mx.array([PROMPT]), features[None], cache)
    rows = [head.logits(hidden)[0]]
    for token in CHAIN:
        fed, hidden = head(mx.array([[token]]), fed[:, -1:], cache)
        rows.append(head.logits(hidden)[0])

    w, settings = layout.weights, layout.settings
    embedding = w.get("embed_tokens.weight", EMBEDDING)
    pairs = list(zip(PROMPT, eagle3_features(w, STATES), strict=True))
    for token in CHAIN:
        output = eagle3(w, settings, embedding, pairs)[-1]
        if settings.get("norm_output"):
            output = rms(output, w["norm.weight"])
        pairs.append((token, output))
    normed = rms(eagle3(w, settings, embedding, pairs), w["norm.weight"])
    assert_close(mx.concatenate(rows), logits_of(layout, normed))


# --- DFlash and DSpark ---

Z_LAB: Config = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "bos_token_id": None,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 3, 4]},
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 8,
    "rope_scaling": None,
    "rope_theta": 5e5,
    "sliding_window": 5,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": True,
}
DFLASH_OF_SPECULATORS: Config = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 4, 5],
    "block_size": 6,
    "draft_vocab_size": OWN,
    "dtype": "bfloat16",
    "mask_token_id": 63,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": SPECULATORS["speculators_config"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{name: Z_LAB[name] for name in ("layer_types", "sliding_window", "head_dim")},
        **SIZES,
        "max_position_embeddings": 2048,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "use_sliding_window": True,
    },
    "transformers_version": "5.1.0",
}
DEEP_SPEC: Config = {
    **{name: value for name, value in Z_LAB.items() if name not in ("dflash_config", "auto_map")},
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "mask_token_id": 63,
    "target_layer_ids": [1, 3, 4],
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def block_tensors() -> Tensors:
    made = tensors(
        fc__weight=(WIDTH, 3 * WIDTH), hidden_norm__weight=(WIDTH,), norm__weight=(WIDTH,)
    )
    return made | layer_of("layers.0.", norms=True) | layer_of("layers.1.", norms=True)


def own_vocabulary() -> Tensors:
    return tensors(lm_head__weight=(OWN, WIDTH)) | {"d2t": D2T, "t2d": T2D}


def markov(own: int = VOCABULARY) -> Tensors:
    return tensors(
        markov_head__markov_w1__weight=(VOCABULARY, 4),
        markov_head__markov_w2__weight=(own, 4),
        confidence_head__proj__weight=(1, WIDTH + 4),
        confidence_head__proj__bias=(1,),
    )


SLIDING = {**ROPE, "layers": [(5, True), (None, False)]}
BOTH_WAYS = {**ROPE, "layers": [(5, False), (None, False)]}
FULL = {**ROPE, "layers": [(None, False)] * 2}
BLOCKS = {
    "z-lab": (Layout(Z_LAB, block_tensors(), SLIDING), 1, 5),
    "the nested setting of what slots see counts": (
        Layout(
            {
                **Z_LAB,
                "is_causal": True,
                "dflash_config": {**Z_LAB["dflash_config"], "causal": False},
            },
            block_tensors(),
            BOTH_WAYS,
        ),
        1,
        5,
    ),
    "its own embedding and output layer": (
        Layout(
            {**Z_LAB, "tie_word_embeddings": False},
            block_tensors() | own_embedding() | tensors(lm_head__weight=(VOCABULARY, WIDTH)),
            SLIDING,
            lambda name: name if name == "lm_head.weight" else f"model.{name}",
        ),
        1,
        5,
    ),
    "speculators": (
        Layout(
            DFLASH_OF_SPECULATORS, block_tensors() | own_vocabulary() | own_embedding(), SLIDING
        ),
        1,
        5,
    ),
    "speculators, both ways": (
        Layout(
            {**DFLASH_OF_SPECULATORS, "sliding_window_non_causal": True},
            block_tensors() | own_vocabulary(),
            BOTH_WAYS,
        ),
        1,
        5,
    ),
    "DeepSpec": (Layout(DEEP_SPEC, block_tensors() | markov(), FULL), 0, 6),
    "DSpark of speculators": (
        Layout(
            {
                **DFLASH_OF_SPECULATORS,
                "speculators_model_type": "dspark",
                "architectures": ["DSparkDraftModel"],
                "sample_from_anchor": True,
                "markov_rank": 4,
                "markov_head_type": "vanilla",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
            block_tensors() | own_vocabulary() | markov(OWN),
            SLIDING,
        ),
        0,
        6,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(tmp_path: Path, name: str) -> None:
    layout, first, most = BLOCKS[name]
    head = loaded(publish(tmp_path, layout), TARGET)
    assert isinstance(head, DFlash)
    assert (head.reads, head.most) == ((1, 3, 4), most)
    features = head.features([mx.array(each) for each in STATES])[None]
    hidden = head.block(mx.array([9]), most, [features], [head.make_cache()])
    w = layout.weights
    tokens = [9] + [63] * (first + most - 1)
    embedding = w.get("embed_tokens.weight", EMBEDDING)
    expected = logits_of(layout, block(w, layout.settings, embedding, STATES, tokens)[first:])
    assert_close(head.logits(hidden)[0], expected)
    if "markov_head.markov_w1.weight" in w:
        changed = expected[1].copy()
        bias = w["markov_head.markov_w1.weight"][17] @ w["markov_head.markov_w2.weight"].T
        own = np.arange(OWN) + D2T if "d2t" in w else np.arange(VOCABULARY)
        changed[own] += bias
        assert_close(head.after(head.logits(hidden)[:, 1], mx.array([17]))[0], changed)


# --- Qwen's MTP ---

MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN_TEXT: Config = {
    **QWEN_TARGET["text_config"],
    "attn_output_gate": True,
    "hidden_act": "silu",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
}
QWEN_3_NEXT: Config = {
    **{name: value for name, value in QWEN_TEXT.items() if "mtp" not in name},
    **MIXTURE,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 5e4,
}
del QWEN_3_NEXT["rope_parameters"]


def mtp_tensors(experts: int = 0) -> Tensors:
    made = tensors(
        fc__weight=(WIDTH, 2 * WIDTH),
        norm__weight=(WIDTH,),
        pre_fc_norm_embedding__weight=(WIDTH,),
        pre_fc_norm_hidden__weight=(WIDTH,),
        layers__0__input_layernorm__weight=(WIDTH,),
        layers__0__post_attention_layernorm__weight=(WIDTH,),
        layers__0__self_attn__q_proj__weight=(128, WIDTH),
        layers__0__self_attn__k_proj__weight=(32, WIDTH),
        layers__0__self_attn__v_proj__weight=(32, WIDTH),
        layers__0__self_attn__o_proj__weight=(WIDTH, 64),
        layers__0__self_attn__q_norm__weight=(16,),
        layers__0__self_attn__k_norm__weight=(16,),
    )
    if not experts:
        shapes = {"gate": (64, WIDTH), "up": (64, WIDTH), "down": (WIDTH, 64)}
        return made | tensors(**{f"layers__0__mlp__{n}_proj__weight": s for n, s in shapes.items()})
    at = "layers__0__mlp__"
    shapes = {f"{at}gate__weight": (4, WIDTH), f"{at}shared_expert_gate__weight": (1, WIDTH)}
    parts = [("shared_expert", 20)] + [(f"experts__{i}", 12) for i in range(experts)]
    for part, width in parts:
        shapes |= {f"{at}{part}__{n}_proj__weight": (width, WIDTH) for n in ("gate", "up")}
        shapes[f"{at}{part}__down_proj__weight"] = (WIDTH, width)
    return made | tensors(**shapes)


def fused(made: Tensors) -> Tensors:
    """Store the experts in two tensors, as in Qwen 3.6."""
    at = "layers.0.mlp.experts."
    each = {
        n: np.stack([made[f"{at}{i}.{n}_proj.weight"] for i in range(4)])
        for n in ("gate", "up", "down")
    }
    kept = {name: array for name, array in made.items() if not name.startswith(at)}
    kept[f"{at}gate_up_proj"] = np.concatenate([each["gate"], each["up"]], axis=1)
    return kept | {f"{at}down_proj": each["down"]}


def raw(made: Tensors) -> Tensors:
    """Centre the gains at zero."""
    return {name: array - ("norm" in name) for name, array in made.items()}


def raw_layer(made: Tensors) -> Tensors:
    """Centre all gains at zero except the final norm's (jundot/omlx#1507)."""
    return raw(made) | {"norm.weight": made["norm.weight"]}


def quiet(made: Tensors) -> Tensors:
    """Use small gains before ``fc``, as in Qwen 3.6 (jundot/omlx#3750)."""
    gains = {"embedding": 0.27, "hidden": 0.49}
    names = {name: f"pre_fc_norm_{name}.weight" for name in gains}
    return made | {names[n]: made[names[n]] * np.float32(gain) for n, gain in gains.items()}


def loud(made: Tensors) -> Tensors:
    """Use gains of queries and keys far above 1."""
    names = [f"layers.0.self_attn.{n}_norm.weight" for n in "qk"]
    return made | {name: made[name] + np.float32(1.8) for name in names}


def same(made: Tensors) -> Tensors:
    return made


QWEN_3_5 = {"model_type": "qwen3_5", "text_config": QWEN_TEXT}
MOE = {"model_type": "qwen3_5_moe", "text_config": {**QWEN_TEXT, **MIXTURE}}
STANDALONE = {
    "block_size": 3,
    "model_type": "qwen3_5_mtp",
    "quantization_config": None,
    "text_config": QWEN_TEXT,
    "tie_word_embeddings": True,
}
MTP: dict[str, tuple[Config, Tensors, str, Callable[[Tensors], Tensors]]] = {
    "Qwen 3.5": (QWEN_3_5, mtp_tensors(), "mtp.", raw),
    "Qwen 3.5, queries with large gains": (QWEN_3_5, loud(mtp_tensors()), "mtp.", raw),
    "Qwen 3.6, fused experts": (MOE, mtp_tensors(4), "mtp.", lambda made: fused(raw(made))),
    "Qwen 3.5, separate experts": (MOE, mtp_tensors(4), "mtp.", raw),
    "Qwen 3 Next": (QWEN_3_NEXT, mtp_tensors(4), "mtp.", raw),
    "converted": (QWEN_3_5, mtp_tensors(), "language_model.mtp.", same),
    "converted, with small gains before fc": (MOE, quiet(mtp_tensors(4)), "mtp.", fused),
    "the final norm converted alone": (QWEN_3_5, mtp_tensors(), "mtp.", raw_layer),
    "alone": (STANDALONE, quiet(mtp_tensors()), "", same),
}


@pytest.mark.parametrize("name", MTP)
def test_the_mtp_of_qwen(tmp_path: Path, name: str) -> None:
    config, w, prefix, published = MTP[name]
    named = {f"{prefix}{n}": mx.array(array) for n, array in published(w).items()}
    write(tmp_path, config, named | ({"model.norm.weight": mx.ones(1)} if prefix else {}))
    assert (own_head(tmp_path) is not None) == bool(prefix)
    target = {**QWEN_TARGET, "text_config": config.get("text_config", config)}
    head = loaded(tmp_path, target if prefix == "" else config)
    states = STATES[0]
    cache = head.make_cache()
    fed, hidden = head(mx.array([PROMPT]), mx.array(states)[None], cache)
    rows = [head.logits(hidden)[0]]
    for token in CHAIN:
        fed, hidden = head(mx.array([[token]]), fed[:, -1:], cache)
        rows.append(head.logits(hidden)[0])
    settings = {"head_dim": 16, "theta": 5e4, "part": 0.25, "experts": 2}
    pairs = list(zip(PROMPT, states, strict=True))
    for token in CHAIN:
        pairs.append((token, qwen_mtp(w, settings, EMBEDDING, pairs)[-1]))
    assert_close(mx.concatenate(rows), qwen_mtp(w, settings, EMBEDDING, pairs) @ OUTPUT.T)


# --- Gemma 4's assistant ---


class View(NamedTuple):
    """A view of a target layer's keys and values."""

    keys: mx.array
    values: mx.array
    offset: int

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values


@pytest.mark.parametrize("ordered", [False, True])
def test_the_assistant_of_gemma_4(tmp_path: Path, ordered: bool) -> None:
    text = {
        **GEMMA["text_config"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "num_kv_shared_layers": 4,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 64,
    }
    config = {
        **GEMMA,
        "architectures": ["Gemma4AssistantForCausalLM"],
        "dtype": "bfloat16",
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "5.6.0",
        "use_ordered_embeddings": ordered,
    }
    weights = random_weights("Gemma 4 assistant")
    if not ordered:
        weights = {name: a for name, a in weights.items() if "masked" not in name}
    else:
        order = mx.array(np.random.default_rng(1).permutation(VOCABULARY))
        weights["masked_embedding.token_ordering"] = order
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    head = loaded(write(tmp_path, config, weights), GEMMA_TARGET)

    w = numpy_of(weights)
    random = np.random.default_rng(3)
    shared = {
        kind: tuple(random.normal(size=(6, 2, size)).astype(np.float32) for _ in range(2))
        for kind, size in (("sliding_attention", 8), ("full_attention", 16))
    }
    views = [
        View(*(mx.array(each.swapaxes(0, 1)[None]) for each in shared[kind]), 6)
        for kind in ("full_attention", "sliding_attention")
    ]
    settings = {
        "layer_types": text["layer_types"],
        "sliding_attention": (1e4, 1.0),
        "full_attention": (1e6, 0.25),
    }
    fed, own_fed = STATES[0][0], mx.array(STATES[0][:1])[None]
    for token in CHAIN:
        own_fed, hidden = head(mx.array([[token]]), own_fed, views)
        fed, output = gemma4_assistant(w, settings, EMBEDDING[token], fed, shared, 6)
        expected = w["model.embed_tokens.weight"] @ output
        if ordered:
            best = np.argsort(-linear(w, "masked_embedding.centroids", output))[:3]
            kept = w["masked_embedding.token_ordering"].reshape(8, -1)[best].flatten()
            expected = np.where(np.isin(np.arange(VOCABULARY), kept), expected, -np.inf)
        assert_close(head.logits(hidden)[0, 0], expected)


# --- refused heads ---


def refused(directory: Path, target: Config = TARGET) -> str:
    with pytest.raises(LoadError) as caught:
        load_head(find_head(directory), target)
    message = str(caught.value)
    assert message.startswith(f"{directory}: ")
    assert "\n" not in message
    return message


UNKNOWN = {
    "a_new_setting": True,
    "hidden_act": "relu",
    "is_causal": False,
    "parallel_drafting": True,
    "partial_rotary_factor": 0.5,
    "attention_mode": "mla",
    "quantization_config": {"quant_method": "compressed-tensors"},
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("nested", [False, True])
def test_a_setting_that_is_not_supported_is_named(tmp_path: Path, name: str, nested: bool) -> None:
    setting = {name: UNKNOWN[name]}
    config = speculators(setting) if nested else {**SPECULATORS, **setting}
    publish(tmp_path, EAGLE_3["EAGLE-3.1"]._replace(config=config))
    assert name in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fc_norm": True}, "both norm_before_fc and fc_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, "layer -1"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "layer 8, but this model has 8 layers"),
        ({"layer_types": ["linear_attention"]}, "layer_types, linear_attention"),
        ({"layer_types": ["sliding_attention"]}, "no sliding_window"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5"),
        ({"speculators_model_type": "peagle"}, "unknown kind, peagle"),
    ],
)
def test_settings_that_do_not_go_together(
    tmp_path: Path, change: Mapping[str, Any], named: str
) -> None:
    publish(tmp_path, EAGLE_3["EAGLE-3.1"]._replace(config={**SPECULATORS, **change}))
    assert named in refused(tmp_path)


def test_other_parts_are_named(tmp_path: Path) -> None:
    made = {name: mx.array(each) for name, each in EAGLE_3["EAGLE-3.1"].weights.items()}
    write(tmp_path, SPECULATORS, {**made, "hot_token_id": mx.zeros(1)})
    assert "hot_token_id" in refused(tmp_path)
    write(tmp_path, SPECULATORS, {**made, "fc.weight": mx.zeros((WIDTH, 3 * WIDTH), mx.uint8)})
    assert "the weights fc.weight have 8 bits, but no scales" in refused(tmp_path)
    write(tmp_path, DEEP_SPEC | {"markov_head_type": "gated"}, made)
    assert "markov_head_type: gated" in refused(tmp_path)
    weights = random_weights("Gemma 4 assistant")
    write(tmp_path, GEMMA, {**weights, "lm_head.weight": mx.zeros((VOCABULARY, WIDTH))})
    assert "lm_head differs from embed_tokens" in refused(tmp_path, GEMMA_TARGET)


def test_a_torch_file_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE_3_OF_LLAMA))
    call = torch_file.Call(torch_file.Global("os", "system"), "exit")
    content = torch_file.dumps({"fc.weight": call})
    torch_file.write_archive(tmp_path / "pytorch_model.bin", content, {})
    with pytest.raises(LoadError, match=r"os\.system.*nothing was run"):
        load_head(find_head(tmp_path), TARGET)
