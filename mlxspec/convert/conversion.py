"""Convert a checkpoint into a directory that mlx-lm, or the older mlx-examples, loads."""

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import OptionError
from ..loading.model_files import check_name, check_readable
from .hugging_face import open_hugging_face, plan_hugging_face
from .model_writer import MAX_SHARD_BYTES, Progress, write_npz, write_safetensors_model
from .original_checkpoint import open_original
from .output_directory import check_outside, output_directory
from .plan_original import plan_hugging_face_layout, plan_mlx_examples_layout
from .planned_model import PlannedModel
from .quantization import Quantization, quantization

_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_FORMATS = ("safetensors", "npz")


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
    scheme = _quantization(quantize, q_mode, q_bits, q_group_size)
    _check_options(torch_path, hf_path, dtype, format, revision, scheme)
    target = Path(mlx_path)
    check_name(target)
    with output_directory(target, force=force) as directory:
        if hf_path is not None:
            source = open_hugging_face(hf_path, revision)
            check_outside(source, target)
            check_readable(source)
            plan = plan_hugging_face(source, _DTYPES[dtype] if dtype else None, scheme)
        else:
            assert torch_path is not None
            source = Path(torch_path)
            check_outside(source, target)
            check_readable(source)
            plan = _plan_original(source, dtype, format, scheme)
        result = Conversion(
            target,
            nbytes=sum(group.nbytes for group in plan.groups),
            parameters=sum(group.parameters for group in plan.groups),
        )
        if format == "npz":
            write_npz(directory, plan.groups, on_progress)
        else:
            write_safetensors_model(directory, plan.groups, on_progress, max_shard_bytes)
        config = json.dumps(dict(sorted(plan.config.items())), indent=4)
        (directory / "config.json").write_text(config + "\n", encoding="utf-8")
        plan.write_tokenizer(directory)
    return result


def _plan_original(
    directory: Path, dtype: str | None, format: str, scheme: Quantization | None
) -> PlannedModel:
    checkpoint = open_original(directory)
    if format == "npz":
        # mlx-examples wrote float16; numpy has no bfloat16.
        return plan_mlx_examples_layout(checkpoint, _DTYPES[dtype or "float16"], scheme)
    return plan_hugging_face_layout(checkpoint, _DTYPES[dtype or checkpoint.half_type], scheme)


def _quantization(
    quantize: bool, mode: str | None, bits: int | None, group_size: int | None
) -> Quantization | None:
    if quantize:
        return quantization(mode=mode, bits=bits, group_size=group_size)
    options = {"--q-mode": mode, "--q-bits": bits, "--q-group-size": group_size}
    for option, value in options.items():
        if value is not None:
            raise OptionError(f"{option} {value}: takes effect with -q only; add -q")
    return None


def _check_options(
    torch_path: str | Path | None,
    hf_path: str | Path | None,
    dtype: str | None,
    format: str,
    revision: str | None,
    scheme: Quantization | None,
) -> None:
    if (torch_path is None) == (hf_path is None):
        raise OptionError("name the checkpoint with either --torch-path or --hf-path")
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
        if scheme is not None and scheme.mode != "affine":
            raise OptionError(f"--q-mode {scheme.mode}: --format npz has affine only")
