"""``mlxspec models``: lists the models on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.filesize import decimal

from ..models.model_files import DEMO, DEMO_DIRECTORY, local_path
from ..terminal import one_line
from .common.model_choice import DIRECTORY, SMALL_MODEL, model_or_default
from .common.options import command, option
from .common.output import folding_table, print_tables, write_json
from .settings import load_aliases

_RESERVE = 1.1  # the memory for weights, caches and a forward, as a multiple of the weights'


@command("models", short_help="List the models on this machine.")
@option("--json", "Write one JSON object instead of a table.", "as_json", group="Output")
def models_command(as_json: bool) -> None:
    """List the models on this machine: the Hugging Face Hub's, LM Studio's, and your own.

    \b
    Examples:
      mlxspec models
      mlxspec models --json | jq -r '.models[] | select(.fits) | .name'

    Your own models are the directory mlx_model, if it exists here, and those that 'mlxspec config'
    names. LM Studio's models are listed by directory. A model fits if the memory that MLX may use
    is at least 1.1 times the size of its weights. On a Mac's GPU, that is the amount of memory that
    the driver recommends; elsewhere, the system's memory. On a CPU, half-precision weights take
    twice their size in memory.
    """
    from ..engine.machine import whole_memory

    memory = whole_memory()
    default = model_or_default(None)
    models = list(_found(memory, default))
    if as_json:
        write_json({"memory_bytes": memory, "models": models}, indent=2)
    else:
        print_tables(_tables(models, memory, default))


def _found(memory: int, default: str) -> Iterator[dict[str, Any]]:
    """The entries of ``--json``, the default model first."""
    from ..models.on_machine import model_files

    aliases = load_aliases()
    directories = _directories([default, *aliases.values()])
    for name in sorted(directories, key=lambda name: (name != default, name == DEMO)):
        files = model_files(directories[name])
        usable = not files.trouble
        yield {
            "name": name,
            "directory": str(directories[name]),
            "default": name == default,
            "aliases": [alias for alias, model in aliases.items() if model == name],
            "usable": usable,
            "reason": files.trouble or None,
            "architecture": files.architecture or None,
            "weights": files.weights or None,
            "bytes": files.nbytes,
            "memory_bytes": files.memory_bytes or None,
            "fits": usable and files.memory_bytes * _RESERVE <= memory,
        }


def _directories(names: list[str]) -> dict[str, Path]:
    """The directories of the models on this machine, by the models' names.

    Args:
        names: names of models that the user has given. Those that are directories are included.
    """
    from ..models.on_machine import cached_repositories, lm_studio_folder, models_in

    directories = dict(cached_repositories())
    directories[DEMO] = DEMO_DIRECTORY
    of_lm_studio = [str(path) for _, path in models_in(lm_studio_folder())]
    for name in [*names, DIRECTORY, *of_lm_studio]:
        directory = local_path(name)
        known = {path.resolve() for path in directories.values()}
        if name not in directories and directory.is_dir() and directory.resolve() not in known:
            directories[name] = directory
    return directories


def _tables(models: list[dict[str, Any]], memory: int, default: str) -> Iterator[RenderableType]:
    table = folding_table("model", "weights", "memory", "fits")
    usable = [model for model in models if model["usable"]]
    for model in usable:
        weights, takes = one_line(model["weights"] or ""), decimal(model["memory_bytes"] or 0)
        table.add_row(one_line(model["name"]), weights, takes, "yes" if model["fits"] else "no")
    yield table
    yield f"MLX may use {decimal(memory)} here; the default model is {one_line(default)}"
    for model in models:
        yield from (one_line(f"{alias} stands for {model['name']}") for alias in model["aliases"])
        if not model["usable"]:
            size = decimal(model["bytes"])
            yield one_line(f"{model['name']}, {size}, cannot be run: {model['reason']}")
    if [model["name"] for model in usable] == [DEMO]:
        yield (
            "\nA model from the Hugging Face Hub is downloaded when you first use it: "
            f"mlxspec chat {SMALL_MODEL}"
        )
