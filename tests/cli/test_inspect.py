"""``mlxspec inspect`` on the bundled model and on random ones."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.main import main
from mlxspec.models import model as loading
from tests.support.architectures import ARCHITECTURES


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["inspect", *arguments])


@pytest.mark.slow
def test_the_demo_model_verifies_trees() -> None:
    result = inspect("demo", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["type"], report["tier"]) == ("mistral", "tree")
    assert (report["layers"], report["vocabulary"], report["context"]) == (6, 4096, 1024)
    assert report["parameters"] == 5475584
    assert report["joint"] == "joint"
    assert report["chunk_end"] is None
    assert "what it gets alone" in report["joint_reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "gemma3",
            ["the latest 16 positions, 2.0 kB at most", "all positions, 128 bytes each", "joint: "],
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
                "takes the rows of one",
            ],
        ),
        ("deepseek_v32", ["2 × KVCache", "several continuations", "in any chunks"]),
        ("plamo3", ["beyond 16 tokens in mlx-lm's chunks and never shared: rows"]),
        ("phi3small", ["one at a time: several rows", "prompts       in mlx-lm's chunks"]),
        ("qwen3_next", ["3 × ArraysCache", "1 × KVCache"]),
    ],
)
def test_the_screen_says_what_a_model_caches_and_verifies(
    name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ARCHITECTURES[name].model()
    monkeypatch.setattr(loading, "load", lambda *_, **__: (model, None))
    result = inspect("some/model")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("some/model\n")
    for line in lines:
        assert line in result.stdout
    assert len(result.stdout.splitlines()) < 20


def test_a_quantised_models_layers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.nn as nn

    model = ARCHITECTURES["llama3"].model()
    nn.quantize(model, 32, 4)
    monkeypatch.setattr(loading, "load", lambda *_, **__: (model, None))
    report = json.loads(inspect("x", "--json").stdout)
    (kind,) = report["quantisation"]
    assert (kind["bits"], kind["group_size"]) == (4, 32)
    assert kind["layers"] > 7


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = inspect("./nowhere")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "nowhere: no such directory" in result.stderr
