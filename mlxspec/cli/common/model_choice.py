"""How commands get their model: as an argument, with ``--model``, by an alias, or by default."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...errors import MlxspecError, OptionError
from ...models.model_files import DEMO, hub_repository, is_repository_name, local_path
from ..settings import MODEL as SETTING
from ..settings import MODEL_VARIABLE, load_config
from .notes import note
from .options import ARGUMENTS, Decorator, Name, argument, option

DIRECTORY = "mlx_model"
"""Where ``mlxspec convert`` writes, and the default model if it exists."""

SMALL_MODEL = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
"""The model to suggest to users who have none yet."""

DEMO_CAN = 'Repeat this 3 times: "The red fox sees the river."'
"""A prompt that the demo model can answer."""

ABOUT = "A model directory, a Hub repository, an alias of 'mlxspec config', or 'demo'."


class _Model(Name):
    """A model's name; an alias is replaced by the model's name.

    An alias or "demo" takes precedence over a directory with its name; "./demo" is the directory.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = os.fsdecode(super().convert(value, param, ctx))
        if ctx is not None and ctx.resilient_parsing:
            return name
        return resolved(name)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete known names, and directories."""
        named = [CompletionItem(name) for name in known_names() if name.startswith(incomplete)]
        # An empty value confuses click's script for zsh.
        return [CompletionItem(incomplete or "./", type="dir"), *named]


MODEL = _Model(readable=False)
"""A model, as a name that can be loaded."""


def resolved(name: str) -> str:
    """The model that a name stands for.

    Raises:
        FileError: the settings file is invalid.
    """
    model = load_config().resolved(name)
    if model != name and Path(name).is_dir():
        note(f"{name} is an alias of {model}; the directory here is ./{name}")
    return model


def known_names() -> Iterator[str]:
    """Names of models on this machine, found without opening them."""
    from huggingface_hub.constants import HF_HUB_CACHE

    with suppress(MlxspecError):  # the command itself reports it
        yield from load_config().aliases
    yield DEMO
    for directory in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        name = directory.name.removeprefix("models--").replace("--", "/", 1)
        if is_repository_name(name) and any(directory.glob("snapshots/*/*.safetensors")):
            yield name


def default_model() -> tuple[str, str] | None:
    """The default model and what sets it; None if nothing does.

    Raises:
        OptionError: it is set to something that is not a model.
        FileError: the settings file is invalid.
    """
    config = load_config()
    for source, name in (
        (MODEL_VARIABLE, os.environ.get(MODEL_VARIABLE)),
        ("'mlxspec config'", config.values.get(SETTING)),
    ):
        if name:
            model = config.resolved(name)
            if not (
                local_path(model).is_dir()
                or is_repository_name(hub_repository(model)[0])
                or model == DEMO
            ):
                raise OptionError(
                    f"{source} names the model {model}: it is neither a directory nor the name of "
                    "a Hub repository; set it to another model"
                )
            return model, source
    return (DIRECTORY, f"./{DIRECTORY}") if Path(DIRECTORY).is_dir() else None


def model_or_default(model: str | None) -> str:
    """The given model, or the default one, or else the demo model.

    Raises:
        FileError: the settings file is invalid.
    """
    if model:
        return model
    default = default_model()
    return default[0] if default else DEMO


def note_which_model(asked: str | None, prompt: str = DEMO_CAN) -> None:
    """Print a note about which model answers, if the user may expect another one.

    That is so for the demo model, if none was named or the prompt is beyond it, and for a default
    that overrides ``mlx_model``. Call it when no error can come before the answer any more.

    Args:
        asked: the model that was named for this command.
        prompt: the prompt, to judge whether it is beyond the demo model.
    """
    default = None if asked else default_model()
    answers, source = default or (asked or DEMO, "")
    unnamed, here = not (asked or default), Path(DIRECTORY).resolve()
    if answers == DEMO and (unnamed or is_beyond_demo(prompt)):
        note(
            f"{'no model is named, so ' * unnamed}the demo model answers: a toy that repeats, "
            f"copies, edits and quotes text, such as '{DEMO_CAN}'; for more try "
            f"--model {SMALL_MODEL}"
        )
    elif default and Path(DIRECTORY).is_dir() and local_path(answers).resolve() != here:
        note(f"{answers} answers, set by {source}; to use the model here, add --model {DIRECTORY}")


_GIVEN = re.compile(r"\n|(?<!\w)[\"'`“].+[\"'`”](?!\w)")
_TASK = re.compile(
    r"^(please )?(repeat|say|copy|quote|rename|edit|set)\b|\b(who|what|where|which|how)\b.*\?", re.I
)


def is_beyond_demo(prompt: str) -> bool:
    """Whether a prompt asks for more than the demo model can do, judged by its form.

    The demo model does a few tasks on a text in the prompt. The text is in quotation marks, or
    before or after the line with the task.
    """
    lines = prompt.strip().splitlines() or [""]
    return not (_GIVEN.search(prompt.strip()) and any(map(_TASK.search, (lines[0], lines[-1]))))


# --- as options and arguments ---

DEFAULT = f"  [default: {MODEL_VARIABLE}, 'mlxspec config', or ./{DIRECTORY}]"
DEFAULT_OR_DEMO = f"  [default: {MODEL_VARIABLE}, 'mlxspec config', ./{DIRECTORY}, or demo]"


def model_option(group: str) -> Decorator:
    """``--model`` for a command whose argument is not a model."""
    return option("-m --model MODEL", ABOUT + DEFAULT_OR_DEMO, type=MODEL, group=group)


def model_argument(about: str = ABOUT + DEFAULT_OR_DEMO, *, several: bool = False) -> Decorator:
    """MODEL, as an argument or with ``--model``; the command gets it as ``model``, or None.

    Args:
        about: its help text.
        several: MODEL and ``--model`` can be repeated; the command gets all as ``models``.
    """
    name, words = ("models", "[MODEL]...") if several else ("model", "[MODEL]")

    def in_either_way(ctx: click.Context, _: click.Parameter, placed: Any) -> Any:
        named = ctx.params.pop("named")
        if several:
            return *placed, *named
        if placed and named and placed != named:
            raise click.UsageError(f"MODEL is {placed}, and --model {named}: give one of them")
        return placed or named

    same = "Another way to name MODEL" + ("; repeatable." if several else ".")
    early = {"group": ARGUMENTS, "is_eager": True}  # the argument's callback needs its value
    by_name = option("-m --model MODEL", same, "named", type=MODEL, multiple=several, **early)
    how = {"metavar": words, "nargs": -1 if several else 1, "callback": in_either_way}
    by_place = argument(name, about, required=False, type=MODEL, **how)
    return lambda function: by_place(by_name(function))


def needed_model(model: str | None) -> str:
    """The given model or the default one, for commands that do not fall back on the demo model.

    Raises:
        click.UsageError: no model is given or set.
    """
    if model:
        return model
    default = default_model()
    if default is None:
        raise click.UsageError(
            "name a MODEL: a directory, a Hub repository, an alias, or demo; 'mlxspec models' "
            "lists those on this machine"
        )
    return default[0]
