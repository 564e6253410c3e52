import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import mlxspec
from mlxspec.cli.common.notes import run_command
from mlxspec.cli.common.options import ARGUMENTS, Option
from mlxspec.cli.convert import convert_command
from mlxspec.cli.generate import generate_command
from mlxspec.cli.main import main

ROOT = Path(mlxspec.__file__).parents[1]


def python(code: str) -> str:
    """Run code in a new interpreter in the repository's root; return its output."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_the_command_lists_its_subcommands():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert re.search(r"convert +Convert", result.stdout)
    assert re.search(r"generate +Generate", result.stdout)
    # Every description is complete and starts in the same column.
    commands = result.stdout.partition("Generate:")[2]
    assert "..." not in commands
    rows = re.findall(r"^  \S+ +", commands, re.MULTILINE)
    assert len({*map(len, rows)}) == 1


@pytest.mark.parametrize(
    ("name", "command"), [("generate", generate_command), ("convert", convert_command)]
)
def test_a_subcommand_is_the_script_s_command(name: str, command: object):
    assert {*main.commands} == {"completion"}  # others are imported on demand
    with main.make_context("mlxspec", [name]) as context:
        assert main.get_command(context, name) is command


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'? (mlxspec --help)"),
        (["memory", "shw"], "'shw'. Did you mean 'show'? (mlxspec memory --help)"),
        (["zzz"], "No such command 'zzz' (mlxspec --help)"),
        (["generate", "--modl", "x"], "No such option '--modl'. (Did you mean one of: "),
        (["generate", "--zzz"], "No such option '--zzz' (mlxspec generate --help)"),
        (["help"], "No such command 'help' (mlxspec --help)"),
        (["help", "generate"], "No such command 'help' (mlxspec --help)"),
    ],
)
def test_what_is_mistyped_is_guessed(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The guess is one line on standard error, with status 2."""
    monkeypatch.setattr(sys, "argv", ["mlxspec", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(main, "mlxspec")
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert complaint in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["memory"]])
def test_a_command_of_commands_alone_shows_its_help(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["mlxspec", *words])
    with pytest.raises(SystemExit) as ended:
        run_command(main, "mlxspec")
    output = capsys.readouterr()
    assert (ended.value.code, output.err) == (0, "")
    assert output.out.startswith(" ".join(["Usage: mlxspec", *words]))


def every_command() -> Iterator[tuple[list[str], click.Command]]:
    """Return all commands and subcommands, with the words that call them."""
    with main.make_context("mlxspec", [], resilient_parsing=True) as context:
        for name in main.list_commands(context):
            command = main.get_command(context, name)
            assert command is not None
            yield [name], command
            if isinstance(command, click.Group):
                yield from (([name, own], one) for own, one in command.commands.items())


EVERY = [*every_command()]


@pytest.mark.parametrize("words", [[], *(words for words, _ in EVERY)], ids=" ".join)
def test_every_command_has_help(words: list[str]):
    short, long = (
        CliRunner().invoke(main, arguments, prog_name="mlxspec").stdout
        for arguments in ([*words, "-h"], [*words, "--help"])
    )
    assert long.startswith(" ".join(["Usage: mlxspec", *words]))
    assert short == long


@pytest.mark.parametrize(("words", "command"), EVERY, ids=lambda value: str(value))
def test_help_has_a_sentence_on_each_argument_and_a_heading_for_each_option(
    words: list[str], command: click.Command
):
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    for one in arguments:
        assert str(one.help).partition("  [default: ")[0].endswith(".")
    own = [one for one in command.params if isinstance(one, Option)]
    headed = {one.group is not None for one in own if one.group != ARGUMENTS}
    assert len(headed) < 2  # either all or none have headings
    assert all(one.help for one in command.params if isinstance(one, click.Option))


@pytest.mark.parametrize("words", [words for words, _ in EVERY], ids=" ".join)
def test_help_fits_the_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(main, [*words, "--help"]).stdout.splitlines()
    assert not [line for line in lines if len(line) > 80]


def test_the_version_is_the_package_s():
    assert CliRunner().invoke(main, ["--version"]).stdout.split()[-1] == mlxspec.__version__


def test_help_has_the_options_in_groups():
    result = CliRunner().invoke(generate_command, ["--help-all"])
    headings = [line for line in result.stdout.splitlines() if re.fullmatch(r"\S.*:", line)]
    assert headings == [
        "Arguments:",
        "Model and prompt:",
        "Chat template:",
        "Drafting:",
        "With --decoder prompt-lookup:",
        "With --decoder lookahead:",
        "Sampling:",
        "Memory:",
        "End of the output:",
        "Form of the output:",
        "Output:",
        "Help:",
    ]
    assert "[PROMPT]" in result.stdout
    for option in generate_command.params:
        assert option.opts[0] in result.stdout or isinstance(option, click.Argument)


@pytest.mark.parametrize("name", ["generate", "chat", "serve", "explain"])
def test_help_shows_the_options_that_people_use(name: str):
    command = next(one for words, one in EVERY if words == [name])
    usual, every = (
        [line for line in run(name, option).stdout.splitlines() if line.startswith("  -")]
        for option in ("--help", "--help-all")
    )
    assert 12 <= len(usual) <= 18
    assert len(every) == sum(isinstance(one, click.Option) for one in command.params) + 2


def run(*words: str) -> Result:
    return CliRunner().invoke(main, [*words])


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
