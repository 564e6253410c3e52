"""Options of the commands that generate: how much memory the KV cache may take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from .option_groups import GroupedOption

if TYPE_CHECKING:
    from ..generation.options import MemoryOptions

_option = partial(click.option, cls=GroupedOption, type=int, group="Memory")

_OPTIONS = [
    _option("--kv-bits", metavar="N", help="Quantise the KV cache to N bits."),
    _option("--kv-group-size", default=64, metavar="N", help="Values that share a scale."),
    _option(
        "--quantized-kv-start",
        default=5000,
        metavar="N",
        help="Quantise once N positions are cached.",
    ),
    _option(
        "--max-kv-size",
        metavar="N",
        help="Cache N positions at most, the first 4 and the latest, where the model's own cache "
        "has no bound.",
    ),
]


def memory_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_memory(options: dict[str, Any]) -> MemoryOptions:
    """Take these options out of a command's.

    Raises:
        OptionError: a value makes no sense.
    """
    # Here, so that --help does not wait for MLX.
    from ..engine.params import CacheOptions

    taken: MemoryOptions = {
        "kv_bits": options.pop("kv_bits"),
        "kv_group_size": options.pop("kv_group_size"),
        "quantized_kv_start": options.pop("quantized_kv_start"),
        "max_kv_size": options.pop("max_kv_size"),
    }
    CacheOptions(**taken)
    return taken
