"""``mlxspec chat``: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from .generate import generate_command
from .option_groups import GroupedCommand, GroupedOption, options_of
from .outcome import reported

EPILOG = """\b
At the prompt:
  /help    what can be typed here
  /stats   figures of the conversation
  /reset   begin a new conversation
  /exit    leave; Ctrl-D and Ctrl-C twice do, too
  \"\"\"      begins and ends a message of several lines
  \\        at a line's end, goes on with the message in the next line

Ctrl-C stops an answer and keeps the conversation.

\b
From a pipe every line is a turn:
  printf 'Name a river.\\nAnd its source?\\n' | mlxspec chat
"""

_SHARED_GROUPS = ("Model and prompt", "Drafting", "End of the output", "Sampling", "Memory")
_PROMPTS = ("prompt", "prompt_file", "prompt_ids", "prompt_cache_file", "chat")

_prompt_option = partial(click.option, cls=GroupedOption, group="Model and prompt")


@options_of(generate_command, *_SHARED_GROUPS, but=(*_PROMPTS, "max_tokens"))
@click.command(
    "chat",
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@_prompt_option("--system-prompt", metavar="TEXT", help="What the model is told before all turns.")
@_prompt_option(
    "--max-tokens", type=int, default=2048, metavar="N", help="Generate at most N per answer."
)
@click.option(
    "--color/--no-color",
    cls=GroupedOption,
    group="Output",
    default=None,
    help="Colour accepted draft tokens.  [default: at a terminal, unless NO_COLOR is set]",
)
def chat_command(**options: Any) -> None:
    """Talk with a model.

    Each turn goes on where the last one ended: what the KV cache and the drafter's index hold
    of the conversation is not processed again.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .chat_run import chat

        chat(**options)
