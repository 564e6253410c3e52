"""Converts a checkpoint into a directory that mlx-lm can load."""

import contextlib
import io
import itertools
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from rich.filesize import decimal

from ..errors import FileError, LoadError, OptionError
from ..files import new_directory
from ..models.heads import Head
from ..models.heads import loading as heads
from ..models.heads.chains import QwenMTP, norms_centred_at_zero
from ..models.heads.settings import text_of
from ..models.model import load_lazily
from ..models.model_files import (
    WEIGHTS,
    find_directory,
    local_path,
    no_such_model,
    read_config,
    read_json_object,
)
from ..terminal import one_line
from .original import load_original

Quantization = dict[str, Any]
"""``mode``, ``bits`` and ``group_size``, as in MLX's arguments and in ``config.json``."""

_HALVES = ("float16", "bfloat16")
_DTYPE_NAMES = ("dtype", "torch_dtype")  # transformers renamed it in version 4.56


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
) -> tuple[int, int, str | None]:
    """Convert one checkpoint; ``mlx_path`` appears complete or not at all.

    Args:
        torch_path: the directory of an original Mistral or Llama checkpoint (``consolidated.*``,
            ``params.json``, ``tokenizer.model``).
        hf_path: instead of it, a Hugging Face checkpoint: a directory or a repository on the Hub.
        quantize: quantise the weights. Without it, the following three have no effect.
        q_bits: bits per weight; None for MLX's default.
        q_group_size: weights per scale; None for MLX's default.
        q_mode: affine, mxfp4, mxfp8 or nvfp4; None for affine.
        dtype: float16, bfloat16 or float32; by default the checkpoint's own 16-bit type, or
            float16 if it has none.
        force: replace an existing model at ``mlx_path``.
        revision: branch, tag or commit of a repository on the Hub.
        head: convert only the trained head, which is ``hf_path`` itself or a part of it.

    Returns:
        the size of the weights in bytes, including quantisation scales; the number of parameters;
        and for a trained head its kind and what was done to its norms, otherwise None.

    Raises:
        OptionError: the options contradict each other, or MLX does not support them.
        LoadError: the checkpoint cannot be found, read or converted, or some of its weights are not
            finite in the type to write.
        FileError: ``mlx_path`` is in use or cannot be written.
    """
    from mlx_lm.utils import get_total_parameters, save_config, save_model

    quantization = _quantization(quantize, q_mode, q_bits, q_group_size)
    if (torch_path is None) == (hf_path is None):
        raise OptionError("name one checkpoint: MODEL, --torch-path or --hf-path")
    if head and torch_path is not None:
        raise OptionError(
            f"--head: {torch_path} is in Mistral's or Llama's original format, without trained "
            "heads; use --hf-path"
        )
    target = Path(os.path.abspath(local_path(mlx_path)))
    _check_target(target, force, local_path(torch_path or hf_path or ""))
    with new_directory(target, replace=force) as directory, TemporaryDirectory(dir=directory) as d:
        about = None
        if hf_path is None:
            source = local_path(torch_path or "")
            if not os.path.isdir(source):  # also if its name is too long
                raise LoadError(no_such_model(os.fspath(torch_path or "")))
            model, config = load_original(source, Path(d))
        elif head:
            model, config, about = _load_head(heads.head_directory(hf_path, revision))
        else:
            source = find_directory(hf_path, revision)
            model, config = load_lazily(source, read_config(source))
        model, config = _prepare(model, config, dtype, quantization)
        nbytes = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        parameters = get_total_parameters(model)
        has_vision = "vision_tower" in getattr(model, "model", {})
        needed, free = decimal(nbytes), shutil.disk_usage(directory).free
        if free < nbytes:
            raise FileError(
                f"{target}: the model needs {needed}, but only {decimal(free)} are free there; "
                "make room, or name another --mlx-path"
            )
        if not head:
            _copy_tokenizer(source, directory)
        try:
            save_model(directory, model, donate_model=True)
        except RuntimeError as error:  # MLX's
            reason = one_line(error)
            raise FileError(f"{target}: cannot be written ({reason}); it needs {needed}") from error
        _check_finite(directory, hf_path or torch_path or "")
        save_config(config, directory / "config.json", keep_vision_config=has_vision)
    return nbytes, parameters, about


def _load_head(directory: Path) -> tuple[Head, dict[str, Any], str]:
    """Load a head with unevaluated weights.

    Args:
        directory: the folder of a head, or of a model that carries one.

    Returns:
        the head, its configuration, and a text on its kind and on its changed norms. (Norms may be
        centred at zero in the checkpoint, but the head expects them centred at one.)

    Raises:
        LoadError: there is no head of a supported kind, or a file is damaged.
    """
    head_files = heads.find_head(directory)
    head, config, about = heads.load_lazily(head_files), head_files.config, head_files.kind.title
    if head_files.kind is QwenMTP and not config.get(heads.CONVERTED):
        tensors = head_files.tensors()
        norms = sum("norm" in name and array.ndim == 1 for name, array in tensors.items())
        centred = len(norms_centred_at_zero(tensors, head_files.raw))
        about += f" ({centred} of its {norms} norms were centred at zero, so 1.0 was added to them)"
    return head, {**config, heads.CONVERTED: True}, about


# Never *.py, since a repository's code is not trusted.
_COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("vocab.txt", "*.tiktoken", "*.jinja", "chat_template.json", "generation_config.json"),
    "LICENSE*",
)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, or make ``tokenizer.json`` from SentencePiece's model.

    mlx-lm's ``save`` would write the tokenizer as transformers does, and copy Python files.

    Raises:
        LoadError: there is no tokenizer, a file is damaged or cannot be read, or its SentencePiece
            model is of an unsupported kind.
    """
    from ..models.tokenizer import HUGGING_FACE_FILES, write_tokenizer

    for path in itertools.chain.from_iterable(map(source.glob, (*_COPIED, "*.json"))):
        if path.is_file() and path.suffix != ".py" and not os.access(path, os.R_OK):
            raise LoadError(f"{path}: cannot be read; allow it")
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.suffix != ".py":
                if path.suffix == ".json":
                    read_json_object(path)  # raises if it is damaged
                shutil.copyfile(path, target / path.name)
    if not any((source / name).is_file() for name in HUGGING_FACE_FILES):
        write_tokenizer(source, target)


def _check_finite(directory: Path, source: str | Path) -> None:
    """Check that all weights that were written to a directory are finite.

    Args:
        source: the checkpoint's name, for errors.
    """
    for path in sorted(directory.glob(WEIGHTS)):
        tensors = cast("dict[str, mx.array]", mx.load(str(path)))
        names = set(tensors)
        while tensors:  # so that each is freed after its turn
            name, array = tensors.popitem()
            if not mx.issubdtype(array.dtype, mx.floating):
                continue
            bad = cast(int, mx.sum(~mx.isfinite(array)).item())
            if not bad:
                continue
            layer, _, part = name.rpartition(".")
            quantised = part in ("scales", "biases") and f"{layer}.scales" in names
            where = layer if quantised else name
            what = f"{source}: {bad:,} of {array.size:,} numbers of {where} are not finite"
            damaged = not quantised and bool(mx.any(mx.isnan(array)).item())
            if array.dtype == mx.float16 and not damaged:
                raise LoadError(f"{what} in float16, whose largest is 65,504; use --dtype bfloat16")
            raise LoadError(f"{what}, so the checkpoint is damaged; download it again")


def _quantization(
    quantize: bool, mode: str | None, bits: int | None, group_size: int | None
) -> Quantization | None:
    """The quantisation that the options request, if any."""
    if not quantize:
        return None
    quantization: Quantization = {"mode": mode or "affine", "bits": bits, "group_size": group_size}
    try:  # so that it fails before a download
        mx.quantize(mx.zeros((32, 32 * (group_size or 32))), **quantization)
    except (OverflowError, TypeError, ValueError) as error:
        raise OptionError(f"-q: not supported by MLX ({one_line(error)})") from None
    return quantization


def _check_target(target: Path, force: bool, source: Path) -> None:
    needed = (Path.cwd(), source.resolve())  # the latter is no path for a repository on the Hub
    there = filter(os.path.exists, needed)
    holds_one = any(path.is_relative_to(target.resolve()) for path in there)
    if target.is_symlink() or target.is_file() or holds_one:
        raise FileError(
            f"{target}: is a link or a file, or contains the checkpoint or the working directory; "
            "name another --mlx-path"
        )
    has_content = target.is_dir() and any(target.iterdir())
    if has_content and not (force and (target / "config.json").is_file()):
        raise FileError(
            f"{target}: is not empty; name another --mlx-path, or replace a model with --force"
        )


# --- the weights, which stay lazy until they are written ---


def _prepare(
    model: nn.Module,
    config: dict[str, Any],
    dtype: str | None,
    quantization: Quantization | None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Cast and quantise a model.

    Args:
        dtype: the float type to cast to; None for the model's own 16-bit type.
    """
    from mlx_lm.utils import quantize_model

    if dtype := dtype or _half_type(config, model):
        _cast(model, getattr(mx, dtype))
        for part in (config, text_of(config)):
            part.update(dict.fromkeys(part.keys() & _DTYPE_NAMES, dtype))
    config.pop("auto_map", None)  # names Python files, which are not copied
    if not quantization:
        return model, config
    if "quantization" in config:
        raise LoadError("the model is quantised already; leave out -q")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the bits per weight
            return quantize_model(model, config, **quantization)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LoadError(f"mlx-lm cannot quantise the model ({one_line(error)})") from None


def _half_type(config: dict[str, Any], model: nn.Module) -> str | None:
    """The 16-bit type that the configuration names.

    If it names none: float16 if no tensor has 16 bits, otherwise None.
    """
    stated = [part.get(name) for part in (config, text_of(config)) for name in _DTYPE_NAMES]
    for dtype in stated:
        if (name := str(dtype).removeprefix("torch.")) in _HALVES:
            return name
    types = {array.dtype for _, array in tree_flatten(model.parameters())}
    return "float16" if types.isdisjoint({mx.float16, mx.bfloat16}) else None


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast a model's arrays as mlx-lm's ``convert`` does."""
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def converted(name: str, array: mx.array) -> mx.array:
        if mx.issubdtype(array.dtype, mx.floating) and wanted(name):
            return array.astype(dtype)
        return array

    model.update(tree_map_with_path(converted, model.parameters()))
