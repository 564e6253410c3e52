"""Loads original checkpoints of Mistral and Llama: ``consolidated.*`` and ``params.json``."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import LoadError, printable
from ..models.model import load_lazily
from ..models.model_files import check_weights_file, read_json_object
from ..models.torch_file import read_torch_file
from ..terminal import one_line

# Checkpoints for model parallelism have shards. These split the first matrices of attention and
# MLP, and the output layer, by rows (outputs), and the last matrices by columns (inputs). Every
# shard has all norms.
_SPLIT_BY_ROWS = {"wq", "wk", "wv", "w1", "w3", "output"}
_SPLIT_BY_COLUMNS = {"wo", "w2"}

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
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
_NAME = re.compile(r"(layers\.\d+\.)?(.+)\.weight")
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_KNOWN_PARAMS = {
    *("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size"),
    *("norm_eps", "rope_theta", "use_scaled_rope", "sliding_window", "tied_embeddings"),
    *("multiple_of", "ffn_dim_multiplier"),
    *("max_seq_len", "max_position_embeddings", "max_batch_size"),
}


def load_original(directory: Path, scratch: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load mlx-lm's model with a checkpoint's unevaluated weights, and its configuration.

    Args:
        scratch: an empty directory with enough disk space for the checkpoint, whose tensors are
            written there under Hugging Face's names. Keep it as long as the model.

    Raises:
        LoadError: a file, a setting or a tensor is missing, damaged or unknown.
        OSError: the tensors cannot be written.
    """
    params = _given(read_json_object(directory / "params.json"))
    if unknown := sorted(params.keys() - _KNOWN_PARAMS):  # the model might compute something else
        raise LoadError(
            f"{directory}/params.json: the key {printable(unknown[0])} is not one of Llama's or "
            "Mistral's; use --hf-path with a Hugging Face checkpoint of the model"
        )
    try:
        shapes = _write_weights(directory, params, scratch)
        config = config_from_params(params, shapes)
        if _OUTPUT in shapes:  # in small Llamas, a copy of the embedding
            files = [(name, _file(scratch, name)) for name in (_OUTPUT, _EMBEDDING)]
            output, embedding = (check_weights_file(file)[name] for name, file in files)
            config["tie_word_embeddings"] = bool(mx.array_equal(output, embedding))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{directory}: a setting or tensor is missing or wrong: {error}") from error
    (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        return load_lazily(scratch, config)
    except LoadError as error:
        raise LoadError(str(error).replace(str(scratch), str(directory))) from error


# --- weights ---


def _write_weights(
    directory: Path, params: Mapping[str, Any], scratch: Path
) -> dict[str, Sequence[int]]:
    """Write a file for each tensor, joining model-parallel shards; return the tensors' shapes."""
    shapes: dict[str, Sequence[int]] = {}
    for pieces in zip(*_shards(directory), strict=True):
        original = pieces[0][0]
        if any(name != original for name, _ in pieces):
            raise ValueError(f"the shards differ in {printable(original)}")
        if original.endswith("rope.freqs"):  # a table that models compute themselves
            continue
        name = original_to_mlx_name(original)
        array = _join(original, [piece for _, piece in pieces], params["dim"])
        if original.endswith(("attention.wq.weight", "attention.wk.weight")):
            array = half_split_rows(array, _head_dim(params))
        try:
            mx.eval(array)
        except RuntimeError as error:
            raise LoadError(
                f"{directory}: the tensor {printable(original)} cannot be read ({one_line(error)})"
            ) from error
        try:
            mx.save_safetensors(str(_file(scratch, name)), {name: array})
        except RuntimeError as error:  # MLX's, as on a full disk
            raise OSError(one_line(error)) from error
        shapes[name] = array.shape
        del pieces, array  # frees their memory before the next ones are read
    return shapes


def _file(scratch: Path, name: str) -> Path:
    return scratch / f"model-{name}.safetensors"


def _shards(directory: Path) -> list[Iterator[tuple[str, mx.array]]]:
    """The tensors of each shard; all shards have the same names in the same order."""
    if paths := sorted(directory.glob("consolidated*.safetensors")):
        return [_read_safetensors(paths)]
    if paths := sorted(directory.glob("consolidated.*.pth")):
        return [read_torch_file(path) for path in paths]
    raise LoadError(f"{directory}: has no consolidated.* file; name another directory")


def _read_safetensors(paths: Sequence[Path]) -> Iterator[tuple[str, mx.array]]:
    for path in paths:
        tensors = check_weights_file(path)
        for name in sorted(tensors):
            yield name, tensors.pop(name)


def _join(name: str, pieces: list[mx.array], dim: int) -> mx.array:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in _SPLIT_BY_ROWS:
        return mx.concatenate(pieces, axis=0)
    if module in _SPLIT_BY_COLUMNS:
        return mx.concatenate(pieces, axis=1)
    if module == "tok_embeddings":
        # Llama 1 and 2 split the embedding by width, Llama 3 by vocabulary.
        return mx.concatenate(pieces, axis=0 if pieces[0].shape[-1] == dim else 1)
    return pieces[0]


def original_to_mlx_name(name: str) -> str:
    """mlx-lm's name for an original tensor.

    Raises:
        ValueError: Llama's and Mistral's models have no such tensor.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _MODULES:
        raise ValueError(f"the tensor {printable(name)} is unknown")
    layer = f"model.{match[1]}" if match[1] else ""
    return f"{layer}{_MODULES[match[2]]}.weight"


def half_split_rows(weight: mx.array, head_dim: int) -> mx.array:
    """Reorder the rows of a query or key projection for RoPE in Hugging Face's layout.

    RoPE rotates pairs of rows of a head: in original checkpoints rows 2i and 2i + 1, in Hugging
    Face's layout rows i and i + head_dim / 2.

    Args:
        weight: (heads × head_dim, width).

    Raises:
        ValueError: the weight has another shape.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


# --- settings ---


def config_from_params(
    params: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Convert ``params.json`` to the ``config.json`` that mlx-lm reads, with Hugging Face's keys.

    Args:
        params: the content of ``params.json``. Missing values have Llama's defaults.
        shapes: the shape of each tensor, by mlx-lm's name. They give the sizes that Llama's
            ``params.json`` lacks.

    Raises:
        KeyError: a setting or a tensor is missing.
    """
    given = _given(params)
    kind = "llama" if "multiple_of" in given else "mistral"
    config = {
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": given["dim"],
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": given["n_layers"],
        "num_attention_heads": given["n_heads"],
        "num_key_value_heads": given.get("n_kv_heads", given["n_heads"]),
        "head_dim": _head_dim(given),
        "rms_norm_eps": given["norm_eps"],
        "rope_theta": given.get("rope_theta", 10000.0),
        "vocab_size": shapes[_EMBEDDING][0],
        "tie_word_embeddings": _OUTPUT not in shapes,
    }
    if "sliding_window" in given:
        config["sliding_window"] = given["sliding_window"]
    if given.get("use_scaled_rope"):
        config["max_position_embeddings"] = 131072
        # params.json does not distinguish Llama 3.1 and 3.2: the small text models of 3.2
        # (widths 2048 and 3072) were published with 32, larger models (width 4096 or more) with 8.
        factor = 32.0 if given["dim"] < 4096 else 8.0
        config["rope_scaling"] = {**_LLAMA3_ROPE, "factor": factor}
    for key in ("max_seq_len", "max_position_embeddings"):
        if key in given:
            config["max_position_embeddings"] = given[key]
    return config


def _given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are neither null nor off."""
    return {key: value for key, value in params.items() if value not in (None, False)}


def _head_dim(params: Mapping[str, Any]) -> int:
    head_dim: int = params.get("head_dim") or params["dim"] // params["n_heads"]
    return head_dim
