"""Directories that are no ordinary models, however they came to be so."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlxspec.convert.conversion import convert
from mlxspec.errors import LoadError, MlxspecError
from mlxspec.models.model import load
from mlxspec.models.model_files import check_layers, local_path
from mlxspec.models.tokenizer import load_tokenizer_of
from tests.support.scripted_model import write_scripted_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_scripted_model(tmp_path / "model", ("one", " two"))


def refused(model: Path | str) -> str:
    with pytest.raises(LoadError) as error:
        load(model)
    assert "\n" not in str(error.value)
    return str(error.value)


FILES = ["model-2.safetensors", "generation_config.json", "hf_quant_config.json", "vocab.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_among_the_files_is_not_waited_for(model: Path, tmp_path: Path, name: str) -> None:
    os.mkfifo(model / name)
    told = f"{model / name}: not a regular file"
    assert told in refused(model)
    for read in (load_tokenizer_of, lambda m: convert(hf_path=m, mlx_path=tmp_path / "out")):
        with pytest.raises(LoadError) as error:
            read(model)
        assert told in str(error.value)


def test_a_pipe_among_the_adapters_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    os.mkfifo(tmp_path / "adapters" / "adapter_config.json")
    with pytest.raises(LoadError, match=r"adapter_config\.json: not a regular file"):
        load(model, adapter_path=tmp_path / "adapters")


def test_links_and_directories_among_the_files_are_as_good(model: Path) -> None:
    (model / "model.safetensors").rename(model / "blob")
    (model / "model.safetensors").symlink_to("blob")
    (model / "gone").symlink_to("nowhere")
    (model / "original").mkdir()
    load(model)


@pytest.mark.parametrize("name", ["[red]x", "a*b?", "m[/x]"])
def test_a_name_that_looks_like_a_pattern_is_a_name(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    odd = shutil.copytree(model, tmp_path / name)
    tokens = mx.array([[1, 2]])
    expected = load(model)[0](tokens)
    assert mx.array_equal(load(odd)[0](tokens), expected)
    assert mx.array_equal(load(odd, lazy=True)[0](tokens), expected)
    convert(hf_path=odd, mlx_path=tmp_path / "out", dtype="float32")
    assert mx.array_equal(load(tmp_path / "out")[0](tokens), expected)


def test_a_name_that_is_not_utf8_is_told(model: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(model, tmp_path / os.fsdecode(b"m\xff"))
    assert "not UTF-8" in refused(odd)
    with pytest.raises(MlxspecError, match="not UTF-8"):
        convert(hf_path=model, mlx_path=tmp_path / os.fsdecode(b"out\xff"))
    assert sorted(tmp_path.iterdir()) == sorted([model, odd])


def test_the_home_of_nobody_is_a_name_like_others() -> None:
    assert local_path("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")
    assert "no such directory" in refused("~nobody-of-that-name/x")
    with pytest.raises(LoadError, match="no such directory"):
        load_tokenizer_of("~nobody-of-that-name/x")


def change_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        *({"rope_theta": value} for value in (None, "x", [1], {})),
        *({"max_position_embeddings": value} for value in ("x", [1], float("inf"))),
        *({"eos_token_id": value} for value in ("x", [None], {"a": 1}, [[1]], 1.5)),
    ],
    ids=str,
)
def test_a_setting_of_a_wrong_type_is_told_when_the_model_is_loaded(
    model: Path, changes: dict[str, object]
) -> None:
    change_config(model, **changes)
    assert refused(model).startswith(f"{model}: ")


def test_only_counts_of_layers_are_compared_with_the_weights() -> None:
    gemma = {"text_config": {"vocab_size_per_layer_input": 262144, "num_hidden_layers": 35}}
    check_layers(gemma, tensors=1000)
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_nextn_layers"):
        with pytest.raises(ValueError, match=name):
            check_layers({"text_config": {name: 262144}}, tensors=1000)


def test_layers_without_weights_are_not_built(model: Path) -> None:
    change_config(model, num_hidden_layers=10**7)
    assert "num_hidden_layers is 10000000" in refused(model)
    with pytest.raises(MlxspecError, match="num_hidden_layers is 10000000"):
        convert(hf_path=model, mlx_path=model.parent / "out")
