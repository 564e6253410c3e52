"""Options of the commands that generate: lookahead decoding's sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import click

from ..errors import OptionError
from .option_groups import GroupedOption

_option = partial(click.option, cls=GroupedOption, group="Drafting")

_OPTIONS = [
    _option(
        "-W",
        "--window-size",
        "--WINDOW_SIZE",
        "window_size",
        metavar="W",
        help="Lookahead: columns of the window, 0 for none, or auto: all sizes follow their "
        "measured cost.  [default: auto]",
    ),
    _option(
        "-N",
        "--ngram-size",
        "--LEVEL",
        "ngram_size",
        type=int,
        metavar="N",
        help="Lookahead: length of the n-grams; with auto, at most.  [default: 5]",
    ),
    _option(
        "-G",
        "--guess-set-size",
        "--GUESS_SET_SIZE",
        "guess_set_size",
        type=int,
        metavar="G",
        help="Lookahead: n-grams kept for a token, -1 for 64.  [default: W, or 16 with auto]",
    ),
    _option(
        "--pool-from-prompt/--no-pool-from-prompt",
        "--POOL_FROM_PROMPT/--NO_POOL_FROM_PROMPT",
        "pool_from_prompt",
        default=None,
        help="Lookahead: start with the prompt's n-grams.  [default: yes]",
    ),
]


def lookahead_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command lookahead decoding's sizes, by the names of mlxspec, paper and reference."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_window_size(text: str) -> int | Literal["auto"]:
    """Understand ``--window-size``.

    Raises:
        OptionError: it is neither a number nor "auto".
    """
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"--window-size is {text!r}: give a number, or auto") from None
