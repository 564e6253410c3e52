"""LoRA and other adapters for the demo model, made by mlx-lm's own functions."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxspec.models.model_files import DEMO_DIRECTORY

_KIND = {"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}


def write_adapters(directory: Path, *, dora: bool = False, seed: int = 0) -> Path:
    """Write random adapters that change the demo model's output."""
    directory.mkdir(parents=True)
    model, _ = mlx_lm.load(str(DEMO_DIRECTORY))
    linear_to_lora_layers(model, _KIND["num_layers"], _KIND["lora_parameters"], use_dora=dora)
    mx.random.seed(seed)
    adapters = {
        name: mx.random.normal(weight.shape, dtype=weight.dtype, scale=0.3)
        for name, weight in tree_flatten(model.trainable_parameters())
        if "lora_" in name
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), adapters)
    kind = {"fine_tune_type": "dora" if dora else "lora", **_KIND}
    (directory / "adapter_config.json").write_text(json.dumps(kind))
    return directory
