"""``mlxspec completion``: what a shell needs to complete commands, options and models."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .common.options import argument, command

_NAME = "mlxspec"
_VARIABLE = "_MLXSPEC_COMPLETE"  # by which click knows what the shell asks for
_INSTALLED = {
    "bash": """\
# mlxspec in bash 4.4 or newer (macOS has an older one). For all shells to come:
#   mkdir -p ~/.local/share/bash-completion/completions
#   mlxspec completion bash > ~/.local/share/bash-completion/completions/mlxspec
# or, without the package bash-completion, in ~/.bashrc:  eval "$(mlxspec completion bash)"
# For this one:  eval "$(mlxspec completion bash)"
""",
    "zsh": """\
# mlxspec in zsh. For all shells to come, in ~/.zshrc, after compinit:
#   eval "$(mlxspec completion zsh)"
# or without the time that takes: mlxspec completion zsh > DIRECTORY/_mlxspec, with a DIRECTORY of
# $fpath, before compinit.
""",
    "fish": """\
# mlxspec in fish. For all shells to come:
#   mlxspec completion fish > ~/.config/fish/completions/mlxspec.fish
# For this one:  mlxspec completion fish | source
""",
}


@command("completion", short_help="Let your shell complete commands and models.")
@argument("shell", "bash, zsh or fish.", metavar="SHELL", type=click.Choice([*_INSTALLED]))
def completion_command(shell: str) -> None:
    """Print a script for SHELL that completes commands, options, their values, and models.

    \b
    Examples:
      eval "$(mlxspec completion bash)"
      eval "$(mlxspec completion zsh)"
      mlxspec completion fish | source

    How to have it in every shell to come stands at the top of the script. Models are those of the
    Hugging Face Hub's cache, aliases of 'mlxspec config', and directories.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(click.Group(), {}, _NAME, _VARIABLE)
    # Not source(): that looks for a bash and complains of its version beside the script.
    text = script.source_template % script.source_vars()
    first, _, rest = text.partition("\n")
    if first.startswith("#compdef"):  # zsh wants it first
        click.echo(f"{first}\n{_INSTALLED[shell]}{rest}", nl=False)
    else:
        click.echo(_INSTALLED[shell] + text, nl=False)
