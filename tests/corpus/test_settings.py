"""The settings of the memory: on or off, its directory, and files with arbitrary content."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.corpus import answer_index
from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.corpus.answers import (
    KeptAnswers,
    Settings,
    identify,
    kept_answers,
    load_settings,
    memory_directory,
    save_settings,
    settings_in_force,
)
from mlxspec.errors import FileError, OptionError
from tests.support.hostile import json_values, mutated
from tests.support.tokenizers import FIRST, SECOND


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path))
    return tmp_path / "memory"


def test_nothing_is_kept_unless_it_is_said(home: Path):
    settings = load_settings()
    assert settings == Settings()
    assert not settings.on
    assert not home.exists()


def test_settings_are_read_as_they_were_written(home: Path):
    for settings in (Settings(True), Settings(False, 1000), Settings(True, 1000), Settings()):
        save_settings(settings)
        assert load_settings() == settings
    assert (home / "settings.json").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


@given(st.one_of(json_values, st.fixed_dictionaries(
    {
        "on": st.booleans() | json_values,
        "max_tokens": st.integers() | json_values,
    }
)))  # fmt: skip
def test_whatever_settings_hold_is_read_or_refused_in_one_line(value: object):
    path = memory_directory() / "settings.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))
    refused = ""
    try:
        settings = load_settings()
    except FileError as error:
        refused = str(error)
    if refused:
        assert refused.startswith(f"{path}: cannot be read; remove it")
        assert "\n" not in refused
    else:
        assert isinstance(value, dict)
        assert settings.max_tokens == value["max_tokens"]


@given(mutated(b'{"on": true, "max_tokens": 50000000}\n'))
def test_damaged_settings_are_read_or_refused(data: bytes):
    path = memory_directory() / "settings.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    with suppress(FileError):
        load_settings()


def test_the_variable_overrides_the_settings(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    some = Settings(False, 1000)
    save_settings(some)
    for value, expected in (
        ("", some),
        ("on", Settings(True, 1000)),
        ("off", Settings()),
        (str(tmp_path / "new"), Settings(True)),
    ):
        monkeypatch.setenv("MLXSPEC_MEMORY", value)
        assert settings_in_force() == expected
        assert memory_directory() == (Path(value) if "/" in value else home)
    monkeypatch.setenv("MLXSPEC_MEMORY", "answers")
    with pytest.raises(OptionError, match="MLXSPEC_MEMORY is 'answers': set it to on, off, or a"):
        memory_directory()


def test_a_memory_is_closed_before_its_merging_ends(monkeypatch: pytest.MonkeyPatch):
    def endless(*_: object) -> Iterator[np.ndarray]:
        while True:
            time.sleep(0.05)
            yield np.zeros(1, np.int32)

    monkeypatch.setattr(answer_index, "LIVE_TOKENS", 8)
    monkeypatch.setattr(answer_index, "merged_order", endless)
    memory = AnswerIndex.kept_in(memory_directory(), FIRST)
    texts = [[number, *range(12)] for number in range(3)]
    for text in texts:
        memory.add(text)
    memory.close(patience=0.1)
    assert not memory._thread.is_alive()
    monkeypatch.undo()
    assert memory.kept
    assert memory.kept.directory
    again = AnswerIndex.kept_in(memory.kept.directory, FIRST)
    again.settle()
    for text in texts:
        assert text[3:] in [again.look_up(text[:3])[0][:10]]
    again.close()
    (kept,) = kept_answers(memory.kept.directory)
    assert [tokens.tolist() for _, tokens, *_ in kept.read()] == texts


def test_the_database_lists_its_tokenizers(home: Path):
    assert kept_answers(home) == []
    KeptAnswers(home, identify(SECOND), "owner/second")
    memory = AnswerIndex(kept=KeptAnswers(home, identify(FIRST), "owner/first"))
    memory.add([1, 2, 3])
    memory.close()
    one, other = kept_answers(home)
    assert (one.identity, one.model) == (identify(FIRST), "owner/first")
    assert (other.identity, other.model) == (identify(SECOND), "owner/second")
    assert one.count()["texts"] == 1
    assert other.count()["texts"] == 0
    assert other.count()["newest"] is None
    KeptAnswers(home, identify(FIRST))  # edited without knowing the model
    assert kept_answers(home)[0].model == "owner/first"
    KeptAnswers(home, identify(FIRST), "elsewhere/first")
    assert kept_answers(home)[0].model == "elsewhere/first"


def test_a_directory_that_is_made_for_answers_is_its_owners_alone(tmp_path: Path):
    umask = os.umask(0o022)
    try:
        kept = KeptAnswers(tmp_path / "made" / "here", identify(FIRST))
    finally:
        os.umask(umask)
    assert kept.directory
    assert kept.directory.stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in kept.directory.iterdir()} == {0o600}


def test_where_nothing_can_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path / "file"))
    with pytest.raises(FileError, match="cannot be used"):
        KeptAnswers(memory_directory(), identify(FIRST))
    with pytest.raises(FileError, match=r"settings\.json: cannot be written \(Not a directory\)"):
        save_settings(Settings(True))
    assert load_settings() == Settings()
