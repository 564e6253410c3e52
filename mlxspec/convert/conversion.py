"""Convert a checkpoint into a directory that mlx-lm, or the older mlx-examples, loads."""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import OptionError
from ..models.model_files import check_name, check_readable
from .hugging_face import open_hugging_face, plan_hugging_face
from .model_writer import (
    MAX_SHARD_BYTES,
    PlannedModel,
    Progress,
    Quantization,
    write_npz,
    write_safetensors_model,
)
from .original_checkpoint import open_original
from .original_layouts import plan_hugging_face_layout, plan_mlx_examples_layout
from .output_directory import check_outside, output_directory

_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_FORMATS = ("safetensors", "npz")
# What MLX has, the defaults first. The modes but affine have one format each.
_GROUP_SIZES = {"affine": (64, 32, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_BITS = {"affine": (4, 2, 3, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}


@dataclass(frozen=True)
class Conversion:
    """What was written: where, the bytes of its weights, and the model's number of parameters."""

    path: Path
    nbytes: int
    parameters: int

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
    format: str = "safetensors",
    force: bool = False,
    revision: str | None = None,
    on_progress: Progress = lambda done, total: None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Convert one checkpoint; ``mlx_path`` appears when it is complete, or not at all.

    Args:
        torch_path: directory of a Mistral or Llama original (``consolidated.*``,
            ``params.json``, ``tokenizer.model``).
        hf_path: instead, a Hugging Face checkpoint, a directory or a repository on the Hub.
        mlx_path: the directory to write.
        quantize: quantise the weights, with ``q_mode`` (affine, mxfp4, mxfp8, nvfp4),
            ``q_bits`` and ``q_group_size``; MLX's defaults of the mode where they are None.
        dtype: float16, bfloat16 or float32; by default the checkpoint's own 16-bit type,
            float16 if it has none.
        format: ``safetensors`` for mlx-lm, or ``npz`` for the older layout of mlx-examples.
        force: replace a model that is at ``mlx_path``.
        revision: branch, tag or commit of a repository on the Hub.
        on_progress: called with the bytes converted so far and their total.
        max_shard_bytes: most bytes of a safetensors file.

    Raises:
        OptionError: the options contradict each other, or MLX cannot do what they ask.
        ConversionError: the checkpoint cannot be converted, or ``mlx_path`` not be written.
        LoadError: the checkpoint cannot be found or read, or a name is not UTF-8.
    """
    quantization = _quantization(quantize, q_mode, q_bits, q_group_size)
    _check_options(torch_path, hf_path, dtype, format, revision, quantization)
    target = Path(mlx_path)
    check_name(target)
    with output_directory(target, force=force) as directory:
        if hf_path is not None:
            source = open_hugging_face(hf_path, revision)
        else:
            assert torch_path is not None
            source = Path(torch_path)
        check_outside(source, target)
        check_readable(source)
        if hf_path is not None:
            plan = plan_hugging_face(source, _DTYPES[dtype] if dtype else None, quantization)
        else:
            plan = _plan_original(source, dtype, format, quantization)
        result = Conversion(
            target,
            nbytes=sum(group.nbytes for group in plan.groups),
            parameters=sum(group.parameters for group in plan.groups),
        )
        if format == "npz":
            write_npz(directory, plan.groups, on_progress)
        else:
            write_safetensors_model(directory, plan.groups, on_progress, max_shard_bytes)
        # mlx-lm's save_config adds a key, and mlx-examples takes no others than its own.
        config = json.dumps(dict(sorted(plan.config.items())), indent=4)
        (directory / "config.json").write_text(config + "\n", encoding="utf-8")
        plan.write_tokenizer(directory)
    return result


def _plan_original(
    directory: Path, dtype: str | None, format: str, quantization: Quantization | None
) -> PlannedModel:
    checkpoint = open_original(directory)
    if format == "npz":
        # mlx-examples wrote float16; numpy has no bfloat16.
        return plan_mlx_examples_layout(checkpoint, _DTYPES[dtype or "float16"], quantization)
    return plan_hugging_face_layout(
        checkpoint, _DTYPES[dtype or checkpoint.half_type], quantization
    )


def _quantization(
    quantize: bool, mode: str | None, bits: int | None, group_size: int | None
) -> Quantization | None:
    """What ``-q`` and its options ask for, with what is left open filled in."""
    if not quantize:
        options = {"--q-mode": mode, "--q-bits": bits, "--q-group-size": group_size}
        for option, value in options.items():
            if value is not None:
                raise OptionError(f"{option} {value}: takes effect with -q only; add -q")
        return None
    mode = mode or "affine"
    if mode not in _BITS:
        raise OptionError(f"--q-mode {mode}: unknown; choose from {', '.join(_BITS)}")
    bits = _BITS[mode][0] if bits is None else bits
    group_size = _GROUP_SIZES[mode][0] if group_size is None else group_size
    if bits not in _BITS[mode]:
        raise OptionError(f"--q-bits {bits}: {mode} has {_choices(_BITS[mode])}")
    if group_size not in _GROUP_SIZES[mode]:
        raise OptionError(f"--q-group-size {group_size}: {mode} has {_choices(_GROUP_SIZES[mode])}")
    return {"group_size": group_size, "bits": bits, "mode": mode}


def _choices(numbers: tuple[int, ...]) -> str:
    *others, last = map(str, sorted(numbers))
    return f"{', '.join(others)} or {last}" if others else f"only {last}"


def _check_options(
    torch_path: str | Path | None,
    hf_path: str | Path | None,
    dtype: str | None,
    format: str,
    revision: str | None,
    quantization: Quantization | None,
) -> None:
    if (torch_path is None) == (hf_path is None):
        raise OptionError("name one checkpoint: MODEL, --torch-path or --hf-path")
    if dtype is not None and dtype not in _DTYPES:
        raise OptionError(f"--dtype {dtype}: unknown; choose from {', '.join(_DTYPES)}")
    if format not in _FORMATS:
        raise OptionError(f"--format {format}: unknown; choose from {', '.join(_FORMATS)}")
    if revision is not None and hf_path is None:
        raise OptionError(f"--revision {revision}: belongs to --hf-path")
    if format == "npz":
        if hf_path is not None:
            raise OptionError("--format npz: holds Mistral and Llama originals; use --torch-path")
        if dtype == "bfloat16":
            raise OptionError("--dtype bfloat16: --format npz has no such type; choose float16")
        if quantization is not None and quantization["mode"] != "affine":
            raise OptionError(f"--q-mode {quantization['mode']}: --format npz has affine only")
