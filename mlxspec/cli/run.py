"""``mlxspec run``: a Python program as it is, with speculation under mlx-lm's functions."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  mlxspec run -m mlx_lm.chat --model mlx-community/Mistral-7B-Instruct-v0.3-4bit
  mlxspec run -m mlx_lm generate --prompt "How tall is Mt Everest?"
  mlxspec run my_script.py --its-own-option

mlx_lm.server batches most requests by itself; those are generated without speculation.
"""


class ProgramCommand(click.Command):
    """A command that leaves to the program all that follows its name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Like ``python``: with ``-m MODULE`` no further option is the command's own."""
        if args[:1] == ["-m"] and len(args) > 1:
            args = [*args[:2], "--", *args[2:]]
        elif args and args[0].startswith("-m") and args[0] != "-m":
            args = ["-m", args[0][2:], "--", *args[1:]]
        return super().parse_args(ctx, args)


@click.command(
    "run",
    short_help="Run a program that uses mlx-lm, with speculation.",
    cls=ProgramCommand,
    epilog=EPILOG,
    options_metavar="[-m MODULE | SCRIPT]",
    context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False},
)
@click.option("-m", "module", metavar="MODULE", help="Run a module instead of a script.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run_command(module: str | None, arguments: tuple[str, ...]) -> None:
    """Run a Python program that generates with mlx-lm; its calls speculate.

    The program gets its arguments, its exit status stays what it is, and so does its output.
    """
    if module is None and not arguments:
        raise click.UsageError("name a script, or a module with -m")
    # Here, so that --help does not wait for MLX.
    from .program import run_module, run_script

    if module is not None:
        run_module(module, arguments)
    else:
        run_script(arguments[0], arguments[1:])
