"""Experience saved on disk, without any text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxspec.drafting import experience as experience_file
from mlxspec.drafting.cost_file import CostFile
from mlxspec.drafting.experience import Experience, experience_path
from mlxspec.drafting.p_accept import TOKEN_FEATURES


def taught(experience: Experience, *features: int, right: bool = True, times: int = 60) -> None:
    """Learn from a generation whose drafts with these features were all right or all wrong."""
    for _ in range(times):
        experience.corrections.learn(features, 0.0, right)
    experience.end()


def test_the_next_process_knows_what_was_learned(tmp_path: Path) -> None:
    first = Experience(tmp_path / "new" / "a.json")
    taught(first, 3, 5)
    second = Experience(tmp_path / "new" / "a.json")
    then = first.corrections.logit((3, 5))
    assert then > 1
    assert second.corrections.logit((3, 5)) == pytest.approx(then, abs=1e-3)


def test_no_token_is_written(tmp_path: Path) -> None:
    experience = Experience(tmp_path / "a.json")
    taught(experience, 3, TOKEN_FEATURES + 4711)
    text = (tmp_path / "a.json").read_text()
    assert "4711" not in text
    assert [*json.loads(text)["content"]] == ["3"]
    assert (tmp_path / "a.json").stat().st_mode & 0o077 == 0


def test_of_two_processes_the_last_to_save_stays(tmp_path: Path) -> None:
    path, now = tmp_path / "a.json", [0.0]
    taught(Experience(path), 7)
    before = Experience(path).corrections.logit((7,))
    one, two = (Experience(path, lambda: now[0]) for _ in range(2))
    taught(one, 3)
    taught(two, 5, right=False)
    weights = Experience(path).corrections
    assert weights.logit((7,)) == pytest.approx(before)
    assert weights.logit((5,)) < -1
    now[0] = 60
    taught(one, 9)
    weights = Experience(path).corrections
    assert weights.logit((7,)) == pytest.approx(before)
    assert weights.logit((3,)) > 1
    assert weights.logit((9,)) > 1


def test_what_is_removed_is_forgotten_by_processes_that_run(tmp_path: Path) -> None:
    path, now = tmp_path / "a.json", [0.0]
    experience = Experience(path, lambda: now[0])
    taught(experience, 3)
    path.unlink()
    now[0] = 60
    experience.end()
    assert experience.corrections.logit((3,)) == 0
    assert Experience(path).corrections.logit((3,)) == 0


def test_it_is_saved_seldom(tmp_path: Path) -> None:
    path, now = tmp_path / "a.json", [0.0]
    experience = Experience(path, lambda: now[0])
    taught(experience, 3)
    written = path.read_bytes()
    now[0] = 29
    taught(experience, 5)
    assert path.read_bytes() == written
    now[0] = 31
    experience.end()
    assert Experience(path).corrections.logit((5,)) > 1


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"format": "another"}',
        '{"digest": "", "content": {"3": 1.0}}',
    ],
)
def test_a_damaged_file_is_ignored_with_a_line_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(damage)
    experience = Experience(path)
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert str(path) in caplog.text
    taught(experience, 3)
    caplog.clear()
    assert Experience(path).corrections.logit((3,)) > 1
    assert not caplog.records


def test_a_place_that_cannot_be_written_gives_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    now = [0.0]
    experience = Experience(tmp_path / "file" / "experience" / "a.json", lambda: now[0])
    for _ in range(3):
        now[0] += 60
        taught(experience, 3)
    CostFile({}, {}, tmp_path / "file" / "step_times").update({})
    assert len(caplog.records) == 1
    assert re.search(
        r"cannot be kept in .* \(Not a directory\); set MLXSPEC_CACHE_DIR", caplog.text
    )


def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    taught(Experience(path), 3)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    experience = Experience(path)
    monkeypatch.setattr(os, "fsync", full)
    taught(experience, 5)
    assert path.read_bytes() == before
    assert "No space left" in caplog.text
    assert [*tmp_path.iterdir()] == [path]


def test_few_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("mlxspec.cache_files._MOST_FILES", 3)
    paths = [experience_path({"digest": str(number)}) for number in range(5)]
    for age, path in enumerate(paths):
        taught(Experience(path), 3)
        os.utime(path, (age, age))
    assert {*experience_file.experience_files()} == {*paths[2:]}


WRITES = """
import sys
from pathlib import Path
from mlxspec.drafting.experience import Experience
experience = Experience(Path(sys.argv[1]), iter(range(0, 10**9, 60)).__next__)
print("ready", flush=True)
while True:
    experience.corrections.learn((3,), 0.0, True)
    experience.end()
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_while_writing_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    taught(Experience(path), 7)
    known = Experience(path).corrections.logit((7,))
    for round_number in range(6):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(0.02 + 0.03 * round_number)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        assert Experience(path).corrections.logit((7,)) == pytest.approx(known)
    taught(Experience(path), 7)  # temporary files of the killed processes are removed
    assert [*tmp_path.iterdir()] == [path]
