"""Information from a model's files without loading them."""

import json
import os
import struct
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.on_machine import (
    cached_repositories,
    lm_studio_folder,
    model_files,
    models_in,
)
from tests.support.head_files import EAGLE_3

ON_CPU = mx.default_device().type == mx.cpu  # which converts half precision to float32


def weights(path: Path, **types: mx.Dtype) -> None:
    """Write a weights file with a tensor of 100 numbers for each name."""
    mx.save_safetensors(str(path), {name: mx.zeros((100,), of) for name, of in types.items()})


def settings(directory: Path, **config: object) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def test_the_demo_model_can_be_run():
    found = model_files(DEMO_DIRECTORY)
    assert (found.trouble, found.architecture, found.weights) == ("", "mistral", "bfloat16")
    arrays = mx.load(str(DEMO_DIRECTORY / "model.safetensors"))
    assert found.memory_bytes == (1 + ON_CPU) * sum(one.nbytes for one in arrays.values())
    assert found.nbytes == sum(file.stat().st_size for file in DEMO_DIRECTORY.iterdir())


@pytest.mark.parametrize(
    ("config", "types", "expected"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, {"a": mx.uint32}, "4 bits"),
        ({"quantization": "odd"}, {"a": mx.uint8}, "uint8"),
        ({}, {"a": mx.float16, "b": mx.float16, "c": mx.float32}, "float32"),  # the most bytes
        ({}, {"a": mx.float16, "b": mx.float16, "c": mx.float16, "d": mx.float32}, "float16"),
    ],
)
def test_how_weights_are_written(config: dict, types: dict, expected: str, tmp_path: Path):
    settings(tmp_path, model_type="llama", **config)
    weights(tmp_path / "model.safetensors", **types)
    found = model_files(tmp_path)
    assert (found.weights, found.trouble) == (expected, "")
    sizes = {mx.float16: 200, mx.float32: 400, mx.uint32: 400, mx.uint8: 100}
    widened = ON_CPU * 200 * [*types.values()].count(mx.float16)
    assert found.memory_bytes == sum(sizes[of] for of in types.values()) + widened


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (None, ["a.gguf"], "and not GGUF"),
        ({"model_type": "llama"}, ["a.gguf"], "and not GGUF"),
        (None, ["params.json", "consolidated.00.pth"], "`mlxspec convert`"),
        ({"model_type": "llama"}, ["pytorch_model.bin"], "in safetensors"),
        ({"model_type": "llama"}, [], "no model*.safetensors"),
        (None, ["tokenizer.json"], "no config.json"),
        (None, ["vae.safetensors"], "no config.json"),
        ({"model_type": "bert"}, ["model.safetensors"], "does not know its architecture, 'bert'"),
        ({}, ["model.safetensors"], "does not know its architecture, None"),
        (EAGLE_3, ["model.safetensors"], "a trained head, not a model"),
        ({"model_type": "x", "model_file": "x.py"}, ["model.safetensors"], "Python code"),
    ],
)
def test_what_cannot_be_run_as_it_is(
    config: dict | None, files: list[str], expected: str, tmp_path: Path
):
    if config is not None:
        settings(tmp_path, **config)
    for name in files:
        if name == "model.safetensors":
            weights(tmp_path / name, a=mx.float16)
        else:
            (tmp_path / name).write_bytes(b"x" * 10)
    assert expected in model_files(tmp_path).trouble


def test_an_architecture_that_mlx_lm_has_under_another_name_is_one(tmp_path: Path):
    settings(tmp_path, model_type="xverse")
    weights(tmp_path / "model.safetensors", a=mx.float16)
    assert model_files(tmp_path).trouble == ""


def test_parts_that_are_missing_and_files_that_are_damaged(tmp_path: Path):
    settings(tmp_path, model_type="llama")
    first = tmp_path / "model-00001-of-00002.safetensors"
    weights(first, a=mx.float16)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": "model-2.safetensors"}}))
    assert model_files(tmp_path).trouble.startswith(
        "the weights file model-2.safetensors is missing"
    )
    index.write_text("[]")
    assert "index.json: not a JSON object" in model_files(tmp_path).trouble
    index.unlink()
    first.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert "truncated or damaged" in model_files(tmp_path).trouble
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not valid JSON" in model_files(tmp_path).trouble


def test_of_a_repository_the_main_revision_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert [*cached_repositories()] == []
    tmp_path = tmp_path / "hub"
    for name, revisions in {"owner/b": ("1" * 40, "2" * 40), "Owner/A": ("3" * 40,)}.items():
        repository = tmp_path / f"models--{name.replace('/', '--')}"
        (repository / "blobs").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(revisions[0])
        for number, revision in enumerate(revisions):
            blob = repository / "blobs" / str(number)
            blob.write_text("{}")
            os.utime(blob, (number, number))  # the other revision is newer
            (repository / "snapshots" / revision).mkdir(parents=True)
            (repository / "snapshots" / revision / "config.json").symlink_to(blob)
    (tmp_path / "datasets--owner--data" / "snapshots").mkdir(parents=True)
    found = [*cached_repositories()]
    assert [(name, path.name) for name, path in found] == [
        ("Owner/A", "3" * 40),
        ("owner/b", "1" * 40),
    ]


def test_models_of_a_folder_are_found_at_two_depths(tmp_path: Path):
    for place in ("one", "publisher/two", "publisher/three", "too/deep/four"):
        (tmp_path / place).mkdir(parents=True)
        settings(tmp_path / place)
    (tmp_path / "publisher" / "gguf").mkdir()
    (tmp_path / "file").touch()
    found = dict(models_in(tmp_path))
    assert list(found) == ["one", "publisher/three", "publisher/two"]
    assert found["publisher/two"] == tmp_path / "publisher" / "two"
    assert list(models_in(tmp_path / "one")) == [("one", tmp_path / "one")]
    assert list(models_in(tmp_path / "missing")) == []


def test_lm_studio_s_folder_is_the_chosen_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    usual, chosen = tmp_path / ".lmstudio" / "models", tmp_path / "chosen"
    assert lm_studio_folder() == usual
    usual.mkdir(parents=True)
    for text, folder in (
        (json.dumps({"downloadsFolder": str(chosen)}), chosen),
        (json.dumps({"downloadsFolder": 3}), usual),
        ("{", usual),
    ):
        (usual.parent / "settings.json").write_text(text)
        assert lm_studio_folder() == folder


def test_the_weights_of_a_head_beside_a_model_count(tmp_path: Path):
    settings(tmp_path, model_type="llama")
    weights(tmp_path / "model.safetensors", a=mx.float32)
    (tmp_path / "head").mkdir()
    weights(tmp_path / "head" / "model.safetensors", a=mx.float32)
    size = (tmp_path / "head" / "model.safetensors").stat().st_size
    assert model_files(tmp_path).memory_bytes == 400 + size
