"""Writes a loaded model, cast or quantised, with one file's tensors in memory at a time."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..errors import ConversionError
from ..models.model_files import one_line

MAX_SHARD_BYTES = 1 << 30  # of a safetensors file, and of the tensors in memory

Progress = Callable[[int, int], None]
"""Called with the bytes converted so far and their total."""

Quantization = dict[str, Any]
"""``mode``, ``bits`` and ``group_size``, as in MLX's arguments and in ``config.json``."""

HALVES = ("float16", "bfloat16")


def prepare(
    model: nn.Module,
    config: dict[str, Any],
    dtype: mx.Dtype | None,
    quantization: Quantization | None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Cast and quantise a model lazily.

    Args:
        model: a model whose weights are not evaluated yet.
        config: its configuration.
        dtype: the float type to cast to; None for the model's own 16-bit type.
        quantization: how to quantise the weights, if at all.

    Returns:
        the model, and the configuration to write.

    Raises:
        ConversionError: mlx-lm cannot quantise the model.
    """
    dtype = dtype or _half_type(config, model)
    if dtype is not None:
        _cast(model, dtype)
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = type_name(dtype)
    if quantization is not None:
        model, config = _quantize(model, config, quantization)
    # As in mlx-lm: a model that is written without its vision tower cannot configure it.
    if "vision_tower" not in getattr(model, "model", {}):
        config.pop("vision_config", None)
    config.pop("_name_or_path", None)
    config.pop("auto_map", None)  # names Python files, which are not copied
    return model, config


def _half_type(config: dict[str, Any], model: nn.Module) -> mx.Dtype | None:
    """The 16-bit type that the configuration names; else float16 if no tensor has one, or None."""
    named = str(config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype"))
    if named in HALVES:
        return getattr(mx, named)
    types = {type_name(array.dtype) for _, array in tree_flatten(model.parameters())}
    return mx.float16 if types.isdisjoint(HALVES) else None


def type_name(dtype: mx.Dtype) -> str:
    """A type's name, as in ``config.json``."""
    return str(dtype).removeprefix("mlx.core.")


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast a model's arrays as mlx-lm's ``convert`` does."""
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        if mx.issubdtype(array.dtype, mx.floating) and wanted(name):
            return array.astype(dtype)
        return array

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantize(
    model: nn.Module, config: dict[str, Any], quantization: Quantization
) -> tuple[nn.Module, dict[str, Any]]:
    from mlx_lm.utils import quantize_model

    def scales() -> int:
        return sum(name.endswith(".scales") for name, _ in tree_flatten(model.parameters()))

    before = scales()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            model, config = quantize_model(model, config, **quantization)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConversionError(f"mlx-lm cannot quantise the model ({one_line(error)})") from None
    if scales() == before:
        problem = "is quantised already" if before else "has nothing to quantise"
        raise ConversionError(f"the model {problem}; leave out -q")
    return model, config


def write_weights(
    directory: Path, model: nn.Module, on_progress: Progress, max_shard_bytes: int
) -> tuple[int, int]:
    """Write ``model*.safetensors`` and their index, and remove the weights from the model.

    Returns:
        the bytes and the number of parameters.

    Raises:
        ConversionError: float16 cannot hold a weight.
        OSError: a file cannot be written.
    """
    from mlx_lm.utils import get_total_parameters

    parameters = get_total_parameters(model)
    weights = dict(tree_flatten(model.parameters()))
    model.update(tree_map_with_path(lambda *_: mx.array([]), model.parameters()))
    shards: list[list[str]] = []  # a tensor beyond the limit has its own file
    room = 0
    for name, array in weights.items():
        if not shards or array.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= array.nbytes

    done, total = 0, sum(array.nbytes for array in weights.values())
    on_progress(done, total)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = file_name if len(shards) > 1 else "model.safetensors"
        tensors = {name: weights.pop(name) for name in names}
        for name, array in tensors.items():
            _check_finite(name, array)
            mx.eval(array)
            done += array.nbytes
            on_progress(done, total)
        with open(directory / file_name, "wb") as file:  # Python's errors say what is wrong
            mx.save_safetensors(file, tensors, {"format": "mlx"})
        weight_map |= dict.fromkeys(names, file_name)
        del tensors, array
        mx.clear_cache()  # MLX would keep the buffers for later arrays
    index = {
        "metadata": {"total_size": total, "total_parameters": parameters},
        "weight_map": dict(sorted(weight_map.items())),
    }
    text = json.dumps(index, indent=4)
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return total, parameters


def _check_finite(name: str, array: mx.array) -> None:
    """Refuse values beyond float16's largest number, 65504."""
    if array.dtype == mx.float16 and not mx.isfinite(mx.stack([array.max(), array.min()])).all():
        raise ConversionError(f"{name}: float16 cannot hold its values; choose another --dtype")
