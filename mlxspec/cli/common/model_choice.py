"""How commands get their model: as an argument, with ``--model``, or by default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...errors import MlxspecError
from ...models.model_files import DEMO, is_repository_name
from ..settings import MODEL as SETTING
from ..settings import MODEL_VARIABLE, load_aliases, load_config, resolved
from .notes import note
from .options import ARGUMENTS, Decorator, option

DIRECTORY = "mlx_model"
"""The directory that ``mlxspec convert`` writes by default; if it exists, the default model."""

SMALL_MODEL = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
"""The model to suggest to users who have none yet."""

DEMO_CAN = 'Repeat this 3 times: "The red fox sees the river."'
"""A prompt that the demo model can answer."""

_ABOUT = "A model directory, a Hub repository, an alias of 'mlxspec config', or 'demo'."


class _Model(click.ParamType):
    """A model's name; an alias is replaced by the model's name.

    Aliases and "demo" take precedence over directories of the same name; "./demo" is the directory.
    """

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if ctx and ctx.resilient_parsing else resolved(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete known names, and directories."""
        items = [CompletionItem(name) for name in known_names() if name.startswith(incomplete)]
        # An empty value confuses click's script for zsh.
        return [CompletionItem(incomplete or "./", type="dir"), *items]


MODEL = _Model()
"""A model, as a name that can be loaded."""


def known_names() -> Iterator[str]:
    """Names of models on this machine, found without opening them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    with suppress(MlxspecError):  # the command itself reports it
        yield from load_aliases()
    yield DEMO
    for directory in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        name = directory.name.removeprefix("models--").replace("--", "/", 1)
        if is_repository_name(name) and any(directory.glob("snapshots/*/*.safetensors")):
            yield name


def default_model() -> str | None:
    """The default model; None if nothing sets it.

    Raises:
        FileError: the settings file is invalid.
    """
    if name := os.environ.get(MODEL_VARIABLE) or load_config().get(SETTING):
        return resolved(name)
    return DIRECTORY if Path(DIRECTORY).is_dir() else None


def model_or_default(model: str | None) -> str:
    """The given model, or the default one, or else the demo model.

    Raises:
        FileError: the settings file is invalid.
    """
    return model or default_model() or DEMO


def note_if_demo(model: str | None) -> None:
    """Print a note if the demo model answers because no model is named or set.

    Call this only when nothing can fail any more before the answer begins.
    """
    if not (model or default_model()):
        note(
            "no model is named, so the demo model answers, a toy that can only repeat, copy, edit "
            f"and quote text, as in '{DEMO_CAN}'; for a real one, try --model {SMALL_MODEL}"
        )


# --- as options and arguments ---

_DEFAULT = f"  [default: {MODEL_VARIABLE}, 'mlxspec config', ./{DIRECTORY}, or demo]"

model_option = option("-m --model MODEL", _ABOUT + _DEFAULT, type=MODEL, group="Model and prompt")
"""``--model`` for a command whose argument is not a model."""


def model_argument(about: str = _ABOUT + _DEFAULT, *, several: bool = False) -> Decorator:
    """Let a command take MODEL as an argument or with ``--model``, and get it as ``model``.

    Args:
        several: whether MODEL and ``--model`` can be repeated; the command then gets ``models``.
    """
    name, words = ("models", "[MODEL]...") if several else ("model", "[MODEL]")

    def in_either_way(ctx: click.Context, _: click.Parameter, placed: Any) -> Any:
        named = ctx.params.pop("named")
        if several:
            return *placed, *named
        if placed and named and placed != named:
            raise click.UsageError(f"MODEL is {placed}, but --model is {named}: give one of them")
        return placed or named

    same = "Another way to give MODEL" + ("; repeatable." if several else ".")
    early = {"group": ARGUMENTS, "is_eager": True}  # the argument's callback needs its value
    by_name = option("-m --model MODEL", same, "named", type=MODEL, multiple=several, **early)
    by_place = click.argument(
        name,
        help=about,
        required=False,
        type=MODEL,
        metavar=words,
        nargs=-1 if several else 1,
        callback=in_either_way,
    )
    return lambda function: by_place(by_name(function))
