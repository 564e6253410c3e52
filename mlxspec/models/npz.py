"""Models in the older layout of mlx-examples: ``weights.npz`` beside ``config.json``.

The directories of ``llms/mistral`` and ``llms/llama`` have the names and settings of the
original checkpoints; those of ``llms/hf_llm`` have Hugging Face's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import LoadError
from .model_files import check_layers
from .weight_names import config_from_params, original_to_mlx_name

_NOT_WEIGHTS = ("rope.freqs",)  # a table that Llama's checkpoints carry


def npz_files(directory: Path) -> list[Path]:
    """``weights.npz``, or its shards ``weights.00.npz`` and so on; empty if there are none."""
    whole = directory / "weights.npz"
    return [whole] if whole.is_file() else sorted(directory.glob("weights.*.npz"))


def load_npz_model(directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model with the weights in ``directory``, not evaluated yet.

    Raises:
        LoadError: a file is damaged, or settings and weights do not fit together.
    """
    from mlx_lm.utils import _get_classes

    weights = _read(directory)
    if "hidden_size" not in config:
        try:
            config = _converted_config(config, weights)
        except LoadError as error:
            raise LoadError(f"{directory / 'config.json'}: {error}") from error
        weights = _renamed(weights, directory)
    check_layers(config, len(weights))
    model_class, args_class = _get_classes(dict(config))
    model = model_class(args_class.from_dict(config))
    if quantization := config.get("quantization"):
        nn.quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            class_predicate=lambda path, _: f"{path}.scales" in weights,
        )
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.eval()
    model.load_weights(list(weights.items()))
    return model


def _read(directory: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for path in npz_files(directory):
        try:
            content = mx.load(str(path))
        except (ValueError, RuntimeError, OSError) as error:
            raise LoadError(f"{path}: no NumPy archive, or a truncated one") from error
        assert isinstance(content, dict)  # always so for an .npz
        weights |= content
    return weights


def _converted_config(params: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, Any]:
    config = config_from_params(
        params,
        {name: array.shape for name, array in weights.items()},
        tie_word_embeddings="output.weight" not in weights,
        # mlx-examples keeps the originals' order of rows, except for TinyLlama, and says so.
        rope_traditional=params.get("rope_traditional", True),
    )
    if "quantization" in params:
        config["quantization"] = params["quantization"]
    return config


def _renamed(weights: Mapping[str, mx.array], directory: Path) -> dict[str, mx.array]:
    renamed = {}
    for name, array in weights.items():
        if name in _NOT_WEIGHTS:
            continue
        new_name = original_to_mlx_name(name)
        if new_name is None:
            raise LoadError(f"{directory}: weights.npz has an unknown tensor {name!r}")
        renamed[new_name] = array
    return renamed
