"""``mlxspec completion`` and the completions that shells get."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from mlxspec.bench.measure import BACKENDS
from mlxspec.cli.main import main


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias, and a Hub cache with a model, a GGUF file and an invalid name."""
    monkeypatch.setenv("MLXSPEC_CONFIG_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text("[alias]\nfast = 'owner/model'\n")
    for name, file in (
        ("models--owner--model-4bit", "model.safetensors"),
        ("models--owner--other", "other.gguf"),
        ("models--owner--\x1b[2J", "model.safetensors"),
        ("datasets--owner--data", "data.safetensors"),
    ):
        snapshot = tmp_path / "hub" / name / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (snapshot / file).touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def completed(*words: str) -> list[str]:
    """Return completions of the last word, without directories and files."""
    found = BashComplete(main, {}, "mlxspec", "_MLXSPEC_COMPLETE").get_completions(
        [*words[:-1]], words[-1]
    )
    return [one.value for one in found if one.type == "plain"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("gen",), ["generate"]),
        (("generate", "--dec"), ["--decoder"]),
        (("generate", "--decoder", "p"), ["prompt-lookup", "plain"]),
        (("generate", "--model", ""), ["fast", "demo", "owner/model-4bit"]),
        (("explain", "-m", "own"), ["owner/model-4bit"]),
        (("bench", "demo", "--head", "own"), ["owner/model-4bit"]),
        (("chat", "fa"), ["fast"]),
        (("serve", "demo", "fa"), ["fast"]),
        (("convert", "fa"), ["fast"]),
        (("replay", "--tokenizer", "fa"), ["fast"]),
        (("replay", "--decoder", "auto,pr"), ["auto,prompt-lookup"]),
        (("bench", "--decoder", ""), list(BACKENDS)),
        (("bench", "--decoder", "plain,p"), ["plain,prompt-lookup"]),
        (("config", "set", "m"), ["model", "max-tokens"]),
        (("config", "set", "model", "fa"), ["fast"]),
        (("config", "unset", "a"), ["alias."]),
        (("completion", ""), ["bash", "zsh", "fish"]),
    ],
)
def test_what_completes_a_command_line(words: tuple[str, ...], names: list[str]):
    assert completed(*words) == names


def test_a_broken_configuration_stops_no_completion(tmp_path: Path):
    (tmp_path / "config.toml").write_text("[")
    assert completed("generate", "-m", "d") == ["demo"]
    assert completed("inspect", "demo", "--js") == ["--json"]
    assert completed("config", "unset", "te") == ["temp"]


def test_directories_are_left_to_the_shell():
    found = BashComplete(main, {}, "mlxspec", "_MLXSPEC_COMPLETE").get_completions(["chat"], "")
    assert [one.value for one in found if one.type == "dir"] == ["./"]  # never empty, for zsh


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one(shell: str):
    script = CliRunner().invoke(main, ["completion", shell], prog_name="mlxspec").stdout
    assert "_MLXSPEC_COMPLETE" in script
    assert shell != "zsh" or script.startswith("#compdef mlxspec\n")
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=30)


def test_in_bash_a_model_is_completed_without_mlx(tmp_path: Path):
    program = tmp_path / "mlxspec"
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.modules.update(mlx=None, "
        'mlx_lm=None, transformers=None); sys.argv[0] = "mlxspec"; '
        'from mlxspec.__main__ import main; main()\' "$@"\n'
    )
    program.chmod(0o700)
    script = CliRunner().invoke(main, ["completion", "bash"], prog_name="mlxspec").stdout
    asked = (
        "compopt() { :; }\n"  # needs a line that is being edited, and there is none
        "COMP_WORDS=(mlxspec generate -m own) COMP_CWORD=3\n"
        '_mlxspec_completion mlxspec; echo "${COMPREPLY[@]}"\n'
    )
    result = subprocess.run(
        ["bash"],
        input=script + asked,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "owner/model-4bit\n"
