"""``mlxspec convert``: a checkpoint becomes a directory that MLX loads."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from .names import NAME
from .outcome import reported, say


@click.command("convert", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--torch-path",
    type=NAME,
    metavar="DIR",
    help="Mistral or Llama original: consolidated.*, params.json, tokenizer.model.",
)
@click.option(
    "--hf-path",
    type=NAME,
    metavar="DIR_OR_REPO",
    help="Hugging Face checkpoint, local or on the Hub.",
)
@click.option(
    "--mlx-path",
    type=NAME,
    metavar="DIR",
    default="mlx_model",
    show_default=True,
    help="What to write.",
)
@click.option("-q", "--quantize", is_flag=True, help="Quantise the weights, to 4 bits by default.")
@click.option("--q-bits", type=int, metavar="N", help="Bits of a quantised weight.")
@click.option("--q-group-size", type=int, metavar="N", help="Weights that share a scale.")
@click.option("--q-mode", metavar="affine|mxfp4|mxfp8|nvfp4", help="Format of quantised weights.")
@click.option(
    "--dtype",
    metavar="float16|bfloat16|float32",
    help="Float type; by default the checkpoint's own 16-bit one.",
)
@click.option(
    "--format",
    metavar="safetensors|npz",
    default="safetensors",
    show_default=True,
    help="What mlx-lm loads, or the older layout of mlx-examples.",
)
@click.option("--force", is_flag=True, help="Replace a model that is at --mlx-path.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub repository.")
def convert_command(**options: Any) -> None:
    """Convert a model's weights and tokenizer for MLX.

    \b
    python convert.py --torch-path mistral-7B-v0.3 -q
    python convert.py --hf-path mistralai/Mistral-7B-Instruct-v0.3 --mlx-path mistral
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from ..convert.conversion import convert

        with _progress() as on_progress:
            result = convert(**options, on_progress=on_progress)
        started_as_script = click.get_current_context().parent is None
        generate = "python decoder.py" if started_as_script else "mlxspec generate"
        say(
            f"Wrote {result.path}: {result.nbytes / 1e6:,.1f} MB, "
            f"{result.bits_per_weight:.2f} bits per weight. "
            f'Next: {generate} --model {shlex.quote(str(result.path))} --prompt "..."'
        )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    from rich.progress import DownloadColumn, TimeRemainingColumn

    from .consoles import error_console
    from .progress_bar import progress_bar

    with progress_bar(error_console(None), DownloadColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("Converting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
