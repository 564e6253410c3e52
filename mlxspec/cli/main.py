"""The ``mlxspec`` command and its subcommands."""

from __future__ import annotations

import shlex
from importlib import import_module

import click

from .common.options import SETTINGS, Group

_COMMANDS = {
    "Generate": ("generate", "chat", "serve", "run", "cache-prompt"),
    "Models": ("models", "convert", "inspect"),
    "Speed": ("bench", "calibrate", "explain", "replay"),
    "Drafts": ("memory", "store"),
    "Set up": ("config", "connect", "completion", "help"),
}
"""By the headings that they stand under in the help."""

_WHOLE = 200  # characters of a description, which all have fewer
_SHORT = 40  # characters of a prompt that can be repeated


class LazyGroup(Group):
    """Imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _COMMANDS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_")
        return getattr(import_module(f"mlxspec.cli.{name}"), f"{name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, all descriptions in one column."""
        width = max(map(len, self.list_commands(ctx)))
        for heading, names in _COMMANDS.items():
            with formatter.section(heading):
                found = [(name, self.get_command(ctx, name)) for name in names]
                formatter.write_dl(
                    [
                        (f"{name:<{width}}", command.get_short_help_str(_WHOLE))
                        for name, command in found
                        if command
                    ]
                )

    def complaint(self, ctx: click.Context, name: str) -> str:
        """What to tell of a command that is none; several words are a prompt that lacks one."""
        if len(name.split()) < 2:
            return super().complaint(ctx, name)
        repeated = shlex.quote(name) if len(name) < _SHORT else '"..."'
        return f"there is no command {name!r}: to have it answered, mlxspec generate {repeated}"


@click.group(cls=LazyGroup, context_settings=SETTINGS)
def main() -> None:
    """Lossless speculative decoding for LLMs on Apple MLX, without a second model."""
