"""``mlxspec generate``: a model answers a prompt, its accepted draft tokens in colour."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import mlxspec

from ..distributed.launch import launched_rank, let_rank_0_speak
from .lookahead_options import lookahead_options
from .memory_options import memory_options
from .names import NAME
from .option_groups import GroupedCommand, GroupedOption
from .outcome import reported
from .sampling_options import sampling_options

EPILOG = """\b
Examples:
  mlxspec generate --prompt "Say this three times: ..." --stats
  mlxspec generate --model mlx-community/Mistral-7B-Instruct-v0.3-4bit \\
      --prompt-file question.txt
  mlxspec generate --raw --prompt - < draft.txt > continuation.txt
  mlxspec generate --prompt "..." --json | jq .stats
  mlx.launch --hostfile macs.json mlxspec generate --model ... --prompt "..."

"python decoder.py" is the same command.

Standard output gets the text and nothing else: a file or a pipe gets it as it is, a terminal
with control characters made visible. Figures, notes and errors go to standard error.
"""

_prompt_option = partial(click.option, cls=GroupedOption, group="Model and prompt")
_draft_option = partial(click.option, cls=GroupedOption, group="Drafting")
_output_option = partial(click.option, cls=GroupedOption, group="Output")


class _GenerateCommand(GroupedCommand):
    """Lets rank 0 alone complain of wrong options, where several are launched."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        let_rank_0_speak()
        return super().make_context(*args, **kwargs)


@click.command(
    "generate",
    cls=_GenerateCommand,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@_prompt_option(
    "--model",
    type=NAME,
    metavar="DIR_OR_REPO",
    help="Model directory, Hub repository, or 'demo'.  [default: mlx_model if it is there, "
    "otherwise demo]",
)
@_prompt_option("--prompt", metavar="TEXT", help="The prompt; - reads standard input.")
@_prompt_option(
    "--prompt-file", type=NAME, metavar="FILE", help="Read the prompt from a UTF-8 file."
)
@_prompt_option("--prompt-ids", metavar="IDS", help="The prompt as token ids: 1,415,2936.")
@_prompt_option(
    "--prompt-cache-file",
    type=NAME,
    metavar="FILE",
    help="Go on where a file of 'mlxspec cache-prompt' or mlx_lm.cache_prompt ends.",
)
@_prompt_option(
    "--chat/--raw",
    default=None,
    help="Put the prompt into the model's chat template, or take it as it is.  [default: chat "
    "if the model has a template]",
)
@_prompt_option("--max-tokens", type=int, default=250, metavar="N", help="Generate at most N.")
@_draft_option(
    "--decoder",
    type=click.Choice(["auto", "prompt-lookup", "lookahead", "combined", "plain"]),
    help="auto chooses each draft by its measured cost; prompt-lookup has fixed parameters; "
    "lookahead drafts from the model's own guesses; combined is auto with lookahead.  "
    "[default: auto, or the one whose option is given]",
)
@_draft_option(
    "--store",
    type=NAME,
    metavar="FILE",
    help="With auto and combined: draft from a file of 'mlxspec store' too.",
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
@lookahead_options
@sampling_options
@memory_options
@_output_option(
    "--color/--no-color",
    default=None,
    help="Colour accepted draft tokens.  [default: at a terminal, unless NO_COLOR is set]",
)
@_output_option("--stats", is_flag=True, help="Show the measured time of a step by its rows.")
@_output_option("--json", "as_json", is_flag=True, help="Write one JSON object and no text.")
@_output_option(
    "--logprobs",
    type=int,
    metavar="K",
    help="With --json: log-probabilities of each token and of the K likeliest in its place.",
)
@click.version_option(mlxspec.__version__, prog_name="mlxspec")
def generate_command(**options: Any) -> None:
    """Generate text with speculative decoding.

    Drafts are taken from what followed the last words earlier in prompt, output or earlier
    outputs. The model verifies a draft in one forward, so the text is the model's own and only
    the speed changes.
    """
    with reported():
        if launched_rank() is not None:
            from ..distributed.launch import supervise

            supervise()
        # Here, so that --help does not wait for MLX.
        from .answer import answer, answer_together

        run = answer if launched_rank() is None else answer_together
        run(**options)
