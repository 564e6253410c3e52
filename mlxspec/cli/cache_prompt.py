"""``mlxspec cache-prompt``: the KV cache of a long prompt, in a file for later questions."""

from __future__ import annotations

from typing import Any

import click

from .generate import generate_command
from .names import NAME
from .option_groups import GroupedCommand, GroupedOption, options_of
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec cache-prompt --prompt-file book.txt --prompt-cache-file book.safetensors
  mlxspec generate --prompt-cache-file book.safetensors --prompt "Who is the narrator?"

The file names its model, which then answers without --model. If that has to be downloaded, you
are asked at a terminal, and elsewhere name it with --model.

The file is also one for "mlx_lm.generate --prompt-cache-file", and those of
"mlx_lm.cache_prompt" serve here. With a chat template the prompt is the beginning of a user's
message, which the later prompt goes on with.
"""


@options_of(generate_command, "Model and prompt", "Memory", but=("max_tokens", "prompt_cache_file"))
@click.command(
    "cache-prompt",
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--prompt-cache-file",
    cls=GroupedOption,
    group="Model and prompt",
    type=NAME,
    metavar="FILE",
    required=True,
    help="Write the cache to this file, *.safetensors.",
)
@click.option("--force", is_flag=True, help="Replace a prompt cache that is there.")
def cache_prompt_command(**options: Any) -> None:
    """Process a prompt and keep its KV cache in a file.

    Generations that begin with this prompt need not process it again.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .cache_prompt_run import cache_prompt

        cache_prompt(**options)
