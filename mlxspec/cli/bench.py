"""``mlxspec bench``: decoders side by side on a model, with their outputs compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from .names import FILE, FORCE_HELP, NAME
from .option_groups import GroupedCommand, GroupedOption
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec bench mlx-community/Mistral-7B-Instruct-v0.3-4bit
  mlxspec bench demo --decoders lookup,mlx-lm --repeats 5 --html bench.html
  mlxspec bench MODEL --spec-bench question.jsonl --limit 10 --json > bench.json

A file of prompts is JSONL with "prompt", "messages" or "turns" and optionally "category" and
"reference" in each line; any other file is one prompt as it stands. Reports hold no prompts,
no outputs and no paths unless you ask for them.
"""

_prompt_option = partial(click.option, cls=GroupedOption, group="Prompts")
_run_option = partial(click.option, cls=GroupedOption, group="Measurement")
_output_option = partial(click.option, cls=GroupedOption, group="Output")


@click.command(
    "bench",
    short_help="Compare decoders on MODEL: speed and outputs.",
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.argument("model", type=NAME, metavar="MODEL")
@_prompt_option(
    "--prompts",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="Prompts to answer; repeatable.  [default: a small set that comes with mlxspec]",
)
@_prompt_option(
    "--spec-bench", type=FILE, metavar="FILE", help="Spec-Bench's question.jsonl as prompts."
)
@_prompt_option("--limit", type=int, metavar="N", help="At most N prompts of each category.")
@_prompt_option(
    "--references", is_flag=True, help="Compare outputs with the prompts' references (ROUGE)."
)
@_run_option(
    "--decoders", metavar="A,B", help="Who takes part besides plain decoding.  [default: all]"
)
@_run_option("--max-tokens", type=int, default=250, metavar="N", help="Generate at most N.")
@_run_option(
    "--repeats", type=int, default=3, metavar="N", help="Turns of each decoder on each prompt."
)
@_run_option("--temp", type=float, default=0.0, metavar="T", help="Temperature; 0 is greedy.")
@_run_option("--seed", type=int, default=0, metavar="N", help="Same seed, same outputs.")
@_output_option("--json", "as_json", is_flag=True, help="Write one JSON object and no table.")
@_output_option("--html", type=FILE, metavar="FILE", help="Write a page with plots as well.")
@_output_option("--force", is_flag=True, help=FORCE_HELP)
@_output_option(
    "--include-text", is_flag=True, help="Put prompts and outputs into the JSON and the page."
)
def bench_command(**options: Any) -> None:
    """Measure plain decoding, mlx-lm and the drafting decoders on MODEL.

    They take turns on the same prompts in one process. Outputs are compared token by token;
    outputs that differ by more than near ties get no speed-up, and the exit status 1.

    MODEL is a directory, a Hub repository, or 'demo'.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .bench_run import run_bench

        run_bench(**options)
