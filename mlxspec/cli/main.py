"""The ``mlxspec`` command and its subcommands."""

from __future__ import annotations

from importlib import import_module

import click

import mlxspec

_COMMANDS = (
    *("bench", "cache-prompt", "calibrate", "chat", "connect", "convert", "explain"),
    *("generate", "inspect", "memory", "replay", "run", "serve", "store"),
)


class LazyGroup(click.Group):
    """Imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return getattr(import_module(f"mlxspec.cli.{name}"), f"{name}_command")


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mlxspec.__version__, prog_name="mlxspec")
def main() -> None:
    """Lossless speculative decoding for LLMs on Apple MLX, without a second model."""
