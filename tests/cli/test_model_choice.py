"""How a model is named: by its place or an option, by an alias, or by default."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxspec.cli.chat.terminal import LineInput
from mlxspec.cli.common.model_choice import DEMO_CAN, is_beyond_demo, model_or_default
from mlxspec.cli.main import main
from tests.support.command_line import run


@pytest.fixture(autouse=True)
def work(nothing_set: Path) -> Path:
    """The working directory; nothing is set."""
    return nothing_set


def test_the_first_that_names_a_model_decides(work: Path, monkeypatch: pytest.MonkeyPatch):
    """Option, environment, configuration, directory, demo."""
    found = [model_or_default(None)]
    (work / "mlx_model").mkdir()
    found.append(model_or_default(None))
    run("config", "set", "model", "owner/configured")
    found.append(model_or_default(None))
    monkeypatch.setenv("MLXSPEC_MODEL", "owner/named")
    found.append(model_or_default(None))
    found.append(model_or_default("owner/asked"))
    assert found == ["demo", "mlx_model", "owner/configured", "owner/named", "owner/asked"]
    monkeypatch.setenv("MLXSPEC_MODEL", "")
    assert model_or_default(None) == "owner/configured"


def test_aliases_serve_in_the_environment_and_in_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
):
    run("config", "set", "alias.fast", "owner/fast")
    run("config", "set", "model", "fast")
    assert model_or_default(None) == "owner/fast"
    run("config", "set", "alias.slow", "owner/slow")
    monkeypatch.setenv("MLXSPEC_MODEL", "slow")
    assert model_or_default(None) == "owner/slow"


@pytest.mark.slow
def test_who_answers_is_told_where_another_might_be_expected(work: Path, endless: Path):
    prompt = ("generate", "--prompt", "a", "--max-tokens", 1, "--json")
    told = " ".join(run(*prompt).stderr.split())
    assert told.startswith("Note: no model is named, so the demo model answers: a toy that")
    assert "--model mlx-community/" in told
    assert run(*prompt, "-q").stderr == ""
    run("config", "set", "model", endless)
    assert run(*prompt).stderr == ""
    (work / "mlx_model").symlink_to(endless)
    assert run(*prompt).stderr == ""  # it is the same one
    (work / "mlx_model").unlink()
    (work / "mlx_model").mkdir()
    expected = (
        f"{endless} answers, set by 'mlxspec config'; to use the model here, add --model mlx_model"
    )
    assert expected in " ".join(run(*prompt).stderr.split())
    assert run(*prompt, "-m", endless).stderr == ""


@pytest.mark.slow
def test_the_suggested_prompt_is_one_that_the_demo_model_can_answer():
    result = run("generate", "-m", "demo", "--max-tokens", 40, DEMO_CAN)
    assert result.stdout == "The red fox sees the river.\n" * 3


@pytest.mark.parametrize(
    "prompt",
    [
        'Repeat the following phrase 10 times: "A day.". Don\'t say anything else.',
        "Repeat 'A day.' 3 times.",
        "Copy this code:\n```python\na = 1\n```",
        "Rename `total` to `sum` in this code:\n```python\ntotal = 1\n```",
        'Set `city` to "Rome" for the item with id 7:\n```json\n[]\n```',
        "Alice is a baker.\n\nCopy the text.",
        "Alice is 30 years old.\n\nHow old is Alice? Quote the sentence.",
    ],
)
def test_what_the_demo_model_can_do_is_known_by_its_form(prompt: str):
    assert not is_beyond_demo(prompt)


@pytest.mark.nightly(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    [
        "What's the capital of France? It's not Lyon.",
        "Tell me a story about a fox.",
        "Write a Python function that sorts a list.",
        "# Copy a file\n\nA report, in which somebody asks: who was it?\n\nSummarise this.",
        'Translate to French: "The house is red."',
        " ",
    ],
)
def test_what_is_beyond_the_demo_model_is_told_where_it_was_named(prompt: str):
    assert is_beyond_demo(prompt)
    options = ("generate", "-m", "demo", "--max-tokens", 1, "--json", "--prompt", prompt)
    told = " ".join(run(*options).stderr.split())
    assert told.startswith("Note: the demo model answers: a toy that repeats, copies,")
    assert DEMO_CAN in told
    assert not is_beyond_demo(DEMO_CAN)
    assert run(*options, "-q").stderr == ""


@pytest.mark.slow
def test_the_demo_model_is_not_told_of_where_it_can_do_what_is_asked():
    options = ("generate", "-m", "demo", "--max-tokens", 1, "--json")
    assert run(*options, "--prompt", "Repeat 'A day.' 3 times.").stderr == ""
    assert run(*options, "--prompt", "def f(", "--raw").stderr == ""
    assert run(*options, "--prompt", "Is it?", "--regex", "yes|no").stderr == ""


@pytest.mark.parametrize("how", [("{}",), ("-m", "{}"), ("--model", "{}"), ("{}", "-m", "{}")])
def test_inspect_takes_a_model_in_every_way(how: tuple[str, ...], endless: Path):
    given = [word.format(endless) for word in how]
    report = run("inspect", *given, "--json")
    assert json.loads(report.stdout)["type"] == "llama"


def test_a_default_that_is_no_model_is_told_with_who_names_it(
    work: Path, monkeypatch: pytest.MonkeyPatch
):
    (work / "own").mkdir()
    run("config", "set", "model", "own")
    (work / "own").rmdir()
    prompt = ("generate", "--prompt", "a")
    assert f"'mlxspec config' names the model {work / 'own'}: it is neither" in run(*prompt).stderr
    monkeypatch.setenv("MLXSPEC_MODEL", "nothing")
    result = run(*prompt)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: MLXSPEC_MODEL names the model nothing: it is neither")


def test_two_different_models_are_a_wrong_use(endless: Path):
    result = run("inspect", "demo", "--model", endless)
    assert result.exit_code == 2
    assert f"MODEL is demo, and --model {endless}: give one of them" in result.stderr


@pytest.mark.parametrize("command", ["bench", "inspect", "calibrate"])
def test_what_looks_at_a_model_does_not_take_the_demo_for_one(command: str):
    result = run(command)
    assert result.exit_code == 2
    assert "name a MODEL: " in result.stderr
    assert "'mlxspec models'" in result.stderr


def test_inspect_takes_the_default(endless: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLXSPEC_MODEL", str(endless))
    assert run("inspect").stdout.splitlines()[0] == str(endless)


def test_an_alias_is_a_model_wherever_one_is_named(endless: Path, tmp_path: Path):
    run("config", "set", "alias.fast", endless)
    generated = run("generate", "-m", "fast", "--prompt", "a", "--max-tokens", 1, "--json")
    assert json.loads(generated.stdout)["model"] == str(endless)
    assert run("inspect", "fast").stdout.splitlines()[0] == str(endless)
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    stored = run("store", "build", text, "-m", "fast", "-o", tmp_path / "a.store")
    assert stored.exit_code == 0, stored.stderr
    refused = run("serve", "fast", "--model", "fast", "--port", 0, "--decoder", "plain")
    assert f"{endless} is named twice" in refused.stderr


def test_an_alias_goes_before_a_directory_of_its_name(work: Path, endless: Path):
    run("config", "set", "alias.here", endless)
    (work / "here").mkdir()
    result = run("inspect", "here")
    assert result.stdout.splitlines()[0] == str(endless)
    assert f"here is an alias of {endless}; the directory here is ./here" in result.stderr
    assert "here: no config.json" in run("inspect", "./here").stderr


def test_convert_tells_checkpoints_apart(tmp_path: Path):
    """The complaints are about the files that each kind has."""
    original = tmp_path / "original"
    original.mkdir()
    (original / "params.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    complaints = [run("convert", model).stderr for model in (original, other)]
    assert "config.json" not in complaints[0]
    assert "config.json" in complaints[1]
    both = run("convert", other, "--hf-path", other)
    assert both.exit_code == 2
    assert f"{other} and --hf-path are given together" in both.stderr


class InputOfUser(LineInput):
    """Lines as from a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.interactive = True

    def __enter__(self) -> "InputOfUser":
        return self

    def __exit__(self, *raised: object) -> None:
        pass


@pytest.mark.slow
def test_who_talks_with_the_demo_model_is_told_what_it_can_do(monkeypatch: pytest.MonkeyPatch):
    options = ("chat", "-m", "demo", "--max-tokens", "1", "--no-history")
    piped = CliRunner().invoke(main, options, input="Hello.\n")
    assert piped.stderr == ""
    monkeypatch.setattr("mlxspec.cli.chat.terminal.open_input", lambda *_: InputOfUser())
    typed = CliRunner().invoke(main, options, input="/exit\n")
    assert "the demo model answers: a toy" in typed.stderr
