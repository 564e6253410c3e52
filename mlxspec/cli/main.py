"""The ``mlxspec`` command and its subcommands."""

from __future__ import annotations

from importlib import import_module

import click

import mlxspec

_COMMANDS = {
    "bench": ("mlxspec.cli.bench", "bench_command"),
    "cache-prompt": ("mlxspec.cli.cache_prompt", "cache_prompt_command"),
    "calibrate": ("mlxspec.cli.calibrate", "calibrate_command"),
    "chat": ("mlxspec.cli.chat", "chat_command"),
    "convert": ("mlxspec.cli.convert", "convert_command"),
    "explain": ("mlxspec.cli.explain", "explain_command"),
    "generate": ("mlxspec.cli.generate", "generate_command"),
    "inspect": ("mlxspec.cli.inspect", "inspect_command"),
    "replay": ("mlxspec.cli.replay", "replay_command"),
    "run": ("mlxspec.cli.run", "run_command"),
    "store": ("mlxspec.cli.store", "store_command"),
}


class LazyGroup(click.Group):
    """Imports a subcommand when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, command = _COMMANDS[cmd_name]
        return getattr(import_module(module), command)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mlxspec.__version__, prog_name="mlxspec")
def main() -> None:
    """Lossless speculative decoding for LLMs on Apple MLX, without a second model."""
