"""Fixtures of the command-line tests: model directories and an empty user environment."""

from pathlib import Path

import pytest

from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
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
    """Run as a user without settings or measurements, in an empty working directory.

    Returns:
        the working directory; its siblings "config" and "cache" do not exist yet.
    """
    for kind in ("config", "cache"):
        monkeypatch.setenv(f"MLXSPEC_{kind.upper()}_DIR", str(tmp_path / kind))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats the line "one two three four" without end."""
    return write_scripted_model(tmp_path_factory.mktemp("cli") / "endless", ROUND)


@pytest.fixture(scope="session")
def finite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template that generates "one two three four" once."""
    directory = tmp_path_factory.mktemp("cli") / "finite"
    return write_scripted_model(directory, ROUND, ends=True, template=False)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that emits terminal control sequences, split across tokens."""
    return write_scripted_model(tmp_path_factory.mktemp("cli") / "hostile", HOSTILE, ends=True)


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like ``finite``, with a trained head in its folder that is always right."""
    directory = tmp_path_factory.mktemp("cli") / "headed"
    write_scripted_model(directory, ROUND, ends=True, template=False)
    write_scripted_head(directory / "head", directory)
    return directory


@pytest.fixture
def heads_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows nearly free and drafts take no time, however busy the machine is."""
    costs = given_costs(FLAT)
    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", lambda *_, **__: costs)
    monkeypatch.setattr("mlxspec.engine.heads.TrainedHead._timed", lambda *_: 1e-5)
    draft_costs = FixedCosts(CostCurve([(1, 1)]), plain_seconds=1e-5)
    monkeypatch.setattr("mlxspec.engine.draft_model.costs_for", lambda _: draft_costs)
