"""Model directories for the command line, made once."""

from pathlib import Path

import pytest

from tests.support.demo import FLAT, given_costs
from tests.support.head_files import write_scripted_head
from tests.support.scripted_model import write_scripted_model

ROUND = ("one", " two", " three", " four", "\n")
HOSTILE = (
    *("safe", "\x1b", "[2J", "\x1b]0;", "owned\x07", "\r"),
    *("\x9b", "31m", "\u202e", "\x7f", "end"),
)


@pytest.fixture
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has set nothing and measured nothing, in an empty working directory.

    Returns:
        where that is, beside the directories "config" and "cache", which are not there yet.
    """
    for kind in ("config", "cache"):
        monkeypatch.setenv(f"MLXSPEC_{kind.upper()}_DIR", str(tmp_path / kind))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says "one two three four" over and over, a line each."""
    return write_scripted_model(tmp_path_factory.mktemp("cli") / "endless", ROUND)


@pytest.fixture(scope="session")
def finite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template that says "one two three four" once."""
    directory = tmp_path_factory.mktemp("cli") / "finite"
    return write_scripted_model(directory, ROUND, ends=True, template=False)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that emits terminal control sequences, split across tokens."""
    return write_scripted_model(tmp_path_factory.mktemp("cli") / "hostile", HOSTILE, ends=True)


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``finite``, and with a trained head in its folder, which is always right."""
    directory = tmp_path_factory.mktemp("cli") / "headed"
    write_scripted_model(directory, ROUND, ends=True, template=False)
    write_scripted_head(directory / "head", directory)
    return directory


@pytest.fixture
def heads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows cost next to nothing, and heads take no time, whatever the machine is busy with."""
    costs = given_costs(FLAT)
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: costs)
    monkeypatch.setattr("mlxspec.engine.heads.TrainedHead._timed", lambda *_: 1e-5)
