"""Mistral's and Llama's own names and settings, and models in ``weights.npz``, which has them too.

The originals call a layer's query projection ``layers.0.attention.wq.weight`` and keep their
settings in ``params.json``; mlx-lm and Hugging Face call it
``model.layers.0.self_attn.q_proj.weight`` and keep them in ``config.json``. The older layout of
mlx-examples (``weights.npz``) has the original names and settings.

First the names and shapes of tensors, then the settings, then the loading of ``weights.npz``.
The converter uses the first two for the original checkpoints themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import LoadError
from .model_files import check_layers

# mlx-lm's name of a module.
_TOP_LEVEL = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_PATTERN = re.compile(r"layers\.(0|[1-9][0-9]*)\.(.+)")
_PARAMETERS = ("weight", "scales", "biases")
_NOT_WEIGHTS = ("rope.freqs",)  # a table that Llama's checkpoints carry

_KNOWN_PARAMS = {
    *("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size"),
    *("norm_eps", "rope_theta", "use_scaled_rope", "sliding_window", "tied_embeddings"),
    *("multiple_of", "ffn_dim_multiplier"),
    *("max_seq_len", "max_position_embeddings", "max_batch_size"),
    # what mlx-examples adds in its config.json
    *("model_type", "quantization", "rope_traditional"),
}


def original_to_mlx_name(name: str) -> str | None:
    """mlx-lm's name of an original tensor, or None where its models have none (``rope.freqs``).

    ``.weight``, and of quantised layers ``.scales`` and ``.biases``, stay as they are.
    """
    module, _, parameter = name.rpartition(".")
    if parameter not in _PARAMETERS:
        return None
    if module in _TOP_LEVEL:
        return f"{_TOP_LEVEL[module]}.{parameter}"
    match = _LAYER_PATTERN.fullmatch(module)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{parameter}"


def complete_params(
    params: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The settings of ``params.json`` with everything filled in that Llama leaves open.

    ``shapes`` are those of the (merged) tensors by original name. Only their first axis is
    read, so those of quantised tensors do as well. ``hidden_dim`` and a ``vocab_size`` of -1
    come from there; ``n_kv_heads``, ``head_dim`` and ``rope_theta`` have Llama's defaults.

    Raises:
        LoadError: a key is missing, has an impossible value, or is not known, so that the
            model would compute something else.
    """
    unknown = [k for k, v in params.items() if k not in _KNOWN_PARAMS and v not in (None, False)]
    if "moe" in unknown:
        raise LoadError("mixture-of-experts models in Mistral's layout (key 'moe') are not known")
    if unknown:
        raise LoadError(f"the key {sorted(unknown)[0]!r} belongs to no known Llama or Mistral")

    full = {key: value for key, value in params.items() if key in _KNOWN_PARAMS}
    for key in ("dim", "n_layers", "n_heads", "norm_eps"):
        if full.get(key) is None:
            raise LoadError(f"the key {key!r} is missing")
    if full.get("n_kv_heads") is None:
        full["n_kv_heads"] = full["n_heads"]
    if full.get("head_dim") is None:
        full["head_dim"] = _positive_int(full, "dim") // _positive_int(full, "n_heads")
    if full.get("rope_theta") is None:
        full["rope_theta"] = 10000.0
    if full.get("hidden_dim") is None:
        full["hidden_dim"] = _rows(shapes, "layers.0.feed_forward.w1.weight")
    if full.get("vocab_size", -1) in (None, -1):
        full["vocab_size"] = _rows(shapes, "tok_embeddings.weight")

    for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"):
        _positive_int(full, key)
    for key in ("max_position_embeddings", "max_seq_len"):
        if full.get(key) is not None:
            _positive_int(full, key)
    for key in ("norm_eps", "rope_theta"):
        if not isinstance(full[key], int | float) or not full[key] > 0:
            raise LoadError(f"the key {key!r} is {full[key]!r}, not a positive number")
    if full["head_dim"] % 2 or full["n_heads"] % full["n_kv_heads"]:
        raise LoadError(
            f"head_dim {full['head_dim']} must be even and n_heads {full['n_heads']} "
            f"a multiple of n_kv_heads {full['n_kv_heads']}"
        )
    window = full.get("sliding_window")
    if window is not None and not isinstance(window, int):
        raise LoadError(f"a sliding_window of {window!r}, different per layer, is not known")
    return full


def config_from_params(
    params: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    tie_word_embeddings: bool = False,
    rope_traditional: bool = False,
) -> dict[str, Any]:
    """``config.json`` in Hugging Face's keys, as mlx-lm reads it, from ``params.json``.

    Args:
        params: the content of ``params.json``, or of a ``config.json`` of mlx-examples.
        shapes: shape of each tensor by original name, see :func:`complete_params`.
        tie_word_embeddings: whether the embedding serves as the output layer, too.
        rope_traditional: whether the weights still rotate neighbouring pairs, as the
            originals do; the key is written only then, since Hugging Face does not know it.

    Raises:
        LoadError: see :func:`complete_params`.
    """
    full = complete_params(params, shapes)
    is_llama = full.get("model_type", "llama" if "multiple_of" in full else "mistral") == "llama"
    config = {
        "architectures": ["LlamaForCausalLM" if is_llama else "MistralForCausalLM"],
        "model_type": "llama" if is_llama else "mistral",
        "hidden_act": "silu",
        "hidden_size": full["dim"],
        "intermediate_size": full["hidden_dim"],
        "num_hidden_layers": full["n_layers"],
        "num_attention_heads": full["n_heads"],
        "num_key_value_heads": full["n_kv_heads"],
        "head_dim": full["head_dim"],
        "rms_norm_eps": full["norm_eps"],
        "rope_theta": full["rope_theta"],
        "vocab_size": full["vocab_size"],
        "tie_word_embeddings": tie_word_embeddings,
    }
    if not is_llama:
        config["sliding_window"] = full.get("sliding_window")
    context = full.get("max_position_embeddings") or full.get("max_seq_len")
    if full.get("use_scaled_rope"):
        config["rope_scaling"] = _llama3_rope_scaling(full["dim"])
        context = context or 131072
    if context:
        config["max_position_embeddings"] = context
    if rope_traditional:
        config["rope_traditional"] = True
    return config


def _llama3_rope_scaling(dim: int) -> dict[str, Any]:
    """What ``use_scaled_rope`` stands for in Llama 3.1 and 3.2."""
    return {
        "rope_type": "llama3",
        # params.json does not tell the two apart: the small text models of Llama 3.2 (widths
        # 2048 and 3072) were published with 32, everything from width 4096 on with 8.
        "factor": 32.0 if dim < 4096 else 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _positive_int(params: Mapping[str, Any], key: str) -> int:
    value = params[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise LoadError(f"the key {key!r} is {value!r}, not a positive whole number")
    return value


def _rows(shapes: Mapping[str, Sequence[int]], name: str) -> int:
    if name not in shapes:
        raise LoadError(f"the tensor {name} is missing")
    return shapes[name][0]


def npz_files(directory: Path) -> list[Path]:
    """``weights.npz``, or its shards ``weights.00.npz`` and so on; empty if there are none."""
    whole = directory / "weights.npz"
    return [whole] if whole.is_file() else sorted(directory.glob("weights.*.npz"))


def load_npz_model(directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model with the weights in ``directory``, not evaluated yet.

    Raises:
        LoadError: a file is damaged, or settings and weights do not fit together.
    """
    weights = _read(directory)
    if "hidden_size" not in config:
        try:
            config = _converted_config(config, weights)
        except LoadError as error:
            raise LoadError(f"{directory / 'config.json'}: {error}") from error
        weights = _renamed(weights, directory)
    return build_model(config, weights)


def build_model(config: Mapping[str, Any], weights: dict[str, mx.array]) -> nn.Module:
    """mlx-lm's model with these weights, by its own names.

    Raises:
        ValueError: they do not fit the configuration.
    """
    from mlx_lm.utils import _get_classes

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
