"""``mlxspec models``: the models that are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from ..errors import MlxspecError, OptionError
from ..models.model_files import DEMO, DEMO_DIRECTORY, local_path
from .common.model_choice import DIRECTORY, model_or_default
from .common.notes import note
from .common.options import command, option
from .common.output import FoldingTable, print_tables, shown, size_in_words, write_json
from .user_config import load_config

if TYPE_CHECKING:
    from ..models.on_machine import ModelFiles

_RESERVE = 1.1  # of what the weights take: caches and a forward
_EXAMPLE = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"


@dataclass(frozen=True)
class _Model:
    """A model that can be named.

    Attributes:
        name: by which it is loaded.
        files: what is on this machine of it.
        aliases: the user's names for it.
        is_default: whether it answers where no model is named.
        memory: how many bytes its weights take in memory.
        fits: whether the machine has that memory, and some more for the rest.
        measured: whether the costs of its steps on this machine are known.
    """

    name: str
    files: ModelFiles
    aliases: tuple[str, ...]
    is_default: bool
    memory: int
    fits: bool
    measured: bool

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "directory": str(self.files.directory),
            "default": self.is_default,
            "aliases": list(self.aliases),
            "usable": not self.files.trouble,
            "reason": self.files.trouble or None,
            "architecture": self.files.architecture or None,
            "weights": self.files.weights or None,
            "bytes": self.files.nbytes,
            "memory_bytes": self.memory or None,
            "fits": self.fits,
            "measured": self.measured,
        }


@command("models", short_help="List the models on this machine.")
@option("--json", "Write one JSON object and no table.", "as_json", group="Output")
def models_command(as_json: bool) -> None:
    """List the models on this machine: those of the Hugging Face Hub's cache, and your own.

    \b
    Examples:
      mlxspec models
      mlxspec models --json | jq -r '.models[] | select(.fits) | .name'

    Your own are the directory mlx_model, if it is here, and what 'mlxspec config' names. A model
    fits if its weights, and a tenth more, are no more than what MLX may take: on a Mac's GPU what
    its driver recommends, elsewhere the system's memory. On a CPU half-precision weights take twice
    their size. What steps cost here is measured at first use, and carefully by 'mlxspec calibrate'.
    """
    from ..engine.costs import whole_memory

    memory, default = whole_memory(), _default()
    models = list(_found(memory, default))
    if as_json:
        reports = [one.report() for one in models]
        write_json({"memory_bytes": memory, "models": reports}, indent=2)
        return
    print_tables(_tables(models, memory, default))


def _default() -> str | None:
    """The model that answers where none is named; None where that is at fault, which is told."""
    try:
        return model_or_default(None)
    except OptionError as error:
        note(error)
        return None


def _found(memory: int, default: str | None) -> Iterator[_Model]:
    """All models, the one that answers by default first."""
    import mlx.core as mx

    from ..models.on_machine import model_files

    widens = mx.default_device().type == mx.cpu
    config = load_config()
    directories = _directories([*([default] if default else []), *config.aliases.values()])
    names = sorted(directories, key=lambda name: (name != default, name == DEMO))
    measured = _Measured()
    for name in names:
        files = model_files(directories[name])
        takes = files.weight_bytes + (files.half_bytes if widens else 0)
        yield _Model(
            name,
            files,
            tuple(alias for alias, model in config.aliases.items() if model == name),
            name == default,
            takes,
            not files.trouble and takes * _RESERVE <= memory,
            not files.trouble and measured.knows(name, files.architecture),
        )


def _directories(named: list[str]) -> dict[str, Path]:
    """Where models are, by their names, each under one.

    Args:
        named: those that the user has named; if they are directories, they are added.
    """
    from ..models.on_machine import cached_repositories

    found = dict(cached_repositories())
    found[DEMO] = DEMO_DIRECTORY
    for name in [*named, DIRECTORY]:
        directory = local_path(name)
        known = {path.resolve() for path in found.values()}
        if name not in found and directory.is_dir() and directory.resolve() not in known:
            found[name] = directory
    return found


class _Measured:
    """The models whose step times on this machine are known.

    That goes by their shapes, so a model is looked into if one of its architecture is known.
    """

    def __init__(self) -> None:
        from ..drafting.kept import CostCache

        self._cache = CostCache()
        entries = self._cache.entries()
        self._architectures: set[Any] = set()
        if entries:
            from ..engine.costs import machine_identity

            here = machine_identity()
            self._architectures = {
                key.model.get("type") for key, _ in entries if key.machine == here
            }

    def knows(self, name: str, architecture: str) -> bool:
        """Whether those of a model are known; what cannot be loaded has none."""
        if architecture not in self._architectures:
            return False
        from ..engine.costs import cost_key
        from ..models.model import load

        try:
            return bool(self._cache.read(cost_key(load(name, lazy=True)[0])))
        except MlxspecError:
            return False


def _tables(models: list[_Model], memory: int, default: str | None) -> Iterator[RenderableType]:
    usable = [one for one in models if not one.files.trouble]
    others = [one for one in models if one.files.trouble]
    named = f"; the default model is {shown(default)}" if default else ""
    table = FoldingTable(
        *("model", "weights", "memory", "fits", "costs"),
        caption=f"MLX may take {_size(memory)} here{named}",
    )
    for one in usable:
        table.add_row(
            shown(one.name),
            shown(one.files.weights),
            _size(one.memory),
            "yes" if one.fits else "no",
            "known" if one.measured else "–",
        )
    yield table
    for one in models:
        yield from (shown(f"{alias} stands for {one.name}") for alias in one.aliases)
    if any(one.aliases for one in models):
        yield ""
    if others:
        yield Text("Not to be run as they are", style="bold")
    for one in others:
        yield shown(f"{one.name}, {_size(one.files.nbytes)}: {one.files.trouble}")
    if len(usable) == 1 and usable[0].name == DEMO:
        if others:
            yield ""
        yield (
            "A model of the Hugging Face Hub is downloaded when it is first named: "
            f"mlxspec chat {_EXAMPLE}"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else size_in_words(nbytes)
