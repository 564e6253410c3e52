"""Models of other programs are refused with one line that says what to use instead."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from mlxspec.convert.conversion import convert
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
    remedies = MLX_MODELS, "`mlxspec convert`", "not GGUF (gguf2mlx converts it)"
    return all(remedy in message for remedy in remedies)


@pytest.mark.parametrize(
    "name", ["llama3.1:8b", "mistral", "mistral.Q4_K_M.gguf", "~/phi.gguf", "./no/such/place"]
)
def test_a_name_that_may_be_another_program_s(name: str) -> None:
    message = refused(name)
    assert "no such directory" in message
    assert names_models_for_mlx(message)


@pytest.mark.parametrize("name", ["model.gguf", "sha256-0a1b"])
def test_a_gguf_file_is_named_with_its_converter(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"GGUF\x03\0\0\0")
    conversion = partial(convert, hf_path=file, mlx_path=tmp_path / "new")
    for use in (partial(load, file), partial(load_tokenizer_of, file), conversion):
        with pytest.raises(LoadError) as caught:
            use()
        assert str(caught.value).startswith(f"{file}: a GGUF file; convert it")
        assert "pip install gguf2mlx" in str(caught.value)
    assert [*tmp_path.iterdir()] == [file]


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    message = refused(tmp_path / "model.bin")
    assert "a file, not a model's directory" in message
    assert names_models_for_mlx(message)


@pytest.mark.parametrize("wrong", ["mistal", "Mistral", "mistral-", "mixtral"])
def test_a_directory_of_a_similar_name_is_suggested(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "mistral").mkdir()
    (tmp_path / "mistral.txt").touch()
    assert refused(tmp_path / wrong).endswith(f"; did you mean {tmp_path / 'mistral'}?")
    assert "did you mean" not in refused(tmp_path / "gemma")


def test_a_similar_directory_is_suggested_beside_the_hub_s_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, revision: str | None, *, weights: object) -> Path:
        raise LoadError(f"{name}: no such repository")

    monkeypatch.setattr(model_files, "download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mistral").mkdir(parents=True)
    hint = "; or did you mean the directory models/mistral?"
    assert refused("models/mistrl") == f"models/mistrl: no such repository{hint}"
    assert refused("models/gemma") == "models/gemma: no such repository"


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
