import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import mlxspec
from mlxspec.cli.convert import convert_command
from mlxspec.cli.generate import generate_command
from mlxspec.cli.main import main

ROOT = Path(mlxspec.__file__).parents[1]


def python(code: str) -> str:
    """What a fresh interpreter in the repository's root prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_the_command_lists_its_subcommands():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert re.search(r"convert +Convert", result.stdout)
    assert re.search(r"generate +Generate", result.stdout)
    # At 80 columns every description is there to its end.
    assert "..." not in result.stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("name", "command"), [("generate", generate_command), ("convert", convert_command)]
)
def test_a_subcommand_is_the_script_s_command(name: str, command: object):
    assert main.commands == {}  # nothing is imported before it is asked for
    with main.make_context("mlxspec", [name]) as context:
        assert main.get_command(context, name) is command


def test_an_unknown_subcommand_exits_with_2():
    result = CliRunner().invoke(main, ["genrate"])
    assert result.exit_code == 2
    assert "genrate" in result.stderr


@pytest.mark.parametrize("command", [main, generate_command])
def test_version_is_the_package_s(command):
    result = CliRunner().invoke(command, ["--version"])
    assert result.stdout.split()[-1] == mlxspec.__version__


def test_help_has_the_options_in_groups_and_fits_40_columns():
    result = CliRunner().invoke(generate_command, ["--help"], terminal_width=40)
    headings = [line for line in result.stdout.splitlines() if re.fullmatch(r"\S.*:", line)]
    assert headings == [
        "Model and prompt:",
        "Chat template:",
        "Drafting:",
        "End of the output:",
        "Sampling:",
        "Memory:",
        "Form of the output:",
        "Output:",
        "Other:",
    ]
    assert "[PROMPT]" in result.stdout
    for option in generate_command.params:
        assert option.opts[0] in result.stdout or isinstance(option, click.Argument)


def test_help_waits_for_no_heavy_import():
    heavy = {"mlx", "mlx_lm", "transformers", "numpy", "huggingface_hub", "jinja2"}
    commands = "from mlxspec.cli.main import main; [main.get_command(None, n) for n in COMMANDS]"
    code = commands.replace("COMMANDS", repr(main.list_commands(None)))
    loaded = python(f"import sys, decoder; {code}; print(*sys.modules)").split()
    assert heavy.isdisjoint(loaded)
    assert "mlxspec.cli.generate" in loaded


def test_decoder_py_exports_the_decoder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT)
    assert import_module("decoder").PromptLookupDecoder is mlxspec.PromptLookupDecoder
