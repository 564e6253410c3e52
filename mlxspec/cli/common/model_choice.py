"""How a model is named: by its place or with ``--model``, by an alias, or by default."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
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
"""What ``mlxspec convert`` writes, and the model where none is named."""

SMALL_MODEL = "mlx-community/Mistral-7B-Instruct-v0.3-4bit"
"""The model that is suggested to users who have none yet."""

DEMO_CAN = 'Repeat this 3 times: "The red fox sees the river."'
"""A prompt that the bundled model can answer."""

ABOUT = "A model directory, a Hub repository, an alias of 'mlxspec config', or 'demo'."


class _Model(Name):
    """A model's name, with that of its model for an alias.

    An alias, and "demo", overrides a directory of the same name; "./demo" is the directory.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        name = os.fsdecode(super().convert(value, param, ctx))
        if ctx is not None and ctx.resilient_parsing:
            return name
        return resolved(name)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Names that are known, and whatever directories the shell finds."""
        named = [CompletionItem(name) for name in known_names() if name.startswith(incomplete)]
        # click's script for zsh loses its place where a value is empty.
        return [CompletionItem(incomplete or "./", type="dir"), *named]


MODEL = _Model(readable=False)
"""The user's model, as the name that loads it."""


def resolved(name: str) -> str:
    """The model that a name stands for.

    Raises:
        SettingsError: the file of ``mlxspec config`` is at fault.
    """
    model = load_config().resolved(name)
    if model != name and Path(name).is_dir():
        note(f"{name} is an alias of {model}; the directory here is ./{name}")
    return model


def known_names() -> Iterator[str]:
    """Names of models on this machine, found by a quick look."""
    from huggingface_hub.constants import HF_HUB_CACHE

    with suppress(MlxspecError):  # which the command itself reports
        yield from load_config().aliases
    yield DEMO
    for directory in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        name = directory.name.removeprefix("models--").replace("--", "/", 1)
        if is_repository_name(name) and any(directory.glob("snapshots/*/*.safetensors")):
            yield name


def default_model() -> tuple[str, str] | None:
    """The model that is used where none is named, and what names it; None if nothing does.

    Raises:
        OptionError: the user has named something that is not a model.
        SettingsError: the file of ``mlxspec config`` is at fault.
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
                    f"{source} names the model {model}: there is no such directory, and no Hub "
                    "repository is called so; set it to another one"
                )
            return model, source
    return (DIRECTORY, f"./{DIRECTORY}") if Path(DIRECTORY).is_dir() else None


def model_or_default(model: str | None) -> str:
    """The model that was asked for, or the default one, or else the demo model.

    Raises:
        SettingsError: the file of ``mlxspec config`` is at fault.
    """
    if model:
        return model
    default = default_model()
    return default[0] if default else DEMO


def note_which_model(asked: str | None, prompt: str = DEMO_CAN) -> None:
    """Note which model answers, if the user may expect another one.

    That is the demo model if none was named, or if it cannot do what the prompt asks for; and a
    default that overrides ``mlx_model``. Call it once no error can come before the answer.

    Args:
        asked: the model that was named for this command.
        prompt: what the model is to answer.
    """
    default = None if asked else default_model()
    answers, source = default or (asked or DEMO, "")
    unnamed = not (asked or default)
    if answers == DEMO and (unnamed or is_beyond_demo(prompt)):
        note(
            f"{'no model is named, so ' * unnamed}the demo model answers: a toy that repeats, "
            f"copies, edits and quotes what it is given, such as '{DEMO_CAN}'; for more try "
            f"--model {SMALL_MODEL}"
        )
    elif default and Path(DIRECTORY).is_dir() and not _is_same(answers, DIRECTORY):
        note(f"{answers} answers, named by {source}; the model here is --model {DIRECTORY}")


_GIVEN = re.compile(r"\n|(?<!\w)[\"'`“].+[\"'`”](?!\w)")
_TASK = re.compile(
    r"^(please )?(repeat|say|copy|quote|rename|edit|set)\b|\b(who|what|where|which|how)\b.*\?", re.I
)


def is_beyond_demo(prompt: str) -> bool:
    """Whether a prompt asks for more than the demo model can do, judged by its form.

    The demo model does a few tasks, with a text that the prompt gives: in quotation marks, or
    before or after the line that says what to do.
    """
    lines = prompt.strip().splitlines() or [""]
    return not (_GIVEN.search(prompt.strip()) and any(map(_TASK.search, (lines[0], lines[-1]))))


def _is_same(first: str, second: str) -> bool:
    return os.path.realpath(local_path(first)) == os.path.realpath(local_path(second))


# --- as options and arguments ---

_NAMED = f"  [default: {MODEL_VARIABLE}, 'mlxspec config', or {DIRECTORY} here"
DEFAULT, DEFAULT_OR_DEMO = f"{_NAMED}]", f"{_NAMED}; else demo]"


def model_option(group: str) -> Decorator:
    """``--model`` of a command whose argument is something else."""
    return option("-m --model MODEL", ABOUT + DEFAULT_OR_DEMO, type=MODEL, group=group)


def model_argument(about: str = ABOUT + DEFAULT_OR_DEMO, *, several: bool = False) -> Decorator:
    """MODEL, by its place or with ``--model``; the command gets it as ``model``.

    That is None where neither is given.

    Args:
        about: what the help says of it.
        several: MODEL and ``--model`` can be repeated; the command gets all as ``models``.
    """
    name, words = ("models", "[MODEL]...") if several else ("model", "[MODEL]")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*, named: Any, **options: Any) -> Any:
            placed = options.pop(name)
            both = (*placed, *named) if several else _one_of(placed, named)
            return function(**{name: both}, **options)

        same = "Another way to name MODEL" + ("; repeatable." if several else ".")
        by_name = option(
            "-m --model MODEL", same, "named", type=MODEL, group=ARGUMENTS, multiple=several
        )
        by_place = argument(
            name,
            about,
            required=False,
            type=MODEL,
            metavar=words,
            nargs=-1 if several else 1,
        )
        return by_place(by_name(called))

    return decorate


def _one_of(placed: str | None, named: str | None) -> str | None:
    """The model that was given in one way or the other.

    Raises:
        click.UsageError: two were.
    """
    if placed and named and placed != named:
        raise click.UsageError(f"MODEL is {placed}, and --model {named}: give one of them")
    return placed or named


def needed_model(model: str | None) -> str:
    """The model that was asked for, or the user's default; for commands without the demo's.

    Raises:
        click.UsageError: there is no default model.
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
