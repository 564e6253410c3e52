"""A tokenizer from every place that a user may name, with the ids of its reference."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from mlxspec.errors import LoadError
from mlxspec.loading.model import DEMO_DIRECTORY
from mlxspec.loading.tokenizer import load_tokenizer_of
from tests.support.local_hub import LocalHub, serve

TEXT = "Tokens of  a text,\n\tas SentencePiece has them."


def reference(path: Path) -> list[int]:
    return SentencePieceProcessor(model_file=str(path)).encode(TEXT)


def test_every_form_of_a_tokenizer_gives_sentencepieces_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(DEMO_DIRECTORY / "tokenizer.model")
    (tmp_path / "only").mkdir()
    shutil.copyfile(DEMO_DIRECTORY / "tokenizer.model", tmp_path / "only" / "tokenizer.model")
    monkeypatch.chdir(tmp_path)
    for source in (
        "demo",
        DEMO_DIRECTORY,
        DEMO_DIRECTORY / "tokenizer.json",
        DEMO_DIRECTORY / "tokenizer.model",
        "only",
        "only/tokenizer.model",
    ):
        tokenizer = load_tokenizer_of(source)
        assert tokenizer.encode(TEXT, add_special_tokens=False) == expected
        assert Path(tokenizer.name_or_path).name in {"demo_model", "only"}


def test_sentencepieces_model_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model.v1"
    shutil.copyfile(DEMO_DIRECTORY / "tokenizer.model", path)
    tokenizer = load_tokenizer_of(path)
    assert tokenizer.encode(TEXT, add_special_tokens=False) == reference(path)
    assert tokenizer.name_or_path == str(path)


def test_of_a_repository_the_weights_are_not_fetched(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(DEMO_DIRECTORY / name, repository / name)
    (repository / "model.safetensors").write_text("weights")
    code = (
        "from mlxspec.loading.tokenizer import load_tokenizer_of\n"
        "print(load_tokenizer_of('someone/tiny').name_or_path)"
    )
    with serve(LocalHub({"someone/tiny": repository})) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
        environment |= {"NO_PROXY": "127.0.0.1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
    assert "models--someone--tiny" in done.stdout
    assert hub.files_sent() == {"tokenizer.json", "tokenizer_config.json", "config.json"}


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_text("nothing")
    for source, problem in (
        (tmp_path / "nowhere", "no such file or directory"),
        (tmp_path / "tokenizer.json", "no tokenizer of Hugging Face's"),
        (tmp_path / "tokenizer.model", "no SentencePiece model"),
    ):
        with pytest.raises(LoadError, match=problem) as caught:
            load_tokenizer_of(source)
        assert str(caught.value).startswith(f"{source}: ")
