"""``mlxspec help``: what ``--help`` of a command shows."""

from __future__ import annotations

import click

from .common.options import argument, command


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    about = ctx.find_root().command
    for word in ctx.params.get("words") or ():
        found = about.get_command(ctx, word) if isinstance(about, click.Group) else None
        if found is None:
            return []
        about = found
    names = about.list_commands(ctx) if isinstance(about, click.Group) else []
    return [name for name in names if name.startswith(incomplete)]


@command("help", short_help="Show the help of a command.")
@argument(
    "words",
    "The command, and one of its own commands.",
    nargs=-1,
    metavar="[COMMAND]...",
    shell_complete=_complete,
)
@click.pass_context
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, as its --help does; without one, that of mlxspec.

    \b
    Examples:
      mlxspec help
      mlxspec help generate
      mlxspec help memory forget
    """
    about = ctx.find_root()
    for word in words:
        group = about.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"{about.command_path} has no commands of its own", about)
        name, found, _ = group.resolve_command(about, [word])
        if found is None:
            raise click.UsageError(f"{word} is an option: name a command", ctx)
        about = found.context_class(found, about, name, **found.context_settings)
    click.echo(about.get_help())
