"""Models of other programs: each is refused in one line that says what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxspec.errors import LoadError
from mlxspec.models import model_files
from mlxspec.models.model import load
from mlxspec.models.model_files import given_name, hub_repository
from mlxspec.models.tokenizer import load_tokenizer_of


def refused(name: str | Path) -> str:
    with pytest.raises(LoadError) as caught:
        load(name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{name}: ")
    return message


MLX_MODELS = "https://huggingface.co/mlx-community/models"


def names_models_for_mlx(message: str) -> bool:
    return MLX_MODELS in message and "`mlxspec convert`" in message and "not GGUF" in message


@pytest.mark.parametrize(
    "name", ["llama3.1:8b", "mistral", "mistral.Q4_K_M.gguf", "~/phi.gguf", "./no/such/place"]
)
def test_a_name_that_may_be_another_program_s(name: str) -> None:
    message = refused(name)
    assert "no such directory" in message
    assert names_models_for_mlx(message)


@pytest.mark.parametrize("name", ["model.gguf", "sha256-0a1b"])
def test_a_file_is_no_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF\x03\0\0\0")
    assert names_models_for_mlx(refused(tmp_path / name))
    with pytest.raises(LoadError, match="GGUF"):
        load_tokenizer_of(tmp_path / name)


@pytest.mark.parametrize("config", [True, False])
def test_a_directory_of_other_weights(tmp_path: Path, config: bool) -> None:
    (tmp_path / "mistral.Q8_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    if config:
        (tmp_path / "config.json").write_text("{}")
    message = refused(tmp_path)
    assert ("no model*.safetensors" if config else "no config.json") in message
    assert names_models_for_mlx(message)


@pytest.mark.parametrize(
    ("address", "repository", "revision"),
    [
        ("https://huggingface.co/owner/name", "owner/name", None),
        ("https://huggingface.co/owner/name-4bit/?library=mlx#top", "owner/name-4bit", None),
        ("huggingface.co/owner/name/tree/main", "owner/name", "main"),
        ("https://hf.co/owner/name/blob/v1.0/config.json", "owner/name", "v1.0"),
    ],
)
def test_the_page_of_a_repository_stands_for_it(
    address: str, repository: str, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None = None, *, weights: object = ()) -> Path:
        asked.append((name, revision))
        raise LoadError(name)

    monkeypatch.setattr(model_files, "download", download)
    for use in (load, load_tokenizer_of):
        with pytest.raises(LoadError):
            use(address)
    assert asked == [(repository, revision)] * 2
    assert given_name(address) == repository


@pytest.mark.parametrize(
    "address",
    [
        "https://example.com/owner/name",
        "https://huggingface.co/owner",
        "https://huggingface.co/datasets/owner/name",
        "https://ollama.com/library/llama3",
    ],
)
def test_another_address_is_no_model(address: str) -> None:
    assert hub_repository(address) == (address, None)
    assert "the name of a Hub repository (owner/name)" in refused(address)
