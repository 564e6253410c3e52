"""Choosing a model: by path, option, alias or default."""

import json
from pathlib import Path
from runpy import run_path

import pytest

import mlxspec
from mlxspec.cli.common.model_choice import DEMO_CAN, model_or_default
from tests.support.command_line import run

ROOT = Path(mlxspec.__file__).parent.parent


@pytest.fixture(autouse=True)
def work(nothing_set: Path) -> Path:
    """The working directory, without any settings."""
    return nothing_set


def test_the_first_that_names_a_model_decides(work: Path, monkeypatch: pytest.MonkeyPatch):
    """The order is option, environment, configuration, directory, demo."""
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


def test_decoder_py_runs_what_convert_py_has_written(work: Path, monkeypatch: pytest.MonkeyPatch):
    """The environment and the option override it, the configuration does not."""
    found: list[str] = []
    monkeypatch.setattr("mlxspec.__main__.run", lambda *_: found.append(model_or_default(None)))
    run("config", "set", "model", "owner/configured")

    def start_it() -> None:
        run_path(str(ROOT / "decoder.py"), run_name="__main__")

    start_it()
    (work / "mlx_model").mkdir()
    monkeypatch.setenv("MLXSPEC_MODEL", "owner/named")
    start_it()
    monkeypatch.delenv("MLXSPEC_MODEL")
    start_it()  # sets it
    monkeypatch.delenv("MLXSPEC_MODEL")
    assert found == ["owner/configured", "owner/named", "mlx_model"]


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
def test_the_demo_model_is_named_if_nothing_else_is(work: Path, endless: Path):
    prompt = ("generate", "--prompt", "a", "--max-tokens", 1, "--json")
    note = " ".join(run(*prompt).stderr.split())
    assert note.startswith("Note: no model is named, so the demo model answers, a toy that")
    assert "--model mlx-community/" in note
    assert run(*prompt, "-q").stderr == ""
    assert run(*prompt, "-m", "demo").stderr == ""
    run("config", "set", "model", endless)
    assert run(*prompt).stderr == ""


@pytest.mark.slow
def test_the_suggested_prompt_is_one_that_the_demo_model_can_answer():
    result = run("generate", "-m", "demo", "--max-tokens", 40, DEMO_CAN)
    assert result.stdout == "The red fox sees the river.\n" * 3


@pytest.mark.slow
@pytest.mark.parametrize("how", [("{}",), ("-m", "{}"), ("--model", "{}"), ("{}", "-m", "{}")])
def test_inspect_takes_a_model_in_every_way(how: tuple[str, ...], endless: Path):
    given = [word.format(endless) for word in how]
    report = run("inspect", *given, "--json")
    assert json.loads(report.stdout)["type"] == "llama"


def test_two_different_models_are_a_wrong_use(endless: Path):
    result = run("inspect", "demo", "--model", endless)
    assert result.exit_code == 2
    assert f"MODEL is demo, but --model is {endless}: give one of them" in result.stderr


@pytest.mark.slow
def test_inspect_takes_the_default(endless: Path, monkeypatch: pytest.MonkeyPatch):
    result = run("inspect")
    assert result.stdout.splitlines()[0] == "demo"
    assert result.stderr.startswith("Note: no model is named, so the demo model answers")
    monkeypatch.setenv("MLXSPEC_MODEL", str(endless))
    assert run("inspect").stdout.splitlines()[0] == str(endless)


@pytest.mark.slow
def test_an_alias_is_a_model_wherever_one_is_named(endless: Path, tmp_path: Path):
    run("config", "set", "alias.fast", endless)
    generated = run("generate", "-m", "fast", "--prompt", "a", "--max-tokens", 1, "--json")
    assert json.loads(generated.stdout)["model"] == str(endless)
    assert run("inspect", "fast").stdout.splitlines()[0] == str(endless)
    text = tmp_path / "text.txt"
    text.write_text("one two three")
    added = run("memory", "add", text, "-m", "fast")
    assert added.exit_code == 0, added.stderr
    refused = run("serve", "fast", "--port", 0, "--decoder", "plain", "--memory-limit", "100K")
    assert f"too little for '{endless.name}'" in refused.stderr


@pytest.mark.slow
def test_an_alias_overrides_a_directory_of_its_name(work: Path, endless: Path):
    run("config", "set", "alias.here", endless)
    (work / "here").mkdir()
    result = run("inspect", "here")
    assert result.stdout.splitlines()[0] == str(endless)
    assert "here: no config.json" in run("inspect", "./here").stderr


def test_convert_distinguishes_checkpoints(tmp_path: Path):
    """The errors name the files of each kind."""
    original = tmp_path / "original"
    original.mkdir()
    (original / "params.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    complaints = [run("convert", model).stderr for model in (original, other)]
    assert "config.json" not in complaints[0]
    assert "config.json" in complaints[1]
    both = run("convert", other, "--hf-path", other)
    assert both.exit_code == 1
    assert "--model and --hf-path are given together" in both.stderr
