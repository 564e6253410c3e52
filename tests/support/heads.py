"""Small heads with random weights, in float32, for the small models of :mod:`.random_models`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxspec.models.heads.blocks import DFlash, DSpark

# --- heads that draft blocks ---


def dflash(target: nn.Module, **settings: object) -> tuple[dict[str, Any], DFlash]:
    """A DFlash and its config.json, as z-lab's checkpoints have it.

    Args:
        target: mlx-lm's model.
        settings: add to or override the settings.
    """
    of_head = {"mask_token_id": 0, "target_layer_ids": [0, 1]}
    config = {"block_size": 6, "dflash_config": of_head, **_as_target(target), **settings}
    return config, _random(DFlash, config, target)


def dspark(target: nn.Module, **settings: object) -> tuple[dict[str, Any], DSpark]:
    """A DSpark and its config.json, as DeepSpec's checkpoints have it; see :func:`dflash`."""
    of_head = {"mask_token_id": 0, "target_layer_ids": [0, 1], "markov_rank": 8}
    config = {"block_size": 5, **of_head, **_as_target(target), **settings}
    return config, _random(DSpark, config, target)


def _config(target: nn.Module) -> dict[str, Any]:
    return {**vars(target.args)}


def _as_target(target: nn.Module) -> dict[str, Any]:
    """The settings of two layers for this target."""
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
    """A head whose norms have random weights, too."""
    mx.random.seed(7)
    head = head_class(config, _config(target))
    head.update(
        tree_map(
            lambda w: w + 0.2 * mx.random.normal(w.shape) if w.ndim == 1 else w, head.parameters()
        )
    )
    mx.eval(head.parameters())
    return head
