"""``mlxspec calibrate``: what a step over M rows costs, for this model on this machine."""

from __future__ import annotations

from typing import Any

import click

from .names import FILE, FORCE_HELP, NAME
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec calibrate mlx-community/Mistral-7B-Instruct-v0.3-4bit
  mlxspec calibrate demo --context 500 --svg curve.svg
  mlxspec calibrate --show

A draft of M - 1 tokens pays when its step emits more tokens than T(M)/T(1). The default
decoder measures this by itself at first use, quickly, and corrects it all the time; this
command measures it carefully, on an otherwise idle machine at best. The times are kept in the
user's cache directory, or in the one that MLXSPEC_CACHE_DIR names.
"""


@click.command(
    "calibrate",
    short_help="Measure what steps of MODEL cost by their rows.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("model", required=False, type=NAME)
@click.option(
    "--context", type=int, metavar="N", help="Measure behind N tokens of context.  [default: 256]"
)
@click.option("--show", is_flag=True, help="Show what is known and measure nothing.")
@click.option("--png", type=FILE, metavar="FILE", help="Draw the curve.")
@click.option("--svg", type=FILE, metavar="FILE", help="Draw the curve.")
@click.option("--force", is_flag=True, help=FORCE_HELP)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object and no table.")
def calibrate_command(**options: Any) -> None:
    """Measure what steps of MODEL cost by their number of rows, and keep it.

    MODEL is a model directory, a Hub repository, or 'demo'; --show needs none.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .calibration_report import run

        run(**options)
