"""Programs under ``mlxspec run``: arguments, exit status, output and speculation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.main import main
from mlxspec.compat import decoder_of
from tests.support.drop_in import demo_with_costs, write_float32_demo

SCRIPT = """
import sys
from mlx_lm import load, stream_generate
from neighbour import PROMPT
print(__name__, sys.argv)
*_, last = stream_generate(*load({model!r}), PROMPT, max_tokens=40)
print("steps", last.stats.steps)
sys.exit(7)
"""
PROMPT = '[INST] Repeat the following phrase 8 times: "The red fox sees the river.". [/INST]'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that mlx-lm loads."""
    return write_float32_demo(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs the command in this process and restores the process's state."""
    costs = decoder_of(*demo_with_costs()).costs
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: costs)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(main, ["run", *arguments], input=stdin)

    return run


def write(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)


@pytest.mark.slow
def test_a_script_gets_its_arguments_and_speculates(run, model: str, tmp_path: Path) -> None:
    write(tmp_path, "neighbour.py", f"PROMPT = {PROMPT!r}")
    script = write(tmp_path, "script.py", SCRIPT.format(model=model))
    result = run(script, "--unknown", "-h", "--", "-m", "x y")
    name, steps = result.stdout.splitlines()
    assert name == f"__main__ {[script, '--unknown', '-h', '--', '-m', 'x y']}"
    assert int(steps.split()[1]) < 20
    assert result.exit_code == 7


@pytest.mark.slow
@pytest.mark.parametrize("module", [("mlx_lm.generate",), ("mlx_lm", "generate")])
def test_mlx_lm_s_generate_speculates(run, model: str, module: tuple[str, ...]) -> None:
    options = ("--model", model, "--prompt", "Repeat this.", "--max-tokens", "12")
    result = run("-m", *module, *options, "--ignore-chat-template")
    assert result.exit_code == 0
    assert "Speculation: " in result.stdout
    assert "deprecated" not in result.stdout


@pytest.mark.slow
def test_mlx_lm_s_programs_know_the_bundled_model(run) -> None:
    options = ("--model", "demo", "--prompt", 'Repeat this 2 times: "A day."')
    result = run("-m", "mlx_lm", "generate", *options)
    assert result.exit_code == 0, result.stderr
    assert "A day.\nA day." in result.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'mlx_lm.chat' found")  # other tests may have imported it
def test_mlx_lm_s_chat_runs_and_gets_standard_input(run, model: str) -> None:
    result = run(
        *("-m", "mlx_lm.chat", "--model", model, "--max-tokens", "8"),
        stdin='Repeat the following phrase 8 times: "A day.".\nq\n',
    )
    assert result.exit_code == 0
    assert "A day." in result.stdout


def test_help_behind_a_module_is_the_module_s(run) -> None:
    assert "quantized" not in run("--help").stdout
    result = run("-m", "mlx_lm", "generate", "--help")
    assert "--quantized-kv-start" in result.stdout
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("text", "status", "shown"),
    [
        ("", 0, ""),
        ("raise SystemExit('enough')", 1, ""),
        ("raise EOFError('no more')", 1, "EOFError: no more"),
        ("raise KeyboardInterrupt", 130, ""),
        ("import click; raise click.ClickException('x')", 1, "ClickException"),
    ],
)
def test_a_program_ends_as_it_would_alone(
    run, tmp_path: Path, text: str, status: int, shown: str
) -> None:
    result = run(write(tmp_path, "script.py", text))
    assert result.exit_code == status
    assert shown in result.stderr
    assert "Aborted" not in result.stderr


def test_a_traceback_ends_with_the_program_s(run, tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "def f():\n    raise ValueError('mine')\nf()\n")
    assert run(script).stderr.endswith(
        f'  File "{script}", line 3, in <module>\n    f()\n'
        f"  File \"{script}\", line 2, in f\n    raise ValueError('mine')\n"
        "ValueError: mine\n"
    )


def test_mlx_lm_is_as_before_when_the_program_has_ended(run, tmp_path: Path) -> None:
    import mlx_lm

    before = mlx_lm.stream_generate
    script = "import mlx_lm\nprint(mlx_lm.stream_generate.__module__, mlx_lm.stream_generate)"
    assert hex(id(before)) not in run(write(tmp_path, "script.py", script)).stdout
    assert mlx_lm.stream_generate is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'PROGRAM'"),
        (("-m",), "Missing argument 'PROGRAM'"),
        (("nowhere.py",), "Error: nowhere.py: no such script"),
        (("/",), "Error: /: no such script"),
        (("-m", "nowhere"), "Error: nowhere: no such module"),
        (("-m", "nowhere.at_all"), "Error: nowhere.at_all: no such module"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(run, arguments: tuple, message: str) -> None:
    result = run(*arguments)
    assert result.exit_code > 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
