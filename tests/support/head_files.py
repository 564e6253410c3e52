"""Write folders with small trained heads, and with models that contain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxspec.models.heads import Head
from mlxspec.models.heads.blocks import DFlash, DSpark
from mlxspec.models.heads.chains import Eagle3, Gemma4Assistant, QwenMTP

Config = dict[str, Any]
Weights = dict[str, mx.array]

SIZES: Config = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
}
TARGET: Config = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 8}
QWEN_TARGET: Config = {
    "model_type": "qwen3_5",
    "text_config": {
        **TARGET,
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "full_attention_interval": 4,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [1, 1, 0],
            "rope_theta": 5e4,
            "partial_rotary_factor": 0.25,
        },
    },
}
GEMMA_TARGET: Config = {
    "model_type": "gemma4",
    "text_config": {**TARGET, "model_type": "gemma4_text", "global_head_dim": 16},
}

EAGLE_3: Config = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 48}
DFLASH: Config = {
    **SIZES,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 2]},
}
DSPARK: Config = {**DFLASH, "architectures": ["Qwen3DSparkModel"], "markov_rank": 32}
QWEN: Config = {"model_type": "qwen3_5_mtp", "text_config": QWEN_TARGET["text_config"]}
GEMMA: Config = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 32,
    "use_ordered_embeddings": True,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 3,
    "text_config": {
        **{name: size for name, size in SIZES.items() if name != "rope_theta"},
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "global_head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
HEADS: dict[str, tuple[type[Head], Config, Config]] = {
    "Gemma 4 assistant": (Gemma4Assistant, GEMMA, GEMMA_TARGET),
    "Qwen MTP": (QwenMTP, QWEN, QWEN_TARGET),
    "EAGLE-3": (Eagle3, EAGLE_3, TARGET),
    "DFlash": (DFlash, DFLASH, TARGET),
    "DSpark": (DSpark, DSPARK, TARGET),
}
"""By kind: the class, the head's settings and the target's settings."""


def random_weights(name: str) -> Weights:
    """Return random float32 weights for a head; those of norms scatter around 1."""
    kind, config, target = HEADS[name]
    mx.random.seed(1)
    return {
        name: mx.random.normal(array.shape) * 0.1 + (array.ndim == 1)
        if mx.issubdtype(array.dtype, mx.floating)
        else array
        for name, array in tree_flatten(kind(config, target).parameters())
    }


def write(directory: Path, config: Config, weights: Weights, file: str = "model") -> Path:
    """Write a folder with settings and weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / f"{file}.safetensors"), weights)
    return directory


def write_head(directory: Path, name: str) -> Path:
    """Write the folder of a random head."""
    return write(directory, HEADS[name][1], random_weights(name))


def original(weights: Weights, prefix: str = "mtp.") -> Weights:
    """Return Qwen MTP weights as in original checkpoints, with norms centred at zero."""
    return {
        f"{prefix}{name}": array - ("norm" in name and array.ndim == 1)
        for name, array in weights.items()
    }


def write_target(directory: Path, weights: Weights) -> Path:
    """Write the folder of a Qwen MTP target in which only the head's tensors are complete."""
    return write(directory, QWEN_TARGET, {"model.norm.weight": mx.ones(32), **weights})


def write_scripted_head(directory: Path, model: Path) -> Path:
    """Write a DSpark head for a scripted model that always predicts the next token."""
    own = json.loads((model / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")
    layer = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    settings = {name: own[name] for name in names} | layer
    settings["dflash_config"] = {"mask_token_id": 0, "target_layer_ids": [0]}
    config = {**DSPARK, **settings, "num_target_layers": 1, "markov_rank": own["hidden_size"]}
    head = DSpark(config, own)
    weights = {name: mx.zeros_like(array) for name, array in tree_flatten(head.parameters())}
    # The two factors' product is the target's own logits after each token.
    of_target = mx.load(str(model / "model.safetensors"))
    weights["markov_head.markov_w1.weight"] = of_target["model.embed_tokens.weight"]
    weights["markov_head.markov_w2.weight"] = 8 * of_target["lm_head.weight"]
    return write(directory, config, weights)
