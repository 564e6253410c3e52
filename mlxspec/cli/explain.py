"""``mlxspec explain``: a few steps of a generation, each with its draft tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from .generate import generate_command
from .names import FILE, FORCE_HELP
from .option_groups import GroupedCommand, GroupedOption, options_of
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec explain --decoder lookahead -W 7 -N 4 --raw --prompt "def add(a, b):"
  mlxspec explain --prompt "Say this three times: ..." --steps 5 --skip 0
  mlxspec explain --decoder combined --prompt-file question.txt --html steps.html

The options are those of 'mlxspec generate', and the output is the same: only what is shown of
it differs.
"""

_SHARED_GROUPS = ("Model and prompt", "Drafting", "End of the output", "Sampling", "Memory")

_view_option = partial(click.option, cls=GroupedOption, group="Steps and output")


@options_of(generate_command, *_SHARED_GROUPS, but=("learn", "prompt_cache_file"))
@click.command(
    "explain",
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@_view_option("--steps", type=int, default=3, metavar="K", help="Show K successive steps.")
@_view_option(
    "--skip",
    type=int,
    metavar="N",
    help="Begin after N steps.  [default: where most drafts are accepted in part, or "
    "else where most tokens are]",
)
@_view_option(
    "--html",
    type=FILE,
    metavar="FILE",
    help="Write the steps as a page as well.",
)
@_view_option("--force", is_flag=True, help=FORCE_HELP)
@_view_option(
    "--color/--no-color",
    default=None,
    help="Show in colour.  [default: at a terminal, unless NO_COLOR is set]",
)
def explain_command(**options: Any) -> None:
    """Show what steps of speculative decoding do.

    Each step is drawn as its draft tree: what was drafted and where it came from, what the
    model chose, how far the draft was accepted; for lookahead decoding with its window.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .explain_run import explain

        explain(**options)
