"""Options and arguments of the commands, declared in the form that ``--help`` shows.

Options that several commands share are the fields of a dataclass. :func:`options_of` adds them to a
command, which then gets an instance of the dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import Field, field, fields
from functools import partial, wraps
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...errors import MlxspecError, OptionError
from ..settings import defaults_of
from .notes import reported

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


ARGUMENTS = "Arguments"
"""The heading of arguments, and of options that replace them."""

_MOST = 20  # options that --help shows in full
_SHOWS_ALL = "mlxspec.shows_all"  # in the meta data of a context

# fmt: off
_USUAL = frozenset([
    "--model", "--prompt", "--prompt-file", "--prompts", "--max-tokens", "--system-prompt",
    "--decoder", "--temp", "--top-p", "--seed", "--json-schema", "--quiet", "--compare", "--json",
    "--load", "--server", "--markdown", "--no-history", "--models", "--keep-alive", "--host",
    "--port", "--api-key-file", "--concurrency", "--memory-limit", "--cache-dir", "--steps",
    "--skip", "--html",
])
# fmt: on
"""The options that ``--help`` shows of a command with more than _MOST; --help-all shows all."""


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    help="Show all options and exit.",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
)


class Command(click.Command):
    """A command whose help has a section for each group of options.

    The section of arguments is the first, that of ``--help`` the last. A command with many options
    shows the usual ones, and all of them with ``--help-all``. The docstring's examples and the text
    after them follow. Errors are printed on one line: see :func:`.common.notes.reported`.
    """

    def __init__(self, name: str, help: str, **more: Any) -> None:
        about, examples, rest = cleandoc(help).partition("\b\nExamples:")
        super().__init__(name, help=about, **{"epilog": examples + rest, **more})

    def make_context(
        self, info_name: str | None, args: list[str], *rest: Any, **more: Any
    ) -> click.Context:
        """Make click's context, with the user's settings as the defaults of options."""
        with suppress(MlxspecError):  # the command itself reports it; --help should still work
            more.setdefault("default_map", defaults_of(self.name or ""))
        return super().make_context(info_name, args, *rest, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with reported():
            _check_needs(ctx)
            return super().invoke(ctx)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The options and arguments, with those that show the help."""
        params = super().get_params(ctx)
        return [*params, _HELP_ALL] if len(self.params) > _MOST else params

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: :meth:`format_options` writes the arguments, next to ``--model``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections in the order in which their first options were declared."""
        sections: dict[str | None, list[tuple[str, str]]] = {ARGUMENTS: []}
        params = self.get_params(ctx)
        shows_all = _HELP_ALL not in params or _SHOWS_ALL in ctx.meta
        for param in params:
            is_argument = isinstance(param, click.Argument)
            group = ARGUMENTS if is_argument else getattr(param, "group", None)
            if not (shows_all or group in (ARGUMENTS, None) or _USUAL.intersection(param.opts)):
                continue
            if record := param.get_help_record(ctx):
                sections.setdefault(group, []).append(record)
        ungrouped = "Help" if len(sections) > 2 else "Options"
        for heading, records in sections.items():
            if records:
                with formatter.section(heading or ungrouped):
                    formatter.write_dl(records)


_NEEDS = {
    "--logprobs": ("--json", "--prompts"),
    "--concurrency": ("--prompts",),
    "--num-draft-tokens": ("--draft-model",),
    "--xtc-threshold": ("--xtc-probability",),
    "--repetition-context-size": ("--repetition-penalty",),
    **dict.fromkeys(("--kv-group-size", "--quantized-kv-start"), ("--kv-bits",)),
}
"""For each option that has no effect alone, the options of which it needs at least one.

Only those that the command has are considered.
"""


def _check_needs(ctx: click.Context) -> None:
    """Refuse options that have no effect."""
    params = ctx.command.params
    values = {name: ctx.params.get(param.name) for param in params for name in param.opts}
    for param in params:
        name, given = param.opts[0], ctx.get_parameter_source(param.name or "")
        needs = [other for other in _NEEDS.get(name, ()) if other in values]
        if given is ParameterSource.COMMANDLINE and needs and not any(map(values.get, needs)):
            raise OptionError(
                f"{name} has no effect without {' or '.join(needs)}: add it, or leave out {name}"
            )


class Group(click.Group):
    """A command with subcommands."""

    command_class = Command


class Option(click.Option):
    """An option that the help shows under the heading ``group``."""

    def __init__(self, *args: Any, group: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


COUNT = click.IntRange(1)
"""A number of things, at least one."""
NAME = click.Path()
"""The name of a file or a directory, as a string."""
FILE = click.Path(path_type=Path)
"""The name of a file, as a path."""

# Subcommands inherit these settings.
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
command = partial(click.command, cls=Command, context_settings=_SETTINGS)
group = partial(click.group, cls=Group, context_settings=_SETTINGS)


def option(spelling: str, help: str, name: str | None = None, **more: Any) -> Decorator:
    """Declare an option as ``--help`` shows it: ``option("-o --output FILE", "What to write.")``.

    Without a name for its value and without a ``type``, it is a flag.

    Args:
        spelling: the option's names, and the name of its value.
        name: the function's parameter, if its name differs from the option's.
        more: as for :class:`Option`.
    """
    *names, last = spelling.split()
    if not last.startswith("-"):
        more["metavar"] = last
    else:
        names.append(last)
        if "type" not in more and "/" not in spelling:
            more["is_flag"] = True
    return click.option(*names, *filter(None, [name]), cls=Option, help=help, **more)


def option_field(spelling: str, help: str, *, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass for :func:`options_of`; arguments as for :func:`option`."""
    return field(default=default, metadata={"spelling": spelling, "help": help, **more})


def _biases(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[int, float]:
    """Parse texts such as "42=-5"."""
    parsed = {}
    for text in texts:
        token, _, value = text.partition("=")
        try:
            parsed[int(token)] = float(value)
        except ValueError:
            raise click.BadParameter(f"{text!r}: write it as ID=VALUE, for example 42=-5") from None
    return parsed


def _text(value: str) -> str:
    value.encode()  # fails for bytes that are not UTF-8, which Python reads as lone surrogates
    return value


def _id_or_text(token: str) -> int | str:
    return int(token) if token.isdecimal() else _text(token)


_TYPES: dict[str, dict[str, Any]] = {
    "bool": {},
    "float": {"type": float},
    "int": {"type": int},
    "str": {"type": _text},
    "Path": {"type": FILE},
    "tuple[str, ...]": {"multiple": True, "type": _text},
    "tuple[int | str, ...]": {"multiple": True, "type": _id_or_text},
    "Mapping[int, float]": {"multiple": True, "callback": _biases},
}
"""Click's arguments for an option, by the type of its field."""


def options_of(
    kind: type, argument: str, group: str | None = None, leave_out: Collection[str] = ()
) -> Decorator:
    """Give a command an option for each field of a dataclass whose metadata has a ``help``.

    A field without a ``help`` gets the value of the command's option or argument of the same name,
    if there is one.

    Args:
        argument: the function's parameter that gets the dataclass.
        group: the heading of these options.
        leave_out: the names of fields that are not options of this command.
    """
    names = [declared.name for declared in fields(kind)]
    added = [
        _option_of(declared, group)
        for declared in fields(kind)
        if "help" in declared.metadata and declared.name not in leave_out
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**options: Any) -> Any:
            taken = kind(**{name: options.pop(name) for name in names if name in options})
            return function(**{argument: taken}, **options)

        return all_of(*added)(called)

    return decorate


def all_of(*added: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which the help shows them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for add in reversed(added):
            function = add(function)
        return function

    return decorate


def _option_of(declared: Field, group: str | None) -> Decorator:
    more: dict[str, Any] = {"group": group, **declared.metadata}
    if not more.get("required"):  # click treats any default, even None, as a value
        more["default"] = declared.default
    spelling = f"--{declared.name.replace('_', '-')} {more.pop('metavar', '')}"
    more.pop("of", None)
    if "type" not in more:
        more |= _TYPES.get(str(declared.type).removesuffix(" | None"), {"multiple": True})
    return option(more.pop("spelling", spelling), more.pop("help"), declared.name, **more)


def color_option(group: str, help: str = "Colour accepted draft tokens.") -> Decorator:
    """Declare ``--color`` and ``--no-color``."""
    default = "  [default: at a terminal, unless NO_COLOR is set]"
    return option("--color/--no-color", help + default, default=None, group=group)


def names_completed(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Shell completion for an option that takes a name, or several separated by commas."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        given, comma, begun = incomplete.rpartition(",")
        left = (name for name in names() if name not in given.split(","))
        return [f"{given}{comma}{name}" for name in left if name.startswith(begun)]

    return complete


# The spelling and the help of options that several commands have.
DRAFTER = "--drafter MODULE:CLASS"
ADAPTERS = (
    "--adapter-path DIR",
    "Apply adapters (LoRA, DoRA) trained by mlx_lm.lora for this model.",
)
HEAD = (
    "--head PATH_OR_REPO",
    "With auto: also draft with this trained head where text drafts are unlikely to be right.  "
    "[default: the head that comes with the model, if any]",
)
NO_HEAD = "--no-head", "Do not use the trained head that comes with the model."
NO_SAVED_ANSWERS = (
    "--no-saved-answers",
    "Ignore the answers that 'mlxspec memory on' keeps and what was learned from drafts; keep "
    "nothing new.",
)


def check_one(**options: object) -> None:
    """Check that at most one of these options is given (neither None nor False).

    Raises:
        OptionError: several are given.
    """
    given = [
        name.replace("_", "-") for name, value in options.items() if value not in (None, False)
    ]
    if len(given) > 1:
        raise OptionError(f"--{given[0]} and --{given[1]} are given together: choose one")
