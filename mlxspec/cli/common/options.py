"""Options and arguments of the commands: declared as ``--help`` shows them, under headings.

Options that several commands share are the fields of a dataclass. :func:`options_of` adds them to a
command, which then gets an instance of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import Field, field, fields
from functools import partial, wraps
from inspect import cleandoc
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import click

import mlxspec

from ...errors import MlxspecError, OptionError
from ..settings import load_config
from .notes import reported

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


ARGUMENTS = "Arguments"
"""The heading of arguments, and of options that replace them."""


class _Context(click.Context):
    """A context whose help is no wider than the terminal."""

    def make_formatter(self) -> click.HelpFormatter:
        """Like click's, but without its minimum of 50 columns."""
        width = self.terminal_width or min(get_terminal_size().columns, 80) - 2
        return click.HelpFormatter(width=width)


_NARROW = 60  # columns
_SHORT_NAME = 14  # characters; longer ones would leave too little room for the help
_version = click.version_option(mlxspec.__version__, prog_name="mlxspec")


class _Described(click.Command):
    """A command with ``--version``.

    Its help shows the docstring's examples, and the text after them, below the options.
    """

    context_class = _Context

    def __init__(self, name: str, help: str, **more: Any) -> None:
        about, examples, rest = cleandoc(help).partition("\b\nExamples:")
        super().__init__(name, help=about, **{"epilog": examples + rest, **more})
        _version(self)


class Command(_Described):
    """A command whose help has a section for each group of options.

    The arguments come first, and ``--version`` and ``--help`` last. Errors are printed on one line:
    see :func:`.common.notes.reported`.
    """

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        """Like click's, with the user's settings as the defaults of options."""
        with suppress(MlxspecError):  # the command reports it, and --help need not
            more.setdefault("default_map", load_config().defaults_of(self.name or ""))
        return super().make_context(*args, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with reported():
            return super().invoke(ctx)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: :meth:`format_options` writes the arguments, next to ``--model``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections in the order in which their first options were declared."""
        sections: dict[str | None, list[tuple[str, str]]] = {ARGUMENTS: []}
        for param in self.get_params(ctx):
            is_argument = isinstance(param, click.Argument)
            group = ARGUMENTS if is_argument else getattr(param, "group", None)
            if record := param.get_help_record(ctx):
                sections.setdefault(group, []).append(record)
        ungrouped = "Help" if len(sections) > 2 else "Options"
        widest = 30 if formatter.width >= _NARROW else _SHORT_NAME
        for heading, records in sections.items():
            if records:
                with formatter.section(heading or ungrouped):
                    formatter.write_dl(records, col_max=widest)


class Group(_Described, click.Group):
    """A command with subcommands."""

    command_class = Command


def argument(name: str, help: str, **more: Any) -> Decorator:
    """Declare an argument of a command.

    Args:
        name: the function's parameter; without ``metavar`` the help shows it in capitals.
        help: a sentence about it.
        more: as for :class:`click.Argument`.
    """
    return click.argument(name, help=help, **more)


class Option(click.Option):
    """An option with a heading.

    Text must be UTF-8; file names need not be.
    """

    def __init__(self, *args: Any, group: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Like click's, but decode text as UTF-8, whatever the locale."""
        if self.type is click.STRING and value is not None:
            try:
                value = [*map(_as_utf8, value)] if self.multiple else _as_utf8(value)
            except UnicodeError:
                name = next((one for one in self.opts if one.startswith("--")), self.opts[0])
                raise click.UsageError(
                    f"{name} is not UTF-8 text: convert it to UTF-8", ctx
                ) from None
        return super().type_cast_value(ctx, value)


def _as_utf8(text: str) -> str:
    """Decode an argument in which Python has left undecodable bytes as lone surrogates."""
    return text.encode(errors="surrogateescape").decode() if isinstance(text, str) else text


class Name(click.Path):
    """A name that must not be empty: as a path, "" would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty; give a name, or leave it out", param, ctx)
        return super().convert(value, param, ctx)


# A file that cannot be read is reported by the code that reads it.
NAME = Name(readable=False)
"""A name of a model, a file or a directory, as a text."""
FILE = Name(readable=False, path_type=Path)
"""A name of a file, as a path."""

# Subcommands inherit them.
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
command = partial(click.command, cls=Command, context_settings=_SETTINGS)
group = partial(click.group, cls=Group, context_settings=_SETTINGS)


def option(spelling: str, help: str, name: str | None = None, **more: Any) -> Decorator:
    """Declare an option as ``--help`` shows it: ``option("-o --output FILE", "What to write.")``.

    It is a flag if it has neither a name for its value nor a ``type``.

    Args:
        spelling: the option's names, and the name of its value.
        help: what it does.
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


_TYPES = {"float": float, "int": int, "str": str, "Path": FILE}


def nested(kind: type, group: str, **read: Callable) -> Any:
    """A field that is itself a dataclass of options, for :func:`options_of`.

    Args:
        kind: the field's class.
        group: the heading of its options.
        read: functions, by field, that make the value from the given texts.
    """
    return field(metadata={"options": kind, "group": group, "read": read})


def options_of(
    kind: type, argument: str, group: str | None = None, leave_out: Collection[str] = ()
) -> Decorator:
    """Give a command an option for each field of a dataclass whose metadata has a ``help``.

    The option of a field with several values can be repeated. A field without a ``help`` takes the
    command's option of the same name, if it has one.

    Args:
        kind: the dataclass.
        argument: the function's parameter that gets the dataclass.
        group: the heading of these options.
        leave_out: fields that are not options of this command.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**options: Any) -> Any:
            taken = _taken(kind, options)
            return function(**{argument: taken}, **options)

        optioned: Callable[..., Any] = called
        for add in reversed([*_options_in(kind, group, leave_out)]):
            optioned = add(optioned)
        return optioned

    return decorate


def _options_in(kind: type, group: str | None, leave_out: Collection[str]) -> Iterator[Decorator]:
    for own in fields(kind):
        if "options" in own.metadata:
            yield from _options_in(own.metadata["options"], own.metadata["group"], leave_out)
        elif "help" in own.metadata and own.name not in leave_out:
            yield _option_of(own, group)


def _taken(kind: type, options: dict[str, Any], **read: Callable) -> Any:
    """Make the dataclass from a command's options, and remove its fields from ``options``."""
    values = {}
    for own in fields(kind):
        if "options" in own.metadata:
            values[own.name] = _taken(own.metadata["options"], options, **own.metadata["read"])
        elif own.name in options:
            value = options.pop(own.name)
            values[own.name] = read[own.name](value) if own.name in read else value
    return kind(**values)


def _option_of(own: Field, group: str | None) -> Decorator:
    more: dict[str, Any] = {"group": group, **own.metadata}
    if not more.get("required"):  # to click any default, even None, is a value
        more["default"] = own.default
    named = f"--{own.name.replace('_', '-')} {more.pop('metavar', '')}"
    more.pop("of", None)
    kind = str(own.type).partition(" | ")[0]
    if "type" not in more and kind != "bool":
        more |= {"type": _TYPES[kind]} if kind in _TYPES else {"multiple": True}
    return option(more.pop("spelling", named), more.pop("help"), own.name, **more)


def color_option(group: str, help: str = "Colour accepted draft tokens.") -> Decorator:
    """``--color`` and ``--no-color``."""
    default = "  [default: at a terminal, unless NO_COLOR is set]"
    return option("--color/--no-color", help + default, default=None, group=group)


def names_completed(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Shell completion for an option that takes a name, or several separated by commas.

    Args:
        names: returns all names.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        given, comma, begun = incomplete.rpartition(",")
        left = (name for name in names() if name not in given.split(","))
        return [f"{given}{comma}{name}" for name in left if name.startswith(begun)]

    return complete


DRAFTER = "--drafter MODULE:CLASS"
"""The option for a custom drafter, which :func:`mlxspec.drafting.drafter.load_drafter` loads."""

ADAPTERS = "--adapter-path DIR"
ADAPTERS_HELP = "Apply adapters (LoRA, DoRA) that mlx_lm.lora has trained for the model."

HEAD = "--head PATH_OR_REPO"
HEAD_HELP = (
    "With auto: also draft with this trained head, where no text is likely.  "
    "[default: the one that comes with the model, if it has one]"
)
NO_HEAD = "--no-head"
NO_HEAD_HELP = "Leave out the trained head that comes with the model."

NO_MEMORY = "--no-memory"
NO_MEMORY_HELP = "Neither draft from nor add to the answers that 'mlxspec memory on' keeps."


def check_least(least: int, **options: int | None) -> None:
    """Check that numbers are at least ``least``; each is named as its option.

    Raises:
        OptionError: a number is too small.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise OptionError(f"--{name.replace('_', '-')} is {value}: give at least {least}")


def check_one(**options: object) -> None:
    """Check that at most one of these options is given, that is, neither None nor False.

    Raises:
        OptionError: several are.
    """
    given = [
        name.replace("_", "-") for name, value in options.items() if value not in (None, False)
    ]
    if len(given) > 1:
        raise OptionError(f"--{given[0]} and --{given[1]} are given together: choose one")
