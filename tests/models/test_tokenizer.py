"""Tokenizers from directories, files and repositories, without running a repository's code."""

import builtins
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from sentencepiece import SentencePieceProcessor

from mlxspec.errors import LoadError
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.models.sentencepiece_tokenizer import build_tokenizer
from mlxspec.models.tokenizer import (
    ByteDetokenizer,
    detokenizer_of,
    has_chat_template,
    load_tokenizer,
    load_tokenizer_of,
)
from tests.support.local_hub import LocalHub, serve

MODEL = DEMO_DIRECTORY / "tokenizer.model"
SIZE = 4096
TEXT = "  two  spaces\n\t[x]"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with only a SentencePiece model."""
    shutil.copyfile(MODEL, tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def sentencepiece_ids(text: str) -> list[int]:
    return [1, *SentencePieceProcessor(model_file=str(MODEL)).encode(text)]


def write_json(path: Path, **content: object) -> None:
    path.write_text(json.dumps(content))


def test_a_sentencepiece_model_alone_gives_its_own_ids(directory: Path) -> None:
    tokenizer = load_tokenizer(directory, eos_token_ids=[2, 5])
    assert tokenizer.encode(TEXT) == sentencepiece_ids(TEXT)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.eos_token_ids == {2, 5}
    assert tokenizer.has_chat_template  # the one of its [INST]
    assert isinstance(detokenizer_of(tokenizer), ByteDetokenizer)
    assert isinstance(tokenizer.detokenizer, SPMStreamingDetokenizer)  # mlx-lm's


def test_settings_beside_a_sentencepiece_model_are_kept(directory: Path) -> None:
    write_json(
        directory / "tokenizer_config.json",
        tokenizer_class="LlamaTokenizer",
        bos_token={"__type": "AddedToken", "content": "<s>", "normalized": False},
        eos_token="<|end|>",
        chat_template="{{ bos_token }}{{ messages[0]['content'] }}<|end|>",
        added_tokens_decoder={
            "1": {"content": "<s>", "special": True},
            str(SIZE): {"content": "<|end|>", "special": True},
            str(SIZE + 1): {"content": "<|tool|>", "special": False},
        },
    )
    tokenizer = load_tokenizer(directory, eos_token_ids=2)
    assert tokenizer.encode(TEXT) == sentencepiece_ids(TEXT)
    assert tokenizer.eos_token_ids == {2, SIZE}
    message = {"role": "user", "content": "two  spaces"}
    expected = [*sentencepiece_ids("two  spaces"), SIZE]
    assert tokenizer.apply_chat_template([message]) == expected
    (directory / "chat_template.jinja").write_text("{{ bos_token }}hello")
    tokenizer = load_tokenizer(directory, None)
    assert tokenizer.apply_chat_template([message]) == sentencepiece_ids("hello")


@pytest.mark.parametrize("with_own", [False, True])
def test_a_template_in_a_json_file_counts_if_no_newer_file_has_one(
    directory: Path, with_own: bool
) -> None:
    if with_own:
        build_tokenizer(MODEL)[0].save(str(directory / "tokenizer.json"))
    message = {"role": "user", "content": "hi"}

    def said() -> str:
        assert has_chat_template(directory)
        tokenizer = load_tokenizer(directory, None)
        assert tokenizer.has_chat_template
        return str(tokenizer.apply_chat_template([message], tokenize=False))

    write_json(directory / "chat_template.json", chat_template="oldest {{ messages[0].content }}")
    assert said() == "oldest hi"
    write_json(directory / "tokenizer_config.json", chat_template="older", pad_token="</s>")
    assert said() == "older"
    (directory / "chat_template.jinja").write_text("newest")
    assert said() == "newest"
    own = load_tokenizer(directory, None, {"chat_template": "own"})
    assert own.apply_chat_template([message], tokenize=False) == "own"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"added_tokens_decoder": {str(SIZE + 5): {"content": "<x>"}}}, str(SIZE + 5)),
        ({"added_tokens_decoder": {"5": {"content": "<x>"}}}, "the id 5"),
        ({"eos_token": 5}, "eos_token"),
        ({"added_tokens_decoder": {"x": {}}}, "tokenizer"),
        ({"added_tokens_decoder": {str(SIZE): {}}}, "tokenizer"),
        ({"added_tokens_decoder": [1]}, "tokenizer"),
        ({"added_tokens_decoder": {"-1": {"content": "<x>"}}}, "the id -1"),
        ({"added_tokens_decoder": {"9" * 30: {"content": "<x>"}}}, "9" * 30),
        ({"eos_token": "\ud800"}, "tokenizer"),
        ({"bos_token": {"content": "\ud800"}}, "tokenizer"),
        ({"chat_template": [1]}, "tokenizer"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_named(
    directory: Path, settings: dict, named: str
) -> None:
    write_json(directory / "tokenizer_config.json", **settings)
    with pytest.raises(LoadError, match=named):
        load_tokenizer(directory, None)


@pytest.mark.parametrize("with_own", [False, True])
def test_a_template_that_is_not_utf8_is_named(directory: Path, with_own: bool) -> None:
    if with_own:
        build_tokenizer(MODEL)[0].save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(LoadError, match="utf-8"):
        load_tokenizer(directory, None)


@pytest.mark.parametrize("content", ["{", "[" * 200_000])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", "chat_template.json"])
def test_damaged_settings_are_named(directory: Path, file: str, content: str) -> None:
    (directory / file).write_text(content)
    with pytest.raises(LoadError, match=re.escape(str(directory))) as error:
        load_tokenizer(directory, None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken", "tiktoken.model"])
def test_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(LoadError, match=r"Tekken's and tiktoken's files .*; use a version"):
        load_tokenizer(tmp_path, None)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"{re.escape(str(tmp_path))}: no tokenizer.json"):
        load_tokenizer(tmp_path, None)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which every file refers to ``evil.py``, which would leave a trace."""

    def ask(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr(builtins, "input", ask)
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Evil:\n    pass\n"
    )
    names = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    write_json(tmp_path / "config.json", model_type="evil", auto_map=names)
    write_json(
        tmp_path / "tokenizer_config.json",
        **{**build_tokenizer(MODEL)[1], "tokenizer_class": "Evil", "auto_map": names},
    )
    build_tokenizer(MODEL)[0].save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_that_needs_code_is_refused_without_a_question(hostile: Path) -> None:
    with pytest.raises(LoadError, match="needs Python code from its repository"):
        load_tokenizer(hostile, None)
    assert not (hostile / "marker").exists()


def test_code_beside_a_known_tokenizer_is_not_run(hostile: Path) -> None:
    names = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    write_json(
        hostile / "tokenizer_config.json", **{**build_tokenizer(MODEL)[1], "auto_map": names}
    )
    write_json(hostile / "config.json", model_type="llama", auto_map=names)
    tokenizer = load_tokenizer(hostile, None)
    assert tokenizer.encode(TEXT) == sentencepiece_ids(TEXT)
    assert not (hostile / "marker").exists()


SENTENCE = "Tokens of  a text,\n\tas SentencePiece has them."


def reference(path: Path) -> list[int]:
    return SentencePieceProcessor(model_file=str(path)).encode(SENTENCE)


@pytest.mark.slow
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
        assert tokenizer.encode(SENTENCE, add_special_tokens=False) == expected
        assert Path(tokenizer.name_or_path).name in {"demo_model", "only"}


@pytest.mark.slow
def test_of_a_repository_the_weights_are_not_fetched(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(DEMO_DIRECTORY / name, repository / name)
    (repository / "model.safetensors").write_text("weights")
    code = (
        "from mlxspec.models.tokenizer import load_tokenizer_of\n"
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


def test_an_invalid_tokenizer_is_named(tmp_path: Path) -> None:
    for name, problem in (
        ("nowhere", "no such directory"),
        ("tokenizer.model", "not a SentencePiece model"),
        ("tokenizer.json", "the tokenizer cannot be loaded"),
    ):
        if name != "nowhere":
            (tmp_path / name).write_text("{}")
        with pytest.raises(LoadError, match=problem) as caught:
            load_tokenizer_of(tmp_path / name)
        assert str(tmp_path) in str(caught.value)
