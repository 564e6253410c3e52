"""Converts a checkpoint into a directory that mlx-lm loads."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..errors import ConversionError, OptionError
from ..files import new_directory, recover_directory
from ..models.model_files import check_name, check_readable, one_line
from .hugging_face import copy_tokenizer, load_head_alone, load_hugging_face, open_hugging_face
from .original import load_original, write_original_tokenizer

MAX_SHARD_BYTES = 1 << 30  # of a safetensors file, and of the tensors in memory

Progress = Callable[[int, int], None]
"""Called with the bytes converted so far and their total."""

Quantization = dict[str, Any]
"""``mode``, ``bits`` and ``group_size``, as in MLX's arguments and in ``config.json``."""

_HALVES = ("float16", "bfloat16")
_DTYPES = (*_HALVES, "float32")


@dataclass(frozen=True)
class Conversion:
    """What was converted.

    Attributes:
        path: its directory.
        nbytes: the bytes of its weights.
        parameters: their number.
        head: for a trained head, its kind and what was done to its norms.
    """

    path: Path
    nbytes: int
    parameters: int
    head: str | None = None

    @property
    def bits_per_weight(self) -> float:
        """Mean size of a parameter in bits, quantisation scales included."""
        return 8 * self.nbytes / self.parameters


def convert(
    *,
    torch_path: str | Path | None = None,
    hf_path: str | Path | None = None,
    mlx_path: str | Path = "mlx_model",
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    revision: str | None = None,
    head: bool = False,
    on_progress: Progress = lambda done, total: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Convert one checkpoint; ``mlx_path`` appears complete or not at all.

    Args:
        torch_path: the directory of an original Mistral or Llama checkpoint (``consolidated.*``,
            ``params.json``, ``tokenizer.model``).
        hf_path: instead, a Hugging Face checkpoint, a directory or a repository on the Hub.
        mlx_path: the directory to write.
        quantize: quantise the weights, with ``q_mode`` (affine, mxfp4, mxfp8, nvfp4),
            ``q_bits`` and ``q_group_size``; None means MLX's default.
        dtype: float16, bfloat16 or float32; by default the checkpoint's own 16-bit type, or
            float16 if it has none.
        force: replace an existing model at ``mlx_path``.
        revision: branch, tag or commit of a repository on the Hub.
        head: convert only the trained head that ``hf_path`` is or carries.
        on_progress: called with the bytes converted so far and their total.
        max_shard_bytes: the most bytes of a safetensors file.

    Raises:
        OptionError: the options contradict each other, or MLX does not support them.
        ConversionError: the checkpoint cannot be converted, or ``mlx_path`` cannot be written.
        LoadError: the checkpoint cannot be found or read, or a name is not UTF-8.
    """
    quantization = _quantization(quantize, q_mode, q_bits, q_group_size)
    _check_options(torch_path, hf_path, dtype, revision, head)
    target = Path(mlx_path)
    check_name(target)
    with output_directory(target, force=force) as directory:
        source = Path(torch_path or "")
        if hf_path is not None:
            source = open_hugging_face(hf_path, revision, head)
        check_outside(source, target)
        check_readable(source)
        try:
            with TemporaryDirectory(dir=directory) as scratch:
                about = None
                if head:
                    model, config, about = load_head_alone(source)
                elif hf_path is None:
                    model, config = load_original(source, Path(scratch))
                    config |= write_original_tokenizer(source, config["vocab_size"], directory)
                else:
                    model, config = load_hugging_face(source)
                    copy_tokenizer(source, directory)
                to = getattr(mx, dtype) if dtype else None
                model, config = _prepare(model, config, to, quantization)
                sizes = write_weights(directory, model, on_progress, max_shard_bytes)
        except OSError as error:
            if isinstance(error.filename, str) and source in Path(error.filename).parents:
                reason = error.strerror or error
                raise ConversionError(f"{error.filename}: cannot be read ({reason})") from None
            raise
        # mlx-lm's save_config would add a key.
        text = json.dumps(dict(sorted(config.items())), indent=4)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    return Conversion(target, *sizes, about)


def _quantization(
    quantize: bool, mode: str | None, bits: int | None, group_size: int | None
) -> Quantization | None:
    """The quantisation that the options request, if any."""
    options = {"--q-mode": mode, "--q-bits": bits, "--q-group-size": group_size}
    given = [f"{option} {value}" for option, value in options.items() if value is not None]
    if not quantize:
        if given:
            raise OptionError(f"{given[0]}: has no effect without -q; add -q")
        return None
    quantization: Quantization = {"mode": mode or "affine", "bits": bits, "group_size": group_size}
    try:  # so that it fails before a download
        if group_size is not None and group_size < 1:
            raise ValueError("a group needs at least one weight")
        mx.quantize(mx.zeros((32, 32 * (group_size or 32))), **quantization)
    except (OverflowError, TypeError, ValueError) as error:
        raise OptionError(f"{' '.join(given)}: not supported by MLX ({one_line(error)})") from None
    return quantization


def _check_options(
    torch_path: str | Path | None,
    hf_path: str | Path | None,
    dtype: str | None,
    revision: str | None,
    head: bool,
) -> None:
    if (torch_path is None) == (hf_path is None):
        raise OptionError("name one checkpoint: MODEL, --torch-path or --hf-path")
    if head and torch_path is not None:
        raise OptionError(f"--head: no original checkpoint has one ({torch_path}); use --hf-path")
    if dtype is not None and dtype not in _DTYPES:
        raise OptionError(f"--dtype {dtype}: unknown; choose from {', '.join(_DTYPES)}")
    if revision is not None and hf_path is None:
        raise OptionError(f"--revision {revision} has no effect without --hf-path: leave it out")


# --- the weights, with one file's tensors in memory at a time ---


def _prepare(
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
                config[key] = _type_name(dtype)
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
    if named in _HALVES:
        return getattr(mx, named)
    types = {_type_name(array.dtype) for _, array in tree_flatten(model.parameters())}
    return mx.float16 if types.isdisjoint(_HALVES) else None


def _type_name(dtype: mx.Dtype) -> str:
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


# --- the directory ---


@contextlib.contextmanager
def output_directory(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a directory to fill, next to ``target``; it replaces ``target`` at the end.

    If the body raises, even by an interrupt, the new directory is removed and ``target`` stays
    unchanged. If a process was killed earlier, its directory is moved to ``target`` first if it is
    complete, and removed otherwise.

    Raises:
        ConversionError: ``target`` is in use, or cannot be written.
    """
    target = Path(os.path.abspath(target))
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        recover_directory(target)
        _check_target(target, force=force)
        with new_directory(target, replace=force) as partial:
            yield partial
    except BaseException as error:
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise ConversionError(f"{target}: cannot be written ({reason})") from None
        raise


def _check_target(target: Path, *, force: bool) -> None:
    problem = None
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        problem = "exists and is a link or not a directory; name another --mlx-path"
    elif Path.cwd().is_relative_to(target):
        problem = "is or contains the working directory; name a directory inside it"
    elif target.is_dir() and any(target.iterdir()):
        if not force:
            problem = "exists and is not empty; name another --mlx-path or add --force"
        elif not (target / "config.json").is_file():
            problem = "holds no model, and --force replaces only models; name another --mlx-path"
    if problem:
        raise ConversionError(f"{target}: {problem}")


def check_outside(source: Path, target: Path) -> None:
    """Raise ConversionError if replacing ``target`` would remove the checkpoint at ``source``."""
    if source.resolve().is_relative_to(target.resolve()):
        raise ConversionError(f"{target}: holds the checkpoint itself; name another --mlx-path")
