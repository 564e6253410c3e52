"""The ``mlxspec`` command and its subcommands, with ``completion``."""

from __future__ import annotations

from importlib import import_module

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import get_completion_class

import mlxspec

from .common.options import Group, command, group

_COMMANDS = {
    "Generate": ("generate", "chat", "serve", "run", "cache-prompt"),
    "Models": ("models", "convert", "inspect"),
    "Speed": ("bench", "calibrate", "explain", "replay"),
    "Drafts": ("memory",),
    "Set up": ("config", "connect", "completion"),
}
"""Subcommands by their headings in the help."""

_WHOLE = 200  # characters, more than any description has, so that none is cut


class LazyGroup(Group):
    """Imports a subcommand on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in _COMMANDS.values() for name in names]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        names = self.list_commands(ctx)
        if cmd_name not in names:
            if ctx.resilient_parsing:  # a shell completes it
                return None
            raise NoSuchCommand(cmd_name, possibilities=names, ctx=ctx)
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        name = cmd_name.replace("-", "_")
        return getattr(import_module(f"mlxspec.cli.{name}"), f"{name}_command")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, all descriptions in one column."""
        width = max(map(len, self.list_commands(ctx)))
        for heading, names in _COMMANDS.items():
            rows = [
                (f"{name:<{width}}", command.get_short_help_str(_WHOLE))
                for name in names
                if (command := self.get_command(ctx, name))
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)


@group("mlxspec", cls=LazyGroup)
@click.version_option(mlxspec.__version__)
def main() -> None:
    """Lossless speculative decoding for LLMs on Apple MLX, without a second model."""


# --- completion ---

_NAME = "mlxspec"
_VARIABLE = "_MLXSPEC_COMPLETE"  # through which the shell's script passes requests to click


@command("completion", short_help="Let your shell complete commands and models.")
@click.argument("shell", help="bash, zsh or fish.", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a script for SHELL that completes commands, options, their values, and models.

    \b
    Examples:
      eval "$(mlxspec completion bash)"
      eval "$(mlxspec completion zsh)"
      mlxspec completion fish | source

    To enable completion in every new shell, put the line above into ~/.bashrc, or into ~/.zshrc
    after compinit. For fish, write the script to ~/.config/fish/completions/mlxspec.fish. bash must
    be version 4.4 or newer; macOS comes with an older one.

    The models that are completed are those in the Hugging Face Hub's cache, aliases of 'mlxspec
    config', and directories.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, _NAME, _VARIABLE).source(), nl=False)


main.add_command(completion_command)
