"""``harmless`` detects readers that take too long or too much memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from mlxspec.errors import MlxspecError, OptionError
from tests.support import hostile
from tests.support.hostile import harmless, json_values, mutated


def test_results_and_the_packages_errors_are_returned() -> None:
    def refuse() -> None:
        raise OptionError("no")

    assert harmless(lambda: 3) == 3
    assert isinstance(harmless(refuse), OptionError)


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, SystemExit])
def test_other_errors_go_on(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        harmless(fail)


@pytest.mark.slow
def test_memory_that_is_given_back_counts() -> None:
    harmless(lambda: np.ones(10 << 20, np.uint8).sum())
    with pytest.raises(AssertionError, match="MB"):
        harmless(lambda: np.ones(300 << 20, np.uint8).sum())
    with pytest.raises(MemoryError):
        harmless(lambda: np.ones(8 << 30, np.uint8))
    harmless(lambda: np.ones(10 << 20, np.uint8).sum())


@pytest.mark.slow
def test_long_computation_and_long_waits_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "SECONDS", 0.05)
    with pytest.raises(AssertionError, match="took"):
        harmless(lambda: sum(range(10_000_000)))
    monkeypatch.setattr(hostile, "PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AssertionError, match="not done"):
        harmless((tmp_path / "pipe").read_bytes)


def test_a_message_that_repeats_its_input_fails() -> None:
    class Repeating(MlxspecError):
        def __str__(self) -> str:
            return "x" * 100_000

    def refuse() -> None:
        raise Repeating

    with pytest.raises(AssertionError, match="characters"):
        harmless(refuse)


@given(mutated(b"0123456789" * 20))
def test_a_mutation_is_bytes_of_about_the_same_length(data: bytes) -> None:
    assert len(data) < 2000


@given(json_values)
def test_hostile_json_can_be_written(value: object) -> None:
    json.dumps(value)
