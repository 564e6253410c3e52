"""Small heads with random weights, in float32, for the small models of :mod:`.random_models`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxspec.models.heads.blocks import DFlash, DSpark
from mlxspec.models.heads.chains import Eagle3, Gemma4Assistant, QwenMTP

# --- heads that draft chains ---


def eagle3(target: nn.Module, **settings: object) -> tuple[dict[str, Any], Eagle3]:
    """Return an EAGLE-3 head with half the target's vocabulary; see :func:`dflash`."""
    own = {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [1, 1, 2]}
    config = {**_as_target(target), **own, "draft_vocab_size": 32, **settings}
    return config, _random(Eagle3, config, target)


def eagle31(target: nn.Module) -> tuple[dict[str, Any], Eagle3]:
    """Return a two-layer EAGLE-3.1 head, one layer with a sliding window; see :func:`dflash`."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    return eagle3(target, num_hidden_layers=2, norm_output=True, **windows)


def qwen_mtp(target: nn.Module, **settings: object) -> tuple[dict[str, Any], QwenMTP]:
    """Return an MTP head for a Qwen model; see :func:`dflash`."""
    config = _config(target)
    text = {**config.get("text_config", config), "mtp_num_hidden_layers": 1, **settings}
    config = {"model_type": "qwen3_5_mtp", "text_config": text}
    return config, _random(QwenMTP, config, target)


def gemma4_assistant(
    target: nn.Module, **settings: object
) -> tuple[dict[str, Any], Gemma4Assistant]:
    """Return the assistant of a Gemma 4; see :func:`dflash`."""
    of_target = _config(target)
    of_target = of_target.get("text_config", of_target)
    names = ("num_key_value_heads", "head_dim", "global_head_dim", "vocab_size", "sliding_window")
    text = {
        **{name: of_target[name] for name in names},
        "model_type": "gemma4_text",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "use_double_wide_mlp": False,
    }
    config = {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": of_target["hidden_size"],
        "num_centroids": 8,
        "centroid_intermediate_top_k": 3,
        "use_ordered_embeddings": True,
        "text_config": text,
        **settings,
    }
    head = _random(Gemma4Assistant, config, target)
    if "masked_embedding" in head:
        head.masked_embedding.token_ordering = mx.random.permutation(of_target["vocab_size"])
    return config, head


# --- heads that draft blocks ---


def dflash(target: nn.Module, **settings: object) -> tuple[dict[str, Any], DFlash]:
    """Return a DFlash head and its config.json, in the format of z-lab's checkpoints.

    Args:
        target: mlx-lm's model.
        settings: add to or override the settings.
    """
    of_head = {"mask_token_id": 0, "target_layer_ids": [0, 1]}
    config = {"block_size": 6, "dflash_config": of_head, **_as_target(target), **settings}
    return config, _random(DFlash, config, target)


def dspark(target: nn.Module, **settings: object) -> tuple[dict[str, Any], DSpark]:
    """Return a DSpark head in the format of DeepSpec's checkpoints; see :func:`dflash`."""
    of_head = {"mask_token_id": 0, "target_layer_ids": [0, 1], "markov_rank": 8}
    config = {"block_size": 5, **of_head, **_as_target(target), **settings}
    return config, _random(DSpark, config, target)


def _config(target: nn.Module) -> dict[str, Any]:
    return {**vars(target.args)}


def _as_target(target: nn.Module) -> dict[str, Any]:
    """Return the settings of two layers for this target."""
    config = _config(target)
    text = config.get("text_config") or config
    return {
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "num_target_layers": text["num_hidden_layers"],
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 32768,
    }


def _random(head_class: Any, config: dict[str, Any], target: nn.Module) -> Any:
    """Return a head with random weights, those of its norms included."""
    mx.random.seed(7)
    head = head_class(config, _config(target))
    head.update(
        tree_map(
            lambda w: w + 0.2 * mx.random.normal(w.shape) if w.shape[1:] == () else w,
            {name: part for name, part in head.parameters().items() if name != "d2t"},
        )
    )
    mx.eval(head.parameters())
    return head
