"""``load`` takes mlx-lm's arguments, with mlx-lm's meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import mlxspec
from mlxspec.errors import LoadError
from mlxspec.models.model_files import DEMO_DIRECTORY
from tests.support.adapters import write_adapters


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token": "[INST]"},
        {"eos_token": "<|endoftext|>", "trust_remote_code": True},  # as in mlx-lm's README
        {"chat_template": "{{ messages[0]['content'] }}!", "padding_side": "left"},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("sentencepiece", [False, True])
def test_the_tokenizer_s_settings_can_be_replaced(
    settings: dict, sentencepiece: bool, tmp_path: Path
) -> None:
    directory = str(DEMO_DIRECTORY)
    if sentencepiece:
        if "endoftext" in settings.get("eos_token", ""):
            pytest.skip("a token that the SentencePiece model lacks is refused")
        for path in DEMO_DIRECTORY.iterdir():
            if path.name != "tokenizer.json":
                (tmp_path / path.name).symlink_to(path)
        directory = str(tmp_path)
    _, theirs = mlx_lm.load(str(DEMO_DIRECTORY), tokenizer_config=settings, lazy=True)
    _, ours = mlxspec.load(directory, tokenizer_config=settings, lazy=True)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.eos_token == theirs.eos_token
    assert ours.padding_side == theirs.padding_side
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


def test_the_model_s_settings_can_be_replaced() -> None:
    changes = {"rope_theta": 5000.0}
    arguments: Any = None, changes, None, True, True  # lazy, and with the settings
    theirs, _, their_config = mlx_lm.load(str(DEMO_DIRECTORY), *arguments)
    theirs.set_dtype(mx.float32)
    ours, _, config = mlxspec.load(DEMO_DIRECTORY, model_config=changes, return_config=True)
    assert config == their_config == mlxspec.load(DEMO_DIRECTORY, *arguments)[2]
    tokens = mx.array([[5, 6, 7]])
    assert mx.allclose(ours(tokens), theirs(tokens), atol=1e-4).item()
    assert ours.args.rope_theta == 5000.0


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_applied(tmp_path: Path, dora: bool) -> None:
    directory = write_adapters(tmp_path / "adapters", dora=dora)
    theirs, _ = mlx_lm.load(str(DEMO_DIRECTORY), adapter_path=str(directory))
    theirs.set_dtype(mx.float32)
    ours, _ = mlxspec.load("demo", adapter_path=directory)
    plain, _ = mlxspec.load("demo")
    tokens = mx.array([[5, 6, 7]])
    assert mx.allclose(ours(tokens), theirs(tokens), atol=1e-3).item()
    assert not mx.allclose(ours(tokens), plain(tokens), atol=1e-3).item()


def test_adapters_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    directory = write_adapters(tmp_path / "adapters")
    file = str(directory / "adapters.safetensors")
    adapters = mx.load(file)
    assert isinstance(adapters, dict)
    mx.save_safetensors(file, {n: a for n, a in adapters.items() if not n.endswith("lora_b")})
    with pytest.raises(LoadError, match=r"do not fit the model \(the file has no .*\.lora_b\)"):
        mlxspec.load("demo", adapter_path=directory)


def test_adapters_that_are_not_there_are_named() -> None:
    with pytest.raises(LoadError, match=r"nowhere/adapter_config\.json: cannot be read"):
        mlxspec.load("demo", adapter_path="nowhere")


def test_code_of_a_repository_is_not_run_even_if_trusted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_file": "model.py"}')
    (tmp_path / "model.py").write_text("raise SystemExit('ran')")
    with pytest.raises(LoadError, match=r"load it with mlx_lm\.load"):
        mlxspec.load(tmp_path, trust_remote_code=True)
