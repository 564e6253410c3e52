"""Run the ``mlxspec`` command in this process."""

from click.testing import CliRunner, Result

from mlxspec.cli.main import main


def run(*arguments: object) -> Result:
    """Run the command with these arguments."""
    return CliRunner().invoke(main, [*map(str, arguments)], prog_name="mlxspec")
