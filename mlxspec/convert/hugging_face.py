"""Hugging Face checkpoints of every architecture that mlx-lm knows, through its own classes."""

import contextlib
import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from ..errors import ConversionError, printable
from ..models.model_files import (
    check_layers,
    download,
    is_repository_name,
    load_mlx_lm_model,
    local_path,
)
from ..models.other_models import hub_repository
from .checkpoint_files import count_tensors, read_settings
from .model_writer import PlannedModel, Quantization, TensorGroup

_HALVES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
# Never *.py: what a repository's code does is its author's choice.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "generation_config.json", "LICENSE*"),
)


def open_hugging_face(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint, downloaded from the Hub if it is no local one.

    Raises:
        ConversionError: there is no such directory.
        LoadError: there is no such repository, or it cannot be downloaded.
    """
    path = local_path(path_or_repo)
    if path.is_dir():
        if revision is not None:
            raise ConversionError(f"{path}: is a directory, which has no --revision")
        return path
    name, its_revision = hub_repository(str(path_or_repo))
    if path.exists() or not is_repository_name(name):
        raise ConversionError(f"{name}: neither a directory nor owner/name of a Hub repository")
    return download(name, revision or its_revision)


def plan_hugging_face(
    directory: Path, dtype: mx.Dtype | None, quantization: Quantization | None
) -> PlannedModel:
    """Plan a checkpoint in mlx-lm's layout; nothing is read yet but names and shapes.

    Raises:
        ConversionError: a file is missing or truncated, or mlx-lm cannot load the checkpoint.
    """
    tensors = _check_files(directory)
    try:
        check_layers(read_settings(directory / "config.json"), tensors)
        model, config = load_mlx_lm_model(directory, {})
    except Exception as error:  # mlx-lm checks little, so that any operation of it may fail
        raise ConversionError(f"{directory}: mlx-lm cannot load it ({_reason(error)})") from None

    written_dtype = dtype or _half_type(config, model)
    if written_dtype is not None:
        _cast(model, written_dtype)
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = str(written_dtype).removeprefix("mlx.core.")
    if quantization is not None:
        model, config = _quantize(directory, model, config, quantization)
    # As mlx-lm does: a vision tower that is not written cannot be configured.
    if "vision_tower" not in getattr(model, "model", {}):
        config.pop("vision_config", None)
    config.pop("_name_or_path", None)
    config.pop("auto_map", None)  # names Python files, which are not copied
    return PlannedModel(config, _groups(model), lambda target: _copy_tokenizer(directory, target))


def _check_files(directory: Path) -> int:
    """How many tensors the weights have, of a checkpoint that seems to be whole."""
    path = directory / "config.json"
    if not path.is_file() and (directory / "params.json").is_file():
        raise ConversionError(
            f"{path}: does not exist; use --torch-path for an original checkpoint"
        )
    config = read_settings(path)
    if config.get("model_file") is not None:
        code = printable(config["model_file"])
        raise ConversionError(f"{directory}: wants its own code {code} run, which is never done")
    weights = sorted(directory.glob("model*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_settings(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConversionError(f"{index}: has no weight_map")
        names = weight_map.values()
        if missing := sorted({str(n) for n in names} - {path.name for path in weights}):
            raise ConversionError(f"{directory / missing[0]}: does not exist")
    if not weights:
        raise ConversionError(f"{directory}: has no model*.safetensors; PyTorch's are not read")
    return sum(map(count_tensors, weights))


def _half_type(config: Mapping[str, Any], model: Any) -> mx.Dtype | None:
    """The 16-bit type to cast to, None if the tensors keep theirs.

    mlx-lm casts to what the configuration names. Where that is no 16-bit type a checkpoint
    keeps the 16-bit types that it has, and gets float16 if it has none.
    """
    named = str(config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype"))
    if named in _HALVES:
        return _HALVES[named]
    types = {array.dtype for _, array in tree_flatten(model.parameters())}
    return None if types & set(_HALVES.values()) else mx.float16


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Cast a model's arrays, which are not evaluated yet.

    mlx-lm has this within its ``convert``, where it cannot be called alone.
    """
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        if mx.issubdtype(array.dtype, mx.floating) and wanted(name):
            return array.astype(dtype)
        return array

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantize(
    directory: Path, model: Any, config: dict[str, Any], quantization: Quantization
) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import quantize_model

    def scales() -> int:
        return sum(name.endswith(".scales") for name, _ in tree_flatten(model.parameters()))

    before = scales()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it announces the bits per weight
            model, config = quantize_model(model, config, **quantization)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = _reason(error)
        raise ConversionError(f"{directory}: mlx-lm cannot quantise it ({reason})") from None
    if scales() == before:
        already = "is quantised already; leave out -q" if before else "has nothing to quantise"
        raise ConversionError(f"{directory}: {already}")
    return model, config


def _reason(error: Exception) -> str:
    return printable(" ".join(f"{type(error).__name__}: {error}".split()))


def _groups(model: Any) -> list[TensorGroup]:
    """A group per module; each holds the only reference to its arrays."""
    tensors: dict[str, dict[str, mx.array]] = {}
    for name, array in tree_flatten(model.parameters()):
        tensors.setdefault(name.rpartition(".")[0], {})[name] = array
    modules = dict(model.named_modules())
    return [_group(modules.get(name), arrays) for name, arrays in tensors.items()]


def _group(module: Any, arrays: dict[str, mx.array]) -> TensorGroup:
    if bits := getattr(module, "bits", None):
        parameters = sum(a.size * 32 // bits for n, a in arrays.items() if n.endswith(".weight"))
    else:
        parameters = sum(array.size for array in arrays.values())
    outline = {name: mx.zeros(array.shape, array.dtype) for name, array in arrays.items()}
    return TensorGroup(outline, parameters, produce=lambda: arrays)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer as it is, or make ``tokenizer.json`` where only SentencePiece's is.

    mlx-lm's ``save`` would write what transformers made of it instead, and copy Python files.
    """
    from ..models.tokenizer import load_tokenizer

    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.suffix != ".py":
                shutil.copyfile(path, target / path.name)
    if (source / "tokenizer.model").is_file() and not (source / "tokenizer.json").is_file():
        load_tokenizer(source, None).save_pretrained(target)
