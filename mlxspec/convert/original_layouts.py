"""What an original checkpoint becomes: Hugging Face's layout, or that of mlx-examples.

First the plans of both layouts, then the files of the tokenizer.
"""

import functools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ConversionError
from ..models.npz import config_from_params, original_to_mlx_name
from .model_writer import PlannedModel, Quantization, TensorGroup
from .original_checkpoint import OriginalCheckpoint, OriginalTensor

_NOT_MLX_EXAMPLES = {"max_seq_len", "max_position_embeddings", "max_batch_size", "tied_embeddings"}
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")


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
        is_rotated = name.endswith(("attention.wq.weight", "attention.wk.weight"))
        head_dim = params["head_dim"] if is_rotated else None
        groups.append(_group(mlx_name, tensor, dtype, quantization, head_dim=head_dim))

    tokenizer = find_tokenizer_model(checkpoint.directory, params["vocab_size"])
    config = config_from_params(params, checkpoint.shapes, tie_word_embeddings=checkpoint.tied)
    config |= {"torch_dtype": str(dtype).removeprefix("mlx.core.")} | special_token_ids(tokenizer)
    if quantization is not None:
        config["quantization"] = config["quantization_config"] = quantization
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
        config["quantization"] = {key: quantization[key] for key in ("group_size", "bits")}
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
    """A tensor under its new name, or its quantised parts; nothing is computed yet.

    mlx-lm's ``quantize_model`` does the same with all modules of a model. It cannot serve here: MLX
    does not load ``.pth`` files lazily, so all weights would be in memory at once.
    """

    def encode(weight: mx.array) -> dict[str, mx.array]:
        weight = weight.astype(dtype)
        if head_dim is not None:
            weight = half_split_rows(weight, head_dim)
        # Like mlx-lm, a weight whose rows are no whole number of groups stays as it is.
        if quantization is None or weight.ndim < 2 or weight.shape[-1] % quantization["group_size"]:
            return {name: weight}
        # The modes but affine have no biases.
        parts = [name.removesuffix("weight") + part for part in ("weight", "scales", "biases")]
        return dict(zip(parts, mx.quantize(weight, **quantization), strict=False))

    return TensorGroup(
        outline=encode(mx.zeros(tensor.shape, dtype)),
        parameters=math.prod(tensor.shape),
        produce=lambda: encode(tensor.load()),
    )


def find_tokenizer_model(directory: Path, vocab_size: int) -> Path:
    """The checkpoint's SentencePiece model (``tokenizer.model``, ``tokenizer.model.v3``).

    Raises:
        ConversionError: there is none, it is of another kind, or has more pieces than the
            model has embeddings.
    """
    candidates = [directory / "tokenizer.model", *sorted(directory.glob("tokenizer.model.v*"))]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        if (directory / "tekken.json").is_file():
            raise ConversionError(
                f"{directory / 'tekken.json'}: Tekken tokenizers are not converted; "
                "use the model's Hugging Face version with --hf-path"
            )
        raise ConversionError(f"{candidates[0]}: does not exist")
    with path.open("rb") as file:
        start = file.read(1000)
    if _TIKTOKEN_LINE.match(start):
        raise ConversionError(
            f"{path}: tiktoken tokenizers (Llama 3) are not converted; "
            "use the model's Hugging Face version with --hf-path"
        )
    pieces = _sentencepiece(path).vocab_size()
    if pieces > vocab_size:
        raise ConversionError(f"{path}: has {pieces} pieces, the model {vocab_size} embeddings")
    return path


def special_token_ids(tokenizer_model: Path) -> dict[str, int]:
    """The ids of a text's begin and end, for ``config.json``."""
    processor = _sentencepiece(tokenizer_model)
    ids = {"bos_token_id": processor.bos_id(), "eos_token_id": processor.eos_id()}
    return {name: number for name, number in ids.items() if number >= 0}


def write_sentencepiece_files(tokenizer_model: Path, directory: Path) -> None:
    """Write ``tokenizer.json``, whose ids are SentencePiece's, its settings and the original."""
    from ..models.sentencepiece_tokenizer import build_tokenizer, tokenizer_config

    build_tokenizer(tokenizer_model).save(str(directory / "tokenizer.json"))
    config = json.dumps(tokenizer_config(tokenizer_model), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    generation = json.dumps(special_token_ids(tokenizer_model), indent=2)
    (directory / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
    copy_tokenizer_model(tokenizer_model, directory)


def copy_tokenizer_model(tokenizer_model: Path, directory: Path) -> None:
    """Copy the SentencePiece model under its usual name."""
    shutil.copyfile(tokenizer_model, directory / "tokenizer.model")


def _sentencepiece(path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError, ValueError):  # ValueError: a message that is not UTF-8
        raise ConversionError(f"{path}: is no SentencePiece model") from None
