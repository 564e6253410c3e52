"""``mlxspec convert``: converts a checkpoint to a directory that mlx-lm can load."""

import shlex
from functools import partial
from typing import Any

import click

from ..models.model_files import WEIGHTS, local_path
from .common.model_choice import model_argument
from .common.notes import say
from .common.options import NAME, check_one, command, option
from .common.output import ProgressBar

_checkpoint = partial(option, group="Checkpoint")
_result = partial(option, group="Result")


@command("convert")
@model_argument("The checkpoint: a Hub repository, a directory, or an alias of 'mlxspec config'.")
@_checkpoint(
    "--torch-path DIR",
    "MODEL in Mistral's or Llama's original format: consolidated.*, params.json, tokenizer.model.",
    type=NAME,
)
@_checkpoint("--hf-path DIR_OR_REPO", "MODEL as a Hugging Face checkpoint.", type=NAME)
@_checkpoint("--revision REV", "Branch, tag or commit, if MODEL is a Hub repository.")
@_checkpoint("--head", "Convert only the trained head: MODEL itself, or a part of it.")
@_result(
    "--mlx-path DIR",
    "The directory to write.  [default: mlx_model; mlx_head with --head]",
    type=NAME,
)
@_result("-q --quantize", "Quantise the weights, to 4 bits by default.")
@_result("--q-bits N", "Quantise to N bits.", type=click.IntRange(1, 32))
@_result("--q-group-size N", "Quantise with one scale per N weights.", type=click.IntRange(1, 1024))
@_result("--q-mode affine|mxfp4|mxfp8|nvfp4", "Quantise in this format.")
@_result(
    "--dtype float16|bfloat16|float32",
    "Float type.  [default: the checkpoint's 16-bit type]",
    type=click.Choice(("float16", "bfloat16", "float32")),
)
@_result("--force", "Replace an existing model at --mlx-path.")
def convert_command(model: str | None, **options: Any) -> None:
    """Convert a model's weights and tokenizer, or its trained head, for MLX.

    \b
    Examples:
      mlxspec convert mistralai/Mistral-7B-Instruct-v0.3 --mlx-path mistral
      mlxspec convert mistral-7B-v0.3 -q
      mlxspec convert --head Qwen/Qwen3.5-4B -q --mlx-path qwen-head

    A directory with params.json or consolidated.* is read as an original checkpoint of Mistral or
    Llama, unless it also has a Hugging Face checkpoint, and anything else as the latter.
    "python convert.py" is the same command.
    """
    from ..convert.conversion import convert

    check_one(model=model, torch_path=options["torch_path"], hf_path=options["hf_path"])
    if model is not None:
        directory = local_path(model)
        original = (directory / "params.json").is_file() or any(directory.glob("consolidated*"))
        hugging_face = (directory / "config.json").is_file() and any(directory.glob(WEIGHTS))
        options["torch_path" if original and not hugging_face else "hf_path"] = model
    options["quantize"] |= any(options[name] for name in ("q_bits", "q_group_size", "q_mode"))
    options["mlx_path"] = options["mlx_path"] or ("mlx_head" if options["head"] else "mlx_model")
    with ProgressBar("Converting") as bar:
        bar(0, None)
        nbytes, parameters, about = convert(**options)
    path = options["mlx_path"]
    takes = f"--model{' MODEL --head' * bool(about)} {shlex.quote(path)}"
    head = f"{about}. " if about else ""
    say(
        f"Wrote {path}: {nbytes / 1e6:,.1f} MB, {8 * nbytes / parameters:.2f} bits "
        f'per weight. {head}Next: mlxspec generate {takes} --prompt "..."'
    )
