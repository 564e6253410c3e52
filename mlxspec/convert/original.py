"""Loads original checkpoints of Mistral and Llama: ``consolidated.*`` and ``params.json``."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import ConversionError, LoadError, printable
from ..models.model_files import (
    check_layers,
    check_weights_file,
    one_line,
    read_json_object,
)
from .torch_file import as_array, read_torch_file

# Model parallelism splits a layer's first matrices by rows (outputs), and the second ones by
# columns (inputs). Every shard has the norms.
_SPLIT_BY_ROWS = {"wq", "wk", "wv", "w1", "w3", "output"}
_SPLIT_BY_COLUMNS = {"wo", "w2"}


def load_original(directory: Path, scratch: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load mlx-lm's model with a checkpoint's unevaluated weights, and its configuration.

    Args:
        directory: the checkpoint's directory.
        scratch: an empty directory on a disk with room for the tensors of ``.pth`` files, which MLX
            does not load lazily. Keep it as long as the model.

    Raises:
        ConversionError: a file or tensor is missing, damaged, of a wrong shape or unknown.
        LoadError: ``params.json`` is missing or holds no settings.
    """
    from mlx_lm.utils import _get_classes

    path = directory / "params.json"
    if not path.is_file() and (directory / "config.json").is_file():
        raise ConversionError(f"{directory}: is a Hugging Face checkpoint; use --hf-path for it")
    params = read_json_object(path)
    tensors = _read_tensors(directory, params, scratch)
    for name, array in tensors.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ConversionError(f"{directory}: {printable(name)} is {array.dtype}, not float")
    output, embedding = (tensors.get(f"{n}.weight") for n in ("output", "tok_embeddings"))
    tied = bool(params.get("tied_embeddings")) and output is None
    if output is not None and embedding is not None and output.dtype == embedding.dtype:
        tied = bool(mx.array_equal(output, embedding))
    try:
        shapes = {name: array.shape for name, array in tensors.items()}
        config = config_from_params(params, shapes, tie_word_embeddings=tied)
    except LoadError as error:
        raise ConversionError(f"{path}: {error}") from None
    # The 16-bit type that most matrices have, or float16 if none has one.
    types = Counter(str(a.dtype).rpartition(".")[2] for a in tensors.values() if a.ndim == 2)
    config["torch_dtype"] = max(("float16", "bfloat16"), key=types.__getitem__)
    try:
        weights = {}
        for name, array in tensors.items():
            if (mlx_name := original_to_mlx_name(name)) is None:
                raise ValueError(f"the tensor {printable(name)} is not known")
            if name.endswith(("attention.wq.weight", "attention.wk.weight")):
                array = half_split_rows(array, config["head_dim"])
            weights[mlx_name] = array
        check_layers(config, len(weights))
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
        if tied:
            weights.pop("lm_head.weight", None)
        model.load_weights(list(weights.items()))
        return model, config
    except (TypeError, ValueError) as error:  # from MLX; TypeError for sizes beyond its range
        raise ConversionError(f"{directory}: does not fit params.json: {one_line(error)}") from None


def _read_tensors(directory: Path, params: Mapping[str, Any], scratch: Path) -> dict[str, mx.array]:
    """All tensors by name, without RoPE's tables; model-parallel shards are joined."""
    tensors: dict[str, mx.array] = {}
    if safetensors := sorted(directory.glob("consolidated*.safetensors")):
        for path in safetensors:
            check_weights_file(path)
            tensors |= _load(path)
        return {name: array for name, array in tensors.items() if not _is_table(name)}
    shards = sorted(directory.glob("consolidated.*.pth"))
    if not shards:
        raise ConversionError(f"{directory}: has no consolidated.* files; name another directory")
    for index, path in enumerate(shards):
        if path.name != f"consolidated.{index:02d}.pth":
            raise ConversionError(f"{path}: consolidated.{index:02d}.pth is missing; fetch it too")
    contents = {path: read_torch_file(path) for path in shards}
    names = dict.fromkeys(name for content in contents.values() for name in content)
    for index, name in enumerate(name for name in names if not _is_table(name)):
        pieces: dict[str, mx.array] = {}
        for path, content in contents.items():
            if name not in content:
                raise ConversionError(f"{path}: {printable(name)} is missing; fetch it again")
            pieces[str(len(pieces))] = as_array(content[name])
        place = scratch / f"{index}.safetensors"
        mx.save_safetensors(str(place), pieces)
        del pieces  # so that they are not held while the next tensor is read
        loaded = _load(place)
        in_order = [loaded[str(number)] for number in range(len(shards))]
        tensors[name] = _join(name, in_order, params.get("dim"))
    return tensors


def _is_table(name: str) -> bool:
    return name.endswith("rope.freqs")


def _load(path: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    return loaded


def _join(name: str, pieces: list[mx.array], dim: int | None) -> mx.array:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module in _SPLIT_BY_ROWS:
        axis = 0
    elif module in _SPLIT_BY_COLUMNS:
        axis = 1
    elif module == "tok_embeddings":
        # Llama 1 and 2 split the embedding's width, Llama 3 its vocabulary.
        axis = 0 if pieces[0].shape[-1:] == (dim,) else 1
    else:
        return pieces[0]
    try:
        return mx.concatenate(pieces, axis) if len(pieces) > 1 else pieces[0]
    except ValueError:
        shapes = ", ".join(str(piece.shape) for piece in pieces)
        raise ConversionError(f"{name}: its pieces {shapes} do not fit together") from None


# --- names and settings ---

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
_NAME = re.compile(r"(?:layers\.(0|[1-9][0-9]*)\.)?(.+)\.weight")
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


def original_to_mlx_name(name: str) -> str | None:
    """mlx-lm's name for an original tensor; None if its models have none (``rope.freqs``)."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _MODULES:
        return None
    layer, module = match[1], _MODULES[match[2]]
    if (layer is None) != (module in ("model.embed_tokens", "model.norm", "lm_head")):
        return None
    return f"{module}.weight" if layer is None else f"model.layers.{layer}.{module}.weight"


def config_from_params(
    params: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """Convert ``params.json`` to a ``config.json`` with Hugging Face's keys, which mlx-lm reads.

    Args:
        params: the content of ``params.json``. Missing values have Llama's defaults.
        shapes: the shape of each joined tensor by original name, which gives the missing sizes.
        tie_word_embeddings: whether the embedding is also the output layer.

    Raises:
        LoadError: a key is missing or has an impossible value, or is unknown, so the model might
            compute something else.
    """
    given = {key: value for key, value in params.items() if value is not None}
    if unknown := sorted(k for k in given.keys() - _KNOWN_PARAMS if given[k] is not False):
        raise LoadError(f"the key {unknown[0]!r} is not one of Llama's or Mistral's")
    positive = partial(_positive, given)
    if "hidden_dim" not in given:
        given["hidden_dim"] = _rows(shapes, "layers.0.feed_forward.w1.weight")
    if given.get("vocab_size", -1) == -1:
        given["vocab_size"] = _rows(shapes, "tok_embeddings.weight")
    dim, heads = positive("dim"), positive("n_heads")
    is_llama = "multiple_of" in given
    config = {
        "architectures": ["LlamaForCausalLM" if is_llama else "MistralForCausalLM"],
        "model_type": "llama" if is_llama else "mistral",
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": positive("hidden_dim"),
        "num_hidden_layers": positive("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": positive("n_kv_heads", heads),
        "head_dim": positive("head_dim", dim // heads),
        "rms_norm_eps": positive("norm_eps", kind=int | float),
        "rope_theta": positive("rope_theta", 10000.0, int | float),
        "vocab_size": positive("vocab_size"),
        "tie_word_embeddings": tie_word_embeddings,
    }
    if config["head_dim"] % 2 or heads % config["num_key_value_heads"]:
        raise LoadError(
            f"head_dim {config['head_dim']} must be even and n_heads {heads} "
            f"a multiple of n_kv_heads {config['num_key_value_heads']}"
        )
    if not is_llama:
        window = config["sliding_window"] = given.get("sliding_window")
        if not isinstance(window, int | None):
            raise LoadError("a sliding_window that differs between layers is not supported")
    context = 131072 if given.get("use_scaled_rope") else 0
    for key in ("max_seq_len", "max_position_embeddings"):
        if key in given:
            context = positive(key)
    if context:
        config["max_position_embeddings"] = context
    if given.get("use_scaled_rope"):
        # params.json does not distinguish Llama 3.1 and 3.2: the small text models of 3.2
        # (widths 2048 and 3072) were published with 32, everything from width 4096 on with 8.
        config["rope_scaling"] = _LLAMA3_ROPE | {"factor": 32.0 if dim < 4096 else 8.0}
    return config


def _positive(
    params: Mapping[str, Any], key: str, default: float | None = None, kind: Any = int
) -> Any:
    """A setting that must be a positive number."""
    value = params.get(key, default)
    if value is None:
        raise LoadError(f"the key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        what = "whole number" if kind is int else "number"
        raise LoadError(f"the key {key!r} is {value!r}, not a positive {what}")
    return value


def _rows(shapes: Mapping[str, Sequence[int]], name: str) -> int:
    if name not in shapes:
        raise LoadError(f"the tensor {name} is missing")
    return shapes[name][0]


def half_split_rows(weight: mx.array, head_dim: int) -> mx.array:
    """Reorder the rows of a query or key projection for RoPE on halves.

    The originals rotate rows 2i and 2i + 1 of a head together, Hugging Face's layout rows i
    and i + head_dim / 2.

    Args:
        weight: (heads × head_dim, width)
        head_dim: the number of rows of a head.

    Raises:
        ValueError: the weight has another shape.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


# --- the tokenizer ---


def write_original_tokenizer(source: Path, vocab_size: int, target: Path) -> dict[str, int]:
    """Write ``tokenizer.json`` with SentencePiece's ids, its settings, and the original file.

    Args:
        source: the checkpoint with ``tokenizer.model`` or ``tokenizer.model.v3``.
        vocab_size: the number of the model's embeddings.
        target: the directory to write into.

    Returns:
        the BOS and EOS ids, for ``config.json``.

    Raises:
        ConversionError: the file is missing, or has more pieces than the model has embeddings.
        LoadError: the file is of another kind, or its ids cannot be reproduced.
    """
    from ..models.sentencepiece_tokenizer import build_tokenizer

    candidates = [source / "tokenizer.model", *sorted(source.glob("tokenizer.model.v*"))]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        if (source / "tekken.json").is_file():
            raise ConversionError(
                f"{source / 'tekken.json'}: Tekken tokenizers are not converted; use the model's "
                "Hugging Face version with --hf-path"
            )
        raise ConversionError(f"{candidates[0]}: does not exist; copy the model's own there")
    tokenizer, settings = build_tokenizer(path)
    pieces = tokenizer.get_vocab_size()
    if pieces > vocab_size:
        raise ConversionError(f"{path}: has {pieces} pieces, but the model {vocab_size} embeddings")
    vocabulary = tokenizer.get_vocab()
    ids = {
        f"{key}_id": vocabulary[settings[key]]
        for key in ("bos_token", "eos_token")
        if key in settings
    }
    tokenizer.save(str(target / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", ids)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (target / name).write_text(text + "\n", encoding="utf-8")
    shutil.copyfile(path, target / "tokenizer.model")
    return ids
