"""Options that ``--help`` lists under headings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


class GroupedOption(click.Option):
    """An option with the heading that it stands under.

    Where it takes a text, that is UTF-8. (Names of files need not be.)
    """

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """As click does, after decoding what Python could not decode in the arguments."""
        if self.type is click.STRING and value is not None:
            try:
                value = [*map(_as_utf8, value)] if self.multiple else _as_utf8(value)
            except UnicodeError:
                name = self.opts[0]
                raise click.UsageError(
                    f"{name} is not UTF-8 text: convert it to UTF-8", ctx
                ) from None
        return super().type_cast_value(ctx, value)


class GroupedCommand(click.Command):
    """A command whose help has one section for each group of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections in the order in which their first options were declared."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                sections.setdefault(getattr(param, "group", "Other"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def options_of(
    command: click.Command, *groups: str, but: tuple[str, ...] = ()
) -> Callable[[click.Command], click.Command]:
    """Put options of another command in front of this one's.

    Args:
        command: whose options.
        groups: the headings under which they stand there.
        but: names of parameters to leave out.
    """

    def with_options(other: click.Command) -> click.Command:
        shared = [param for param in command.params if getattr(param, "group", None) in groups]
        other.params[:0] = [param for param in shared if param.name not in but]
        return other

    return with_options


def _as_utf8(text: str) -> str:
    """A text of the arguments, in which bytes that are not the locale's are lone surrogates."""
    return text.encode(errors="surrogateescape").decode() if isinstance(text, str) else text
