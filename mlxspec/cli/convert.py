"""``mlxspec convert``: a checkpoint becomes a directory that MLX loads."""

import shlex
from functools import partial
from typing import Any

import click
from rich.progress import DownloadColumn, TimeRemainingColumn

from .options import NAME, command, option
from .outcome import say
from .output import ProgressBar

_checkpoint = partial(option, group="Checkpoint")
_result = partial(option, group="Result")


@command("convert")
@_checkpoint(
    "--torch-path DIR",
    "Mistral or Llama original: consolidated.*, params.json, tokenizer.model.",
    type=NAME,
)
@_checkpoint("--hf-path DIR_OR_REPO", "Hugging Face checkpoint, local or on the Hub.", type=NAME)
@_checkpoint("--revision REV", "Branch, tag or commit of a Hub repository.")
@_result("--mlx-path DIR", "What to write.", type=NAME, default="mlx_model")
@_result("-q --quantize", "Quantise the weights, to 4 bits by default.")
@_result("--q-bits N", "Bits of a quantised weight.", type=int)
@_result("--q-group-size N", "Weights that share a scale.", type=int)
@_result("--q-mode affine|mxfp4|mxfp8|nvfp4", "Format of quantised weights.")
@_result(
    "--dtype float16|bfloat16|float32", "Float type; by default the checkpoint's own 16-bit one."
)
@_result(
    "--format safetensors|npz",
    "What mlx-lm loads, or the older layout of mlx-examples.",
    default="safetensors",
)
@_result("--force", "Replace a model that is at --mlx-path.")
def convert_command(**options: Any) -> None:
    """Convert a model's weights and tokenizer for MLX.

    \b
    python convert.py --torch-path mistral-7B-v0.3 -q
    python convert.py --hf-path mistralai/Mistral-7B-Instruct-v0.3 --mlx-path mistral
    """
    from ..convert.conversion import convert

    with ProgressBar("Converting", DownloadColumn(), TimeRemainingColumn()) as on_progress:
        result = convert(**options, on_progress=on_progress)
    started_as_script = click.get_current_context().parent is None
    generate = "python decoder.py" if started_as_script else "mlxspec generate"
    say(
        f"Wrote {result.path}: {result.nbytes / 1e6:,.1f} MB, "
        f"{result.bits_per_weight:.2f} bits per weight. "
        f'Next: {generate} --model {shlex.quote(str(result.path))} --prompt "..."'
    )
