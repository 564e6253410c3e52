"""``mlxspec inspect``: what a model is, and what drafts it verifies."""

from __future__ import annotations

from typing import Any

import click

from .names import NAME
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec inspect demo
  mlxspec inspect mlx-community/gemma-3-4b-it-4bit
  mlxspec inspect ./mlx_model --json | jq -r .tier

What a model verifies is found out by running it, not by its name: a draft of which a part is
rejected has to leave what its accepted tokens alone would have left.
"""


@click.command(
    "inspect",
    short_help="Show what MODEL is, and which drafts it verifies.",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("model", type=NAME)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object.")
def inspect_command(**options: Any) -> None:
    """Show what MODEL is, and which drafts it verifies: trees, chains, or none.

    MODEL is a model directory, a Hub repository, or 'demo'.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .model_report import run

        run(**options)
