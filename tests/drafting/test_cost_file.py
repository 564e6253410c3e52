"""The cost file: what it stores, what it ignores, and that it never raises."""

from __future__ import annotations

import math
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxspec.drafting.cost_file import Calibration, CostFile, StepTime, cost_files
from mlxspec.drafting.costs import LiveCosts
from mlxspec.drafting.time_filter import WIDEST
from tests.support.examples import examples
from tests.support.hostile import harmless, mutated

MACHINE, MODEL = {"chip": "M4", "mlx": "0.32.4"}, {"type": "llama", "digest": "a1"}
TIMES = [StepTime(1, 0.025, 0.02), StepTime(4, 0.036, 0.03), StepTime(32, 0.13, 0.05)]
KNOWN = Calibration(TIMES, "careful", "2026-01-31T10:00:00+00:00")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CostFile:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    return CostFile(MACHINE, MODEL)


def test_what_was_kept_is_read_again(file: CostFile):
    assert file.read() == {}
    file.update({1024: KNOWN})
    assert CostFile(MACHINE, MODEL).read() == {1024: KNOWN}
    assert cost_files() == [(file, {1024: KNOWN})]
    widest = replace(KNOWN, times=[*TIMES, StepTime(WIDEST, 0.3, 0.05)])
    file.update({4096: widest})
    assert file.read()[4096] == widest


def test_steps_of_several_sequences_are_kept_beside_those_of_one(file: CostFile) -> None:
    assert file.of_sequences(1) == file
    assert file.of_sequences(2).path != file.path


def test_an_update_leaves_other_ranges_and_other_models_alone(file: CostFile):
    other = CostFile(MACHINE, {"type": "llama", "digest": "b2"})
    newer = Calibration(TIMES[:1], "steps", "2026-02-01T10:00:00+00:00")
    file.update({1024: KNOWN})
    other.update({1024: newer})
    file.update({4096: newer})
    assert file.read() == {1024: KNOWN, 4096: newer}
    assert other.read() == {1024: newer}


@pytest.mark.parametrize(
    ("kept", "new", "stays"),
    [
        (("careful", 2), ("quick", 3), "careful"),
        (("careful", 2), ("steps", 3), "careful"),
        (("quick", 3), ("careful", 2), "careful"),
        (("quick", 3), ("steps", 3), "quick"),
        (("steps", 3), ("quick", 2), "quick"),
    ],
)
def test_the_better_measurement_stays(
    file: CostFile, kept: tuple[str, int], new: tuple[str, int], stays: str
):
    for source, count in (kept, new):
        known = Calibration(TIMES[:count], source, "2026-02-01T10:00:00+00:00")
        file.update({1024: known})
    assert file.read()[1024].source == stays


def test_among_equals_the_last_one_stays_unless_it_knows_fewer_rows(file: CostFile):
    later = "2026-02-01T10:00:00+00:00"
    file.update({1024: KNOWN})
    file.update({1024: Calibration(TIMES[:2], "careful", later)})
    assert file.read() == {1024: KNOWN}
    file.update({1024: Calibration(TIMES, "careful", later)})
    assert file.read()[1024].updated == later


def test_the_file_is_the_user_s_own_and_nothing_else_stays(file: CostFile):
    file.update({1024: KNOWN})
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.directory.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "{}",
        '"text"',
        "[" * 100_000,
        "\x00\x01",
        '{"digest": "", "content": {}}',
        '{"digest": null}',
    ],
)
def test_a_spoiled_file_is_ignored_with_one_line_and_replaced(
    file: CostFile, content: str, caplog: pytest.LogCaptureFixture
):
    file.directory.mkdir()
    file.path.write_text(content)
    assert file.read() == {}
    (line,) = caplog.messages
    assert re.match("ignoring the step times in .*json: ", line)
    assert "\n" not in line
    file.update({1024: KNOWN})
    assert file.read() == {1024: KNOWN}


def test_a_file_that_has_been_changed_or_cut_is_ignored(
    file: CostFile, caplog: pytest.LogCaptureFixture
):
    file.update({1024: KNOWN})
    path, whole = file.path, file.path.read_text()
    for content in (whole.replace("0.025", "0.026"), whole.replace("1024", "-1"), whole[:-20]):
        assert content != whole
        path.write_text(content)
        assert file.read() == {}
    assert len(caplog.messages) == 3
    path.write_text(whole)
    assert file.read() == {1024: KNOWN}


def usable_or_ignored(file: CostFile) -> None:
    """Assert that a reader ignores unusable content and never raises."""
    known = harmless(
        lambda: [
            found
            for known in (file.read(), *(kept for _, kept in cost_files()))
            for found in known.values()
        ]
    )
    assert isinstance(known, list)
    for found in known:
        assert found.times[0].rows == 1
        assert all(1e-6 <= time.seconds <= 1e4 for time in found.times)
        table = LiveCosts({1024: found}).for_sequences(3).curve.table
        assert all(0 <= left <= right < math.inf for left, right in pairwise(table))


@pytest.mark.nightly
@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150))
@given(data=st.data())
def test_damaged_bytes_are_found_or_harmless(file: CostFile, data: st.DataObject):
    file.update({1024: KNOWN})
    path = file.path
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    usable_or_ignored(file)


def test_fewer_numbers_of_rows_do_not_replace_more(file: CostFile):
    file.update({1024: KNOWN})
    file.update({1024: Calibration(TIMES[:1], "careful", KNOWN.updated)})
    assert file.read() == {1024: KNOWN}


def test_a_place_that_cannot_be_written_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    CostFile(MACHINE, MODEL, tmp_path / "file" / "step_times").update({1024: KNOWN})
    (line,) = caplog.messages
    assert re.search(r"cannot be kept in .* \(Not a directory\); set MLXSPEC_CACHE_DIR", line)


def test_an_interrupted_write_leaves_the_file_as_it_was(
    file: CostFile, monkeypatch: pytest.MonkeyPatch
):
    file.update({1024: KNOWN})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.update({4096: KNOWN})
    assert file.read() == {1024: KNOWN}
    assert [*file.directory.iterdir()] == [file.path]


def test_writers_and_readers_at_a_time_see_whole_files(
    file: CostFile, caplog: pytest.LogCaptureFixture
):
    file.update({1024: KNOWN})

    def use(index: int) -> bool:
        file.update({1024: KNOWN})
        return file.read() == {1024: KNOWN}

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(use, range(100)))
    assert caplog.messages == []


def test_the_directory_is_the_one_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "here"))
    assert CostFile({}, {}).directory == tmp_path / "here" / "step_times"
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", "")
    assert "mlxspec" in str(CostFile({}, {}).directory)
