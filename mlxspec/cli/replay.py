"""``mlxspec replay``: what drafting would gain on recorded work, without running a model."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from .names import FILE, FORCE_HELP, NAME
from .option_groups import GroupedCommand, GroupedOption
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec replay traces.jsonl --tokenizer my_model --chip "M3 Max"
  mlxspec replay chats.jsonl --tokenizer tokenizer.model --decoder auto,vllm,transformers
  mlxspec calibrate my_model --json > curve.json
  mlxspec replay chats.jsonl --tokenizer my_model --curve curve.json
  mlxspec replay *.jsonl --tokenizer my_model --html replay.html
  mlxspec replay chats.jsonl --tokenizer my_model --decoder auto,hindsight

A line of TRACES is an object with "messages", as in OpenAI-style chat logs, and optionally
"category", "model" and "completions", the indices of the messages to replay.
"""

_work_option = partial(click.option, cls=GroupedOption, group="Work and machine")
_output_option = partial(click.option, cls=GroupedOption, group="Output")


@click.command(
    "replay",
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.argument("traces", metavar="TRACES...", nargs=-1, required=True, type=FILE)
@_work_option(
    "--tokenizer",
    required=True,
    type=NAME,
    metavar="MODEL",
    help="A model directory, a Hub repository, 'demo', or a tokenizer's file.",
)
@_work_option(
    "--chip",
    "chips",
    multiple=True,
    metavar="NAME",
    help="A chip whose cost curve is known, or 'all'; repeatable.  [default: M4 Pro; with "
    "--html all]",
)
@_work_option(
    "--curve", type=FILE, metavar="FILE", help="A curve that mlxspec calibrate --json wrote."
)
@_work_option(
    "--limit",
    type=int,
    default=240,
    metavar="N",
    help="At most N conversations of a category, evenly spaced.",
)
@_work_option(
    "--decoder",
    "decoders",
    metavar="A,B",
    help="Whom to replay, or 'all'; 'hindsight' shows what is left to gain.  [default: auto; "
    "with --html all]",
)
@_output_option("--json", "as_json", is_flag=True, help="Write one JSON object and no table.")
@_output_option("--html", type=FILE, metavar="FILE", help="Write a page with plots as well.")
@_output_option("--force", is_flag=True, help=FORCE_HELP)
def replay_command(**options: Any) -> None:
    """Tell what each decoder would gain on recorded outputs.

    The recorded outputs are decoded again, with the drafter and the planner that decode, and
    the time of the steps is modelled by the cost of a step over M rows, T(M)/T(1).
    """
    with reported():
        # Here, so that --help does not wait for the tokenizers.
        from .replay_run import run_replay

        run_replay(**options)
