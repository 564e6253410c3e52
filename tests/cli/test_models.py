"""``mlxspec models``: the models on this machine."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result

from mlxspec.engine import machine
from mlxspec.models import on_machine
from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support import command_line


def run(*arguments: object) -> Result:
    result = command_line.run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture(autouse=True)
def cache(nothing_set: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """An empty Hub cache, without settings, known models or a home directory."""
    repositories: dict[str, Path] = {}
    monkeypatch.setenv("HOME", str(nothing_set))
    monkeypatch.setattr(on_machine, "cached_repositories", lambda: iter(repositories.items()))
    return repositories


def listed() -> dict[str, dict]:
    return {one["name"]: one for one in json.loads(run("models", "--json").stdout)["models"]}


def test_without_other_models_the_next_step_is_suggested():
    shown = run("models").stdout
    assert "demo" in shown
    assert "mlxspec chat mlx-community/" in shown


def test_lm_studios_models_are_named_by_their_directories(endless: Path, nothing_set: Path) -> None:
    model = nothing_set / ".lmstudio" / "models" / "publisher" / "model"
    shutil.copytree(endless, model)
    assert listed()[str(model)]["usable"]


def test_what_is_shown_of_a_model(cache: dict[str, Path], endless: Path, tmp_path: Path):
    cache["owner/model"] = DEMO_DIRECTORY
    broken = cache["owner/other-GGUF"] = tmp_path / "gguf"
    broken.mkdir()
    (broken / "model.gguf").write_bytes(b"x")
    run("config", "set", "alias.fast", "owner/model")
    run("config", "set", "alias.mine", endless)
    run("config", "set", "model", "fast")
    models = listed()
    assert list(models) == ["owner/model", "owner/other-GGUF", str(endless), "demo"]
    first = models["owner/model"]
    assert (first["default"], first["aliases"], first["usable"]) == (True, ["fast"], True)
    assert (first["weights"], first["fits"]) == ("bfloat16", True)
    assert models[str(endless)]["aliases"] == ["mine"]
    other = models["owner/other-GGUF"]
    assert (other["usable"], other["fits"], other["memory_bytes"]) == (False, False, None)
    assert "GGUF" in other["reason"]

    shown = run("models").stdout
    table, _, others = shown.partition("the default model is")
    assert "owner/model" in table
    assert "GGUF" not in table
    assert "owner/other-GGUF, 1 byte, cannot be run: no config.json; use a model for MLX" in others
    assert "mlxspec chat" not in shown


def test_the_model_of_the_working_directory_is_listed_once(cache: dict[str, Path], endless: Path):
    Path("mlx_model").symlink_to(endless)
    assert list(listed()) == ["mlx_model", "demo"]
    assert listed()["mlx_model"]["default"]
    cache["owner/same"] = endless
    assert list(listed()) == ["owner/same", "demo"]


def test_a_model_fits_if_a_tenth_more_than_its_weights_is_there(monkeypatch: pytest.MonkeyPatch):
    needed = listed()["demo"]["memory_bytes"]
    demo = on_machine.model_files(DEMO_DIRECTORY)
    assert needed == demo.memory_bytes
    fits = []
    for memory in (needed * 1.09, needed * 1.11):
        monkeypatch.setattr(machine, "whole_memory", lambda memory=memory: int(memory))
        fits.append(listed()["demo"]["fits"])
    assert fits == [False, True]


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_it_fits_the_terminal(columns: int, cache: dict[str, Path], monkeypatch):
    cache["mlx-community/Mistral-7B-Instruct-v0.3-4bit"] = DEMO_DIRECTORY
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("models").stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert ("mlx-community/Mistral-7B-Instruct-v0.3-4bit" in shown) == (columns > 40)
