"""Options of the commands that generate: how to sample, and what ends the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import OptionError
from .option_groups import GroupedOption

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..engine.params import SamplingParams
    from ..generation.options import EndOptions

_end_option = partial(click.option, cls=GroupedOption, group="End of the output")
_option = partial(click.option, cls=GroupedOption, group="Sampling")

_OPTIONS = [
    _end_option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; repeatable."),
    _end_option(
        "--stop-token",
        "--extra-eos-token",
        "stop_tokens",
        multiple=True,
        metavar="TOKEN",
        help="End at this token too, an id or a text of one token; repeatable.",
    ),
    _option("--temp", type=float, default=0.0, metavar="T", help="Temperature; 0 is greedy."),
    _option("--top-p", type=float, default=1.0, metavar="P", help="Nucleus; 1 keeps all."),
    _option("--top-k", type=int, default=0, metavar="K", help="Keep K tokens; 0 keeps all."),
    _option(
        "--min-p", type=float, default=0.0, metavar="P", help="Least share of the best probability."
    ),
    _option(
        "--min-tokens-to-keep", type=int, default=1, metavar="N", help="--min-p keeps the best N."
    ),
    _option(
        "--xtc-probability",
        type=float,
        default=0.0,
        metavar="P",
        help="How often XTC drops the likeliest tokens, 0 to 1.",
    ),
    _option(
        "--xtc-threshold",
        type=float,
        default=0.1,
        metavar="P",
        help="XTC drops the tokens above this probability but the least likely of them.",
    ),
    _option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        help="Add VALUE to a token's logit; -inf forbids it; repeatable.",
    ),
    _option(
        "--repetition-penalty",
        type=float,
        metavar="F",
        help="Divide positive logits of tokens that occurred by F, multiply negative ones; 0 is "
        "none.",
    ),
    _option(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="Subtract X from the logits of tokens that occurred.",
    ),
    _option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Subtract X for each time that a token occurred.",
    ),
    *(
        _option(
            f"--{kind}-context-size",
            type=int,
            default=20,
            metavar="N",
            help=f"The {kind} penalty counts the last N tokens, prompt included; 0 counts all.",
        )
        for kind in ("repetition", "presence", "frequency")
    ),
    _option("--seed", type=int, default=0, metavar="N", help="Same seed, same output."),
]


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_sampling(options: dict[str, Any]) -> tuple[SamplingParams, EndOptions]:
    """Take these options out of a command's: how to sample, and what ends the output.

    Raises:
        OptionError: a value makes no sense.
    """
    # Here, so that --help does not wait for MLX.
    from ..engine.params import SamplingParams

    options["logit_bias"] = _parsed_biases(options["logit_bias"])
    given = [field.name for field in fields(SamplingParams) if field.name in options]
    sampling = SamplingParams(**{name: options.pop(name) for name in given})
    tokens = [int(token) if token.isdecimal() else token for token in options.pop("stop_tokens")]
    return sampling, {"stop": options.pop("stop"), "stop_tokens": tokens}


def sparing_line_ends(sampling: SamplingParams, tokenizer: TokenizerWrapper) -> SamplingParams:
    """Have XTC keep line breaks and end tokens, as mlx-lm's command line does."""
    kept = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    return replace(sampling, xtc_special_tokens=kept)


def _parsed_biases(biases: Sequence[str]) -> dict[int, float]:
    parsed = {}
    for bias in biases:
        token, _, value = bias.partition("=")
        try:
            parsed[int(token)] = float(value)
        except ValueError:
            raise OptionError(
                f"--logit-bias is {bias!r}: write it as ID=VALUE, for example 42=-5"
            ) from None
    return parsed
