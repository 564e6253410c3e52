"""``mlxspec generate``: a model answers a prompt, its accepted draft tokens in colour."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import mlxspec

from .option_groups import GroupedCommand, GroupedOption
from .outcome import reported

EPILOG = """\b
Examples:
  mlxspec generate --prompt "Say this three times: ..." --stats
  mlxspec generate --model mlx-community/Mistral-7B-Instruct-v0.3-4bit \\
      --prompt-file question.txt
  mlxspec generate --raw --prompt - < draft.txt > continuation.txt
  mlxspec generate --prompt "..." --json | jq .stats

"python decoder.py" is the same command.

Standard output gets the text and nothing else: a file or a pipe gets it as it is, a terminal
with control characters made visible. Figures, notes and errors go to standard error.
"""

_prompt_option = partial(click.option, cls=GroupedOption, group="Model and prompt")
_draft_option = partial(click.option, cls=GroupedOption, group="Drafting")
_sampling_option = partial(click.option, cls=GroupedOption, group="Sampling")
_output_option = partial(click.option, cls=GroupedOption, group="Output")


@click.command(
    "generate",
    cls=GroupedCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@_prompt_option(
    "--model",
    metavar="DIR_OR_REPO",
    help="Model directory, Hub repository, or 'demo'.  [default: mlx_model if it is there, "
    "otherwise demo]",
)
@_prompt_option("--prompt", metavar="TEXT", help="The prompt; - reads standard input.")
@_prompt_option("--prompt-file", metavar="FILE", help="Read the prompt from a UTF-8 file.")
@_prompt_option("--prompt-ids", metavar="IDS", help="The prompt as token ids: 1,415,2936.")
@_prompt_option(
    "--chat/--raw",
    default=None,
    help="Put the prompt into the model's chat template, or take it as it is.  [default: chat "
    "if the model has a template]",
)
@_prompt_option("--max-tokens", type=int, default=250, metavar="N", help="Generate at most N.")
@_prompt_option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; repeatable.")
@_draft_option(
    "--decoder",
    type=click.Choice(["auto", "prompt-lookup", "plain"]),
    help="auto chooses each draft by its measured cost; prompt-lookup has fixed parameters.  "
    "[default: auto, or prompt-lookup where one of its options is given]",
)
@_draft_option(
    "--store", metavar="FILE", help="With auto: draft from a file of 'mlxspec store' too."
)
@_draft_option("--learn", is_flag=True, help="Add the output to the --store file.")
@_draft_option(
    "--n-draft",
    "--prompt-lookup-num-tokens",
    "n_draft",
    type=int,
    metavar="N",
    help="Draft tokens per step at most; 0 is plain decoding.  [default: 10]",
)
@_draft_option(
    "--ngram-max",
    "--max-matching-ngram-size",
    "ngram_max",
    type=int,
    metavar="N",
    help="Longest n-gram that is looked up in prompt and output.  [default: 3]",
)
@_draft_option("--ngram-min", type=int, metavar="N", help="Shortest n-gram.  [default: 1]")
@_draft_option(
    "--prompt-lookup-config",
    metavar="[N,N,[0]]",
    help="TensorRT-LLM's form of --n-draft and --ngram-max, in their place.",
)
@_sampling_option("--temp", type=float, default=0.0, metavar="T", help="Temperature; 0 is greedy.")
@_sampling_option("--top-p", type=float, default=1.0, metavar="P", help="Nucleus; 1 keeps all.")
@_sampling_option("--top-k", type=int, default=0, metavar="K", help="Keep K tokens; 0 keeps all.")
@_sampling_option(
    "--min-p", type=float, default=0.0, metavar="P", help="Least share of the best probability."
)
@_sampling_option("--seed", type=int, default=0, metavar="N", help="Same seed, same output.")
@_output_option(
    "--color/--no-color",
    default=None,
    help="Colour accepted draft tokens.  [default: at a terminal, unless NO_COLOR is set]",
)
@_output_option("--stats", is_flag=True, help="Show the measured time of a step by its rows.")
@_output_option("--json", "as_json", is_flag=True, help="Write one JSON object and no text.")
@click.version_option(mlxspec.__version__, prog_name="mlxspec")
def generate_command(**options: Any) -> None:
    """Generate text with speculative decoding.

    Drafts are taken from what followed the last words earlier in prompt, output or earlier
    outputs. The model verifies a draft in one forward, so the text is the model's own and only
    the speed changes.
    """
    with reported():
        # Here, so that --help does not wait for MLX.
        from .answer import answer

        answer(**options)
