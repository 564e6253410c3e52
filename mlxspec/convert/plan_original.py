"""From an original checkpoint to Hugging Face's layout, or to that of mlx-examples."""

import functools
import math

import mlx.core as mx

from ..loading.npz import config_from_params, original_to_mlx_name
from .original_checkpoint import OriginalCheckpoint, OriginalTensor
from .planned_model import PlannedModel, TensorGroup
from .quantization import Quantization
from .safetensors_file import TensorSpec
from .tokenizer_files import (
    copy_tokenizer_model,
    find_tokenizer_model,
    special_token_ids,
    write_sentencepiece_files,
)

_NOT_MLX_EXAMPLES = {"max_seq_len", "max_position_embeddings", "max_batch_size", "tied_embeddings"}


def plan_hugging_face_layout(
    checkpoint: OriginalCheckpoint, dtype: mx.Dtype, quantization: Quantization | None
) -> PlannedModel:
    """Plan the layout that mlx-lm and Hugging Face's tools load."""
    params = checkpoint.params
    groups = []
    for name, tensor in checkpoint.tensors.items():
        if name == "output.weight" and checkpoint.tied:
            continue
        mlx_name = original_to_mlx_name(name)
        assert mlx_name is not None
        rotated = name.endswith(("attention.wq.weight", "attention.wk.weight"))
        groups.append(
            _group(
                mlx_name,
                tensor,
                dtype,
                quantization,
                head_dim=params["head_dim"] if rotated else None,
            )
        )

    tokenizer = find_tokenizer_model(checkpoint.directory, params["vocab_size"])
    config = config_from_params(params, checkpoint.shapes, tie_word_embeddings=checkpoint.tied)
    config |= {"torch_dtype": str(dtype).removeprefix("mlx.core.")} | special_token_ids(tokenizer)
    if quantization is not None:
        config["quantization"] = config["quantization_config"] = quantization.config
    return PlannedModel(config, groups, functools.partial(write_sentencepiece_files, tokenizer))


def plan_mlx_examples_layout(
    checkpoint: OriginalCheckpoint, dtype: mx.Dtype, quantization: Quantization | None
) -> PlannedModel:
    """Plan the older layout of mlx-examples: the original's names and neighbouring RoPE pairs.

    There only linear layers are quantised, the embedding is not.
    """
    groups = [
        _group(name, tensor, dtype, quantization if name != "tok_embeddings.weight" else None)
        for name, tensor in checkpoint.tensors.items()
    ]
    params = checkpoint.params
    # mlx-examples passes the settings to its model, which takes no others. use_scaled_rope stays:
    # better refused there than computed without.
    config = {key: value for key, value in params.items() if key not in _NOT_MLX_EXAMPLES}
    config["model_type"] = "llama" if "multiple_of" in params else "mistral"
    if quantization is not None:
        config["quantization"] = {
            "group_size": quantization.group_size,
            "bits": quantization.bits,
        }
    tokenizer = find_tokenizer_model(checkpoint.directory, params["vocab_size"])
    return PlannedModel(config, groups, functools.partial(copy_tokenizer_model, tokenizer))


def half_split_rows(weight: mx.array, head_dim: int) -> mx.array:
    """Reorder the rows of a query or key projection for RoPE on halves.

    The originals rotate rows 2i and 2i + 1 of a head together, Hugging Face's layout rows i
    and i + head_dim / 2.

    Args:
        weight: (heads × head_dim, width)
        head_dim: rows of a head.
    """
    rows, width = weight.shape
    pairs = weight.reshape(rows // head_dim, head_dim // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _group(
    name: str,
    tensor: OriginalTensor,
    dtype: mx.Dtype,
    quantization: Quantization | None,
    *,
    head_dim: int | None = None,
) -> TensorGroup:
    def encode(weight: mx.array) -> dict[str, mx.array]:
        weight = weight.astype(dtype)
        if head_dim is not None:
            weight = half_split_rows(weight, head_dim)
        if quantization is None or weight.ndim < 2:
            return {name: weight}
        return quantization.encode(name.removesuffix(".weight"), weight)

    # MLX is lazy: nothing is computed, but shapes and types are there.
    outline = encode(mx.zeros(tensor.shape, dtype))
    return TensorGroup(
        specs={part: TensorSpec.of(array) for part, array in outline.items()},
        parameters=math.prod(tensor.shape),
        produce=lambda: encode(tensor.load()),
    )
