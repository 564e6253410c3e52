"""Unusual and damaged model directories."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mlxspec.errors import LoadError
from mlxspec.models.model import load
from mlxspec.models.model_files import local_path
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


def test_links_and_directories_among_the_files_are_as_good(model: Path) -> None:
    (model / "model.safetensors").rename(model / "blob")
    (model / "model.safetensors").symlink_to("blob")
    (model / "gone").symlink_to("nowhere")
    (model / "original").mkdir()
    load(model)


def test_a_name_that_is_not_utf8_is_an_error(model: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(model, tmp_path / os.fsdecode(b"m\xff"))
    refused(odd)


def test_an_unknown_user_s_home_is_an_ordinary_name() -> None:
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
def test_a_setting_of_a_wrong_type_is_an_error_when_the_model_is_loaded(
    model: Path, changes: dict[str, object]
) -> None:
    change_config(model, **changes)
    assert refused(model).startswith(f"{model}: ")
