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

from mlxspec.drafting.cost_file import CostCache, CostKey, KnownTimes
from mlxspec.drafting.costs import WIDEST, KnownTime, LiveCosts
from tests.support.examples import examples
from tests.support.hostile import harmless, mutated

KEY = CostKey({"chip": "M4", "mlx": "0.32.4"}, {"type": "llama", "digest": "a1"})
TIMES = [KnownTime(1, 0.025, 0.02), KnownTime(4, 0.036, 0.03), KnownTime(32, 0.13, 0.05)]
KNOWN = KnownTimes(TIMES, "careful", "2026-01-31T10:00:00+00:00")


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(tmp_path / "step_times")


def only_file(cache: CostCache) -> Path:
    (path,) = cache.directory.iterdir()
    return path


def test_what_was_kept_is_read_again(cache: CostCache):
    assert cache.read(KEY) == {}
    cache.update(KEY, {1024: KNOWN})
    assert CostCache(cache.directory).read(KEY) == {1024: KNOWN}
    assert cache.entries() == [(KEY, {1024: KNOWN})]
    widest = replace(KNOWN, times=[*TIMES, KnownTime(WIDEST, 0.3, 0.05)])
    cache.update(KEY, {4096: widest})
    assert cache.read(KEY)[4096] == widest


def test_steps_of_several_sequences_are_kept_beside_those_of_one() -> None:
    assert KEY.of_sequences(1) == KEY
    assert KEY.of_sequences(2).file_name != KEY.file_name


def test_an_update_leaves_other_ranges_and_other_models_alone(cache: CostCache):
    other = CostKey(KEY.machine, {"type": "llama", "digest": "b2"})
    newer = KnownTimes(TIMES[:1], "steps", "2026-02-01T10:00:00+00:00")
    cache.update(KEY, {1024: KNOWN})
    cache.update(other, {1024: newer})
    cache.update(KEY, {4096: newer})
    assert cache.read(KEY) == {1024: KNOWN, 4096: newer}
    assert cache.read(other) == {1024: newer}


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
    cache: CostCache, kept: tuple[str, int], new: tuple[str, int], stays: str
):
    for source, count in (kept, new):
        known = KnownTimes(TIMES[:count], source, "2026-02-01T10:00:00+00:00")
        cache.update(KEY, {1024: known})
    assert cache.read(KEY)[1024].source == stays


def test_among_equals_the_last_one_stays_unless_it_knows_fewer_rows(cache: CostCache):
    later = "2026-02-01T10:00:00+00:00"
    cache.update(KEY, {1024: KNOWN})
    cache.update(KEY, {1024: KnownTimes(TIMES[:2], "careful", later)})
    assert cache.read(KEY) == {1024: KNOWN}
    cache.update(KEY, {1024: KnownTimes(TIMES, "careful", later)})
    assert cache.read(KEY)[1024].updated == later


def test_the_file_is_the_user_s_own_and_nothing_else_stays(cache: CostCache):
    cache.update(KEY, {1024: KNOWN})
    assert stat.S_IMODE(only_file(cache).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700


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
    cache: CostCache, content: str, caplog: pytest.LogCaptureFixture
):
    cache.directory.mkdir()
    path = cache.directory / KEY.file_name
    path.write_text(content)
    assert cache.read(KEY) == {}
    (line,) = caplog.messages
    assert re.match("ignoring the step times in .*json: ", line)
    assert "\n" not in line
    cache.update(KEY, {1024: KNOWN})
    assert cache.read(KEY) == {1024: KNOWN}


def test_a_file_that_has_been_changed_or_cut_is_ignored(
    cache: CostCache, caplog: pytest.LogCaptureFixture
):
    cache.update(KEY, {1024: KNOWN})
    path, whole = only_file(cache), only_file(cache).read_text()
    for content in (whole.replace("0.025", "0.026"), whole.replace("1024", "-1"), whole[:-20]):
        assert content != whole
        path.write_text(content)
        assert cache.read(KEY) == {}
    assert len(caplog.messages) == 3
    path.write_text(whole)
    assert cache.read(KEY) == {1024: KNOWN}


def usable_or_ignored(cache: CostCache) -> None:
    """Assert that a reader ignores unusable content and never raises."""
    known = harmless(lambda: [*cache.read(KEY).values(), *kept_in(cache)])
    assert isinstance(known, list)
    for times in (found.times for found in known):
        assert times[0].rows == 1
        assert all(1e-6 <= time.seconds <= 1e4 for time in times)
        table = LiveCosts({1024: times}).for_sequences(3).curve.table
        assert all(0 <= left <= right < math.inf for left, right in pairwise(table))


def kept_in(cache: CostCache) -> list[KnownTimes]:
    return [known for _, ranges in cache.entries() for known in ranges.values()]


@pytest.mark.nightly
@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150))
@given(data=st.data())
def test_damaged_bytes_are_found_or_harmless(cache: CostCache, data: st.DataObject):
    cache.update(KEY, {1024: KNOWN})
    path = only_file(cache)
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    usable_or_ignored(cache)


def test_fewer_numbers_of_rows_do_not_replace_more(cache: CostCache):
    cache.update(KEY, {1024: KNOWN})
    cache.update(KEY, {1024: KnownTimes(TIMES[:1], "careful", KNOWN.updated)})
    assert cache.read(KEY) == {1024: KNOWN}


def test_a_place_that_cannot_be_written_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    CostCache(tmp_path / "file" / "step_times").update(KEY, {1024: KNOWN})
    (line,) = caplog.messages
    assert re.search(r"cannot be kept in .* \(Not a directory\); set MLXSPEC_CACHE_DIR", line)


def test_an_interrupted_write_leaves_the_file_as_it_was(
    cache: CostCache, monkeypatch: pytest.MonkeyPatch
):
    cache.update(KEY, {1024: KNOWN})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.update(KEY, {4096: KNOWN})
    assert cache.read(KEY) == {1024: KNOWN}
    assert only_file(cache).name == KEY.file_name


def test_writers_and_readers_at_a_time_see_whole_files(
    cache: CostCache, caplog: pytest.LogCaptureFixture
):
    cache.update(KEY, {1024: KNOWN})

    def use(index: int) -> bool:
        cache.update(KEY, {1024: KNOWN})
        return cache.read(KEY) == {1024: KNOWN}

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(use, range(100)))
    assert caplog.messages == []


def test_the_directory_is_the_one_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path / "here"))
    assert CostCache().directory == tmp_path / "here" / "step_times"
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", "")
    assert "mlxspec" in str(CostCache().directory)
