"""``mlxspec inspect`` on the bundled model and on random ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.main import main
from mlxspec.errors import LoadError
from mlxspec.models import model as loading
from mlxspec.models import model_files
from tests.support.architectures import ARCHITECTURES
from tests.support.head_files import (
    original,
    random_weights,
    write,
    write_head,
    write_target,
)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[nn.Module], None]:
    """Makes every model name load this model."""

    def give(model: nn.Module) -> None:
        write(tmp_path, {}, {})
        monkeypatch.setattr(model_files, "find_directory", lambda *_, **__: tmp_path)
        monkeypatch.setattr(loading, "load", lambda *_, **__: (model, None))

    return give


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["inspect", *arguments])


@pytest.mark.slow
def test_the_demo_model_verifies_trees() -> None:
    result = inspect("demo", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["type"], report["capability"]) == ("mistral", "tree")
    assert (report["layers"], report["vocabulary"], report["context"]) == (6, 4096, 1024)
    assert report["parameters"] == 5475584
    assert report["joint"] == "joint"
    assert "the same result as alone" in report["joint_reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "gemma3",
            ["the latest 16 positions, 128 bytes each", "all positions, 128 bytes each", "joint: "],
        ),
        ("mamba2", ["2 × ArraysCache: state", "however long the context", "computed again"]),
        (
            "gpt2",
            ["one continuation", "branches at position 0", "64 tokens", "one at a time: a joint"],
        ),
        (
            "llama4",
            [
                "3 × ChunkedKVCache: the latest 16 positions",
                "takes no tree mask",
                "accepts only one sequence",
            ],
        ),
        ("deepseek_v32", ["2 × KVCache", "several continuations", "in chunks of any size"]),
        ("phi3small", ["one at a time: several rows", "prompts       in mlx-lm's chunks"]),
        ("plamo3", ["in chunks of any size; beyond 16 tokens, in mlx-lm's chunks"]),
        ("qwen3_next", ["3 × ArraysCache", "1 × KVCache"]),
    ],
)
def test_the_screen_says_what_a_model_caches_and_verifies(
    name: str, lines: list[str], given: Callable[[nn.Module], None]
) -> None:
    given(ARCHITECTURES[name].model())
    result = inspect("some/model")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("some/model\n")
    for line in lines:
        assert line in result.stdout
    assert len(result.stdout.splitlines()) < 20


@pytest.mark.slow
def test_a_quantised_model_has_fewer_bits_per_weight(given: Callable[[nn.Module], None]) -> None:
    model = ARCHITECTURES["llama3"].model()
    nn.quantize(model, 32, 4)
    given(model)
    report = json.loads(inspect("x", "--json").stdout)
    assert 4 < report["bits_per_weight"] < 8


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "Gemma 4 assistant",
            ["gemma4, 32 features, 64 tokens"],
        ),
        ("Qwen MTP", ["qwen3_5 or qwen3_next, 32 features"]),
        ("EAGLE-3", ["up to 8 tokens", "any architecture, 32"]),
        ("DFlash", ["up to 3 tokens", "64 tokens, 8 layers"]),
        ("DSpark", ["up to 4 tokens"]),
    ],
)
def test_a_head_shows_its_kind_and_the_target_it_needs(
    tmp_path: Path, name: str, lines: list[str]
) -> None:
    directory = str(write_head(tmp_path, name))
    result = inspect(directory)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{directory}\nhead        {name}, ")
    for line in lines:
        assert line in result.stdout
    assert "have no adapters" in inspect(directory, "--adapter-path", "x").stderr
    report = json.loads(inspect(directory, "--json").stdout)
    assert report["head"]["kind"] == name
    assert report["head"]["files"] == ["model.safetensors"]
    assert report["target"]["hidden_size"] == 32
    assert report["target"]["vocab_size"] == 64
    assert report["parameters"] == pytest.approx(report["head"]["bytes"] / 4, rel=0.02)


@pytest.mark.slow
def test_a_model_shows_the_head_that_it_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES["llama3"].model()
    monkeypatch.setattr(loading, "load", lambda *_, **__: (model, None))
    write_target(tmp_path, {})
    assert "head          none" in inspect(str(tmp_path)).stdout
    assert json.loads(inspect(str(tmp_path), "--json").stdout)["head"] is None
    weights = random_weights("Qwen MTP")
    size = sum(array.nbytes for array in weights.values())
    write_target(tmp_path, original(weights))
    assert f"head          Qwen MTP, {size / 1e3:.1f} kB" in inspect(str(tmp_path)).stdout
    report = json.loads(inspect(str(tmp_path), "--json").stdout)
    assert report["head"] == {"kind": "Qwen MTP", "files": ["model.safetensors"], "bytes": size}
    write_target(tmp_path, {})
    write_head(tmp_path / "head", "EAGLE-3")
    report = json.loads(inspect(str(tmp_path), "--json").stdout)
    assert report["head"]["files"] == ["head/model.safetensors"]


def test_a_pipe_gets_a_note_at_once_while_a_model_is_examined(
    given: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise LoadError("read so far")

    given(ARCHITECTURES["llama3"].model())
    monkeypatch.setattr(loading, "load", load)
    result = inspect("some/model", "--json")
    assert result.stderr == "Note: loading and examining some/model …\nError: read so far\n"
    assert result.stdout == ""


def test_a_head_of_an_unknown_kind_is_one_line(tmp_path: Path) -> None:
    result = inspect(str(write(tmp_path, {"model_type": "glm4_moe_lite_mtp"}, {})))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "glm4_moe_lite_mtp; supported are" in result.stderr


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = inspect("./nowhere")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "nowhere: no such directory" in result.stderr
