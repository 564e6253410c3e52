"""Answers kept on disk: across runs, with several processes, and with damaged files."""

import errno
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.corpus.answers import DATABASE, INDEX_FORMAT, KeptAnswers, identify
from mlxspec.corpus.suffix_index import write_index
from mlxspec.errors import FileError, OptionError
from tests.corpus.test_answer_index import looked_up, make_small
from tests.support.examples import examples
from tests.support.hostile import mutated
from tests.support.logs import logged_by
from tests.support.tokenizers import FIRST, SECOND

IDENTITY = identify(FIRST)
ROOT = Path(mlxspec.__file__).parents[1]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(autouse=True)
def troubles() -> Iterator[list[str]]:
    """The warnings of memories. A test that provokes some checks this list and empties it."""
    with logged_by("mlxspec.corpus.answer_index") as lines:
        yield lines
    assert not lines


def opened(directory: Path, **options: int) -> AnswerIndex:
    """Open a memory and wait until it has indexed all answers."""
    held = AnswerIndex(**options, kept=KeptAnswers(directory, IDENTITY))
    held.settle()
    return held


def all_texts(directory: Path) -> list[list[int]]:
    """Return all kept texts, sorted."""
    kept = KeptAnswers(directory, IDENTITY)
    texts = sorted(tokens.tolist() for _, tokens, *_ in kept.read())
    kept.close()
    return texts


def forget(directory: Path, gone: list[list[int]]) -> None:
    kept = KeptAnswers(directory, IDENTITY)
    kept.forget([row for row, tokens, *_ in kept.read() if tokens.tolist() in gone])
    kept.close()


def some_answers(number: int, seed: int = 0) -> list[list[int]]:
    pick = random.Random(seed)
    return [[pick.randrange(100) for _ in range(pick.randrange(8, 30))] for _ in range(number)]


def learn(directory: Path, answers: list[list[int]], **options: int) -> None:
    held = opened(directory, **options)
    for answer in answers:
        held.add(answer, {"steps": 1, "tokens": len(answer), "context": 1})
    held.close()


def files(directory: Path, kind: str) -> list[Path]:
    return sorted(directory.glob(f"*{kind}"))


def is_found(held: AnswerIndex, answer: list[int]) -> bool:
    found = looked_up(held, answer[:-1])
    return bool(found) and found[0] == (len(answer) - 1, answer[-1:])


def test_answers_are_found_in_the_next_run(tmp_path: Path):
    answers = some_answers(60)
    for start in range(0, 60, 7):
        learn(tmp_path, answers[start : start + 7])
    assert all_texts(tmp_path) == sorted(answers)
    held = opened(tmp_path)
    for answer in answers:
        assert is_found(held, answer)
    held.close()
    assert len(files(tmp_path, ".index")) == 1


def test_an_index_that_was_deleted_is_made_again(tmp_path: Path):
    answers = some_answers(60)
    learn(tmp_path, answers)
    assert files(tmp_path, ".index")
    for path in files(tmp_path, ".index"):
        path.unlink()
    held = opened(tmp_path)
    for answer in answers:
        assert is_found(held, answer)
    held.close()
    assert files(tmp_path, ".index")


def test_a_deleted_database_leaves_no_answers(tmp_path: Path):
    answers = some_answers(60)
    learn(tmp_path, answers)
    for path in files(tmp_path, f"{DATABASE}*"):
        path.unlink()
    learn(tmp_path, answers[:3])
    held = opened(tmp_path)
    assert [answer for answer in answers if is_found(held, answer)] == answers[:3]
    held.close()


def test_nothing_of_a_prompt_is_kept(tmp_path: Path):
    prompt = [91, 92, 93]
    answers = [[*range(first, first + 5)] for first in range(0, 85, 5)]
    held = opened(tmp_path)
    for answer in answers:
        held.add(answer, prompt=prompt)
        held.settle()
        found = held.look_up(prompt, limit=1)[0][:-1]
        assert found in (answer, [])  # sorted answers are not found by their prompts
    held.settle()
    assert files(tmp_path, ".index")
    assert all_texts(tmp_path) == sorted(answers)
    held.close()
    assert all_texts(tmp_path) == sorted(answers)
    encoded = np.array(prompt, np.int32).tobytes()
    assert not any(encoded in file.read_bytes() for file in tmp_path.iterdir())


def test_files_and_directory_are_their_owners_alone(tmp_path: Path):
    umask = os.umask(0)
    try:
        learn(tmp_path / "new", some_answers(20))
        held = opened(tmp_path / "new")
        held.add([1, 2, 3])
        held.settle()
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
        held.close()
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".index", ".sqlite"}


@pytest.mark.slow
def test_answers_take_no_more_than_their_page_says(tmp_path: Path):
    pick = random.Random(0)
    learn(tmp_path, [[pick.randrange(100) for _ in range(200)] for _ in range(100)])
    count = KeptAnswers(tmp_path, IDENTITY).count()
    assert (count["texts"], count["tokens"]) == (100, 20000)
    assert count["bytes"] <= 14 * count["tokens"]


def test_counts_times_and_figures_by_day(tmp_path: Path):
    before = int(time.time())
    answers = some_answers(30)
    learn(tmp_path, answers)
    kept = KeptAnswers(tmp_path, IDENTITY)
    count = kept.count()
    assert (count["texts"], count["tokens"]) == (30, sum(map(len, answers)))
    indexed = sum(path.stat().st_size for path in files(tmp_path, ".index"))
    assert count["bytes"] == 4 * count["tokens"] + indexed
    assert count["oldest"] is not None
    assert count["newest"] is not None
    assert before <= count["oldest"] <= count["newest"] <= time.time()
    days = kept.earned_by_day().values()
    assert sum(day["answers"] for day in days) == 30
    assert sum(day["tokens"] for day in days) == count["tokens"]
    assert sum(day["context"] for day in days) == 30


def test_an_equal_answer_is_kept_once_over_runs(tmp_path: Path):
    answers = some_answers(20)
    for _ in range(3):
        learn(tmp_path, answers)
    assert all_texts(tmp_path) == sorted(answers)
    (day,) = KeptAnswers(tmp_path, IDENTITY).earned_by_day().values()
    assert day["context"] == 60


def test_answers_of_other_processes_are_seen_after_a_refresh(tmp_path: Path):
    first, second = opened(tmp_path), opened(tmp_path)
    answers = some_answers(40)
    for answer in answers:
        second.add(answer)
    second.settle()
    first.refresh()
    first.settle()
    assert is_found(first, answers[0])
    first.close()
    second.close()
    assert all_texts(tmp_path) == sorted(answers)


def keep(directory: Path, answers: list[list[int]]) -> None:
    """Keep answers without indexing them."""
    kept = KeptAnswers(directory, IDENTITY)
    with kept.locked():
        for answer in answers:
            kept.add(np.array(answer, np.int32).tobytes(), {})
    kept.close()


def steps_of(held: AnswerIndex, action: Callable[[], object]) -> int:
    """Return the number of SQLite instructions that a memory runs for an action."""
    counted = [0]

    def count() -> None:
        counted[0] += 1

    held._worker._answers._db.set_progress_handler(count, 1)
    action()
    held.settle()
    held._worker._answers._db.set_progress_handler(None, 1)
    return counted[0]


@pytest.mark.slow
def test_an_answer_of_another_process_takes_as_long_whatever_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_small(monkeypatch, 1 << 20)
    counts = []
    for kept in (100, 2000):
        keep(tmp_path, some_answers(kept))
        held, other = opened(tmp_path), opened(tmp_path)
        answer = [kept // 100, 1, 2]
        other.add(answer)
        other.settle()
        counts.append(steps_of(held, held.refresh))
        assert is_found(held, answer)
        held.close()
        other.close()
    assert max(counts) < 200


@pytest.mark.slow
def test_indexing_anew_takes_as_long_for_each_answer_whatever_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_small(monkeypatch, 1 << 20)
    counts = []
    for kept in (1000, 2500):
        keep(tmp_path, some_answers(kept))
        held = opened(tmp_path)

        def forget_all(held: AnswerIndex = held) -> None:
            held._worker._stamp = 0
            held.refresh()

        counts.append(steps_of(held, forget_all) / kept)
        assert is_found(held, some_answers(1)[0])
        held.close()
    assert counts[1] == pytest.approx(counts[0], rel=0.05)


@pytest.mark.slow
def test_two_processes_at_once_take_turns_and_lose_nothing(tmp_path: Path):
    first, second = opened(tmp_path), opened(tmp_path)
    answers = some_answers(200)
    for number, answer in enumerate(answers):
        held = (first, second)[number % 2]
        held.add(answer)
        if number % 11 == 0:
            held.refresh()
            held.settle()
    first.close()
    second.close()
    assert all_texts(tmp_path) == sorted(answers)
    third = opened(tmp_path)
    assert all(is_found(third, answer) for answer in answers)
    third.close()
    assert all_texts(tmp_path) == sorted(answers)


# Damaged and replaced files.


def flipped(path: Path, place: int, pick: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << pick.randrange(8)
    path.write_bytes(data)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_flipped_bit_of_an_index_is_borne(tmp_path: Path):
    answers = some_answers(40)
    learn(tmp_path, answers)
    (path,) = files(tmp_path, ".index")
    whole, pick = path.read_bytes(), random.Random(0)
    for place in [*range(120), *range(120, len(whole), 53)]:
        path.write_bytes(whole)
        flipped(path, place, pick)
        held = opened(tmp_path)
        for answer in answers[::6]:
            tokens, occurrences = held.look_up(answer[:-1])
            assert all(-1 <= token < 100 for token in tokens)
            assert len(occurrences) <= 8
        held.close()
    assert all_texts(tmp_path) == sorted(answers)


@pytest.mark.slow
def test_a_damaged_index_is_made_again_and_not_merged(tmp_path: Path):
    answers = some_answers(40)
    learn(tmp_path, answers)
    for path in files(tmp_path, ".index"):
        flipped(path, path.stat().st_size - 2, random.Random(0))
    held = opened(tmp_path)
    new = some_answers(200, seed=1)
    for answer in new:
        held.add(answer)
    held.settle()
    assert all(is_found(held, answer) for answer in answers + new)
    held.close()
    assert all_texts(tmp_path) == sorted(answers + new)


@pytest.mark.parametrize("size", [0, 1, 60, 4096, 5000])
def test_an_index_that_is_cut_short_is_made_again(tmp_path: Path, size: int):
    answers = some_answers(40)
    learn(tmp_path, answers)
    for path in files(tmp_path, ".index"):
        os.truncate(path, min(size, path.stat().st_size))
    learn(tmp_path, [[1, 2, 3]])
    held = opened(tmp_path)
    assert all(is_found(held, answer) for answer in [*answers, [1, 2, 3]])
    held.close()


def test_a_damaged_database_is_one_line_and_stays_as_it_is(tmp_path: Path):
    path = tmp_path / DATABASE
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(FileError) as error:
        opened(tmp_path)
    assert str(error.value) == (
        f"{path}: cannot be used (file is not a database); set MLXSPEC_MEMORY to another "
        "directory, or remove a damaged file"
    )
    assert path.read_bytes() == b"no database" * 1000


@pytest.mark.slow
def test_damaged_pages_are_noticed_while_answers_are_kept(tmp_path: Path, troubles: list[str]):
    learn(tmp_path, some_answers(400))
    path = tmp_path / DATABASE
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xfe" * (len(data) - 4096)
    path.write_bytes(data)
    try:
        held = opened(tmp_path)
        held.add([1, 2, 3])
        held.settle()
        assert is_found(held, [1, 2, 3])
        held.close()
    except FileError as error:
        troubles.append(str(error))
    assert "cannot be used (" in troubles.pop()


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_the_database_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, troubles: list[str], data: st.DataObject
):
    directory = tmp_path_factory.mktemp("memory")
    learn(directory, [[1, 2, 3], [4, 5, 6]])
    path = directory / DATABASE
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    try:
        learn(directory, [[7, 8, 9]])
        found = all_texts(directory)
    except FileError as error:
        troubles.append(str(error))
        found = []
    assert all("\n" not in line for line in troubles)
    troubles.clear()
    assert all(0 <= token < 100 for text in found for token in text)


@pytest.mark.parametrize("version", [4, 6])
def test_another_versions_database_is_left_alone(tmp_path: Path, version: int):
    learn(tmp_path, [[1, 2, 3]])
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute(f"PRAGMA user_version = {version}")
    before = (tmp_path / DATABASE).read_bytes()
    with pytest.raises(FileError, match=f"made by another version of mlxspec, {version}"):
        KeptAnswers(tmp_path, IDENTITY)
    assert (tmp_path / DATABASE).read_bytes() == before


# Texts that the user adds.


def add(directory: Path, **named: list[list[int]]) -> None:
    kept = KeptAnswers(directory, IDENTITY)
    kept.add_texts(
        {
            name: [np.array(text, np.int32).tobytes() for text in texts]
            for name, texts in named.items()
        }
    )
    kept.close()


def names(directory: Path) -> dict[str | None, int]:
    """Return the number of texts by name; answers have the name None."""
    kept = KeptAnswers(directory, IDENTITY)
    found = Counter(name for *_, name in kept.read())
    kept.close()
    return dict(found)


def test_added_texts_stay_however_many_answers_come(tmp_path: Path):
    texts = some_answers(40, seed=1)
    learn(tmp_path, some_answers(3))
    add(tmp_path, book=texts)
    answers = some_answers(100)
    for start in range(0, 100, 10):
        learn(tmp_path, answers[start : start + 10], max_tokens=300)
    left = names(tmp_path)
    assert left["book"] == 40
    assert 0 < left[None] < 20
    held = opened(tmp_path, max_tokens=300)
    assert all(is_found(held, text) for text in [*texts, answers[-1]])
    held.close()


def test_added_texts_are_not_counted_among_the_answers(tmp_path: Path):
    """Answers are only deleted beyond their own limit, however large the texts are."""
    add(tmp_path, book=some_answers(200, seed=1))
    answers = some_answers(10)
    learn(tmp_path, answers, max_tokens=1000)
    learn(tmp_path, [], max_tokens=1000)
    assert names(tmp_path) == {"book": 200, None: 10}
    count = KeptAnswers(tmp_path, IDENTITY).count()
    assert (count["texts"], count["tokens"]) == (10, sum(map(len, answers)))
    assert count["added"]["book"]["texts"] == 200
    assert (
        sum(day["answers"] for day in KeptAnswers(tmp_path, IDENTITY).earned_by_day().values())
        == 10
    )


def test_texts_of_a_name_are_replaced(tmp_path: Path):
    first, second, third = some_answers(3)
    add(tmp_path, a=[first, second], b=[third])
    held = opened(tmp_path)
    assert is_found(held, first)
    add(tmp_path, a=[second])
    held.refresh()
    held.settle()
    assert not is_found(held, first)
    assert is_found(held, second)
    assert is_found(held, third)
    held.close()
    assert names(tmp_path) == {"a": 1, "b": 1}


def test_an_answer_that_is_added_stays(tmp_path: Path):
    answer, other = some_answers(2)
    learn(tmp_path, [answer, other])
    add(tmp_path, a=[answer])
    learn(tmp_path, [answer])
    assert names(tmp_path) == {"a": 1, None: 2}
    add(tmp_path, b=[answer])  # the same text
    add(tmp_path, a=[other])
    assert names(tmp_path) == {"a": 1, "b": 1, None: 2}


def test_more_than_may_be_added_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    add(tmp_path, a=[[1, 2, 3, 4]])
    monkeypatch.setattr("mlxspec.corpus.answers.ADDED_TOKENS", 6)
    with pytest.raises(OptionError, match=r"would have 7 tokens: .* at most 6"):
        add(tmp_path, a=[[1, 2]], b=[[3, 4, 5, 6, 7]])
    assert all_texts(tmp_path) == [[1, 2, 3, 4]]


def test_another_tokenizers_answers_are_not_found(tmp_path: Path):
    learn(tmp_path, some_answers(45))
    other = AnswerIndex(kept=KeptAnswers(tmp_path, identify(SECOND)))
    other.settle()
    assert other.look_up(some_answers(1)[0])[1] == []
    other.add([1, 2, 3])
    other.close()
    assert all_texts(tmp_path) == sorted(some_answers(45))


def test_a_read_only_file_system_is_one_line_that_names_the_directory(
    tmp_path: Path, troubles: list[str], monkeypatch: pytest.MonkeyPatch
):
    answer = some_answers(1)[0]
    held, add = opened(tmp_path), KeptAnswers.add

    def read_only(self: KeptAnswers, text: bytes, earned: Any) -> int:
        if self.directory:
            raise OSError(errno.EROFS, "Read-only file system", "somewhere")
        return add(self, text, earned)

    monkeypatch.setattr(KeptAnswers, "add", read_only)
    held.add(answer)
    held.settle()
    assert looked_up(held, answer[:-1])[0][0] >= len(answer) - 1
    held.close()
    assert troubles.pop() == (
        f"{tmp_path / DATABASE}: cannot be used (Read-only file system); set MLXSPEC_MEMORY to "
        "another directory, or remove a damaged file; answers are only remembered until this "
        "process ends"
    )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 20, 100, 600, 3000])
def test_a_full_disk_leaves_the_old_state_and_one_line(
    tmp_path: Path, troubles: list[str], limit: int
):
    answers = some_answers(40)
    learn(tmp_path, answers)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    new = some_answers(60, seed=1)
    held = opened(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        for answer in new:
            held.add(answer)
        held.settle()
        for answer in new:
            assert looked_up(held, answer[:-1])[0][0] >= len(answer) - 1
        held.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "answers are only remembered until this process ends" in troubles.pop()
    found = all_texts(tmp_path)
    assert all(answer in found for answer in answers)
    assert all(text in answers or text in new for text in found)
    learn(tmp_path, new)
    assert all_texts(tmp_path) == sorted(answers + new)


# Forgetting.


def test_forgetting_takes_texts_out_of_all_files(tmp_path: Path):
    answers = some_answers(45)
    learn(tmp_path, answers)
    gone = answers[::3]
    forget(tmp_path, gone)
    assert all_texts(tmp_path) == sorted(answer for answer in answers if answer not in gone)
    learn(tmp_path, [])
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for answer in answers:
        assert (np.array(answer, "<i4").tobytes() in written) == (answer not in gone)
    forget(tmp_path, answers)
    assert {path.name for path in tmp_path.iterdir()} == {DATABASE}


def test_forgetting_leaves_nothing_on_disk_while_another_process_has_the_answers(tmp_path: Path):
    answers = some_answers(45)
    held = opened(tmp_path)
    for answer in answers:
        held.add(answer)
    held.settle()
    forget(tmp_path, answers[:30])
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not any(np.array(answer, "<i4").tobytes() in written for answer in answers[:30])
    held.close()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not any(np.array(answer, "<i4").tobytes() in written for answer in answers[:30])


@pytest.mark.slow
def test_nothing_forgotten_comes_back_from_a_living_process(tmp_path: Path):
    answers = some_answers(43)
    held = opened(tmp_path)
    for answer in answers:
        held.add(answer)
    held.settle()
    gone = [answers[0], answers[30], answers[41], answers[42]]
    forget(tmp_path, gone)
    held.refresh()
    held.settle()
    for answer in answers:
        assert is_found(held, answer) == (answer not in gone)
    new = some_answers(100, seed=1)
    for answer in new:
        held.add(answer)
    held.close()
    remaining = [answer for answer in answers if answer not in gone]
    assert all_texts(tmp_path) == sorted(remaining + new)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not any(np.array(answer, "<i4").tobytes() in written for answer in gone)


def test_a_process_that_did_not_look_forgets_before_it_writes(tmp_path: Path):
    held = opened(tmp_path)
    held.add([1, 2, 3])
    held.add([4, 5, 6])
    held.settle()
    forget(tmp_path, [[1, 2, 3]])
    held.add([7, 8, 9])
    held.settle()
    assert not is_found(held, [1, 2, 3])
    assert is_found(held, [4, 5, 6])
    held.close()
    assert all_texts(tmp_path) == [[4, 5, 6], [7, 8, 9]]


def test_answers_that_are_forgotten_while_their_index_is_written_are_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = some_answers(60)
    held = opened(tmp_path)
    locked, gone = KeptAnswers.locked, answers[:20]

    def forgotten_first(kept: KeptAnswers):
        monkeypatch.undo()
        make_small(monkeypatch)
        forget(tmp_path, gone)
        return locked(kept)

    for answer in answers[:40]:
        held.add(answer)
    held.settle()
    monkeypatch.setattr(KeptAnswers, "locked", forgotten_first)
    for answer in answers[40:]:
        held.add(answer)
    held.close()
    assert all_texts(tmp_path) == sorted(answers[20:])
    learn(tmp_path, [])
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not any(np.array(answer, "<i4").tobytes() in written for answer in gone)


# Malicious index files.

NUMBERS = [99, 100, 2**31 - 1, -(2**31)]


@pytest.mark.nightly
@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    tokens=st.lists(st.one_of(st.integers(-2, 9), st.sampled_from(NUMBERS))),
    order=st.lists(st.one_of(st.integers(-2, 30), st.sampled_from(NUMBERS))),
    last=st.one_of(st.integers(-1, 5), st.sampled_from(NUMBERS)),
)
def test_an_index_with_a_right_checksum_that_makes_no_sense_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], order: list[int], last: int
):
    directory = tmp_path_factory.mktemp("memory")
    answers = [[5, 6, 7, 8], [1, 2, 3], [8, 2, 3, 1], [9, 9, 9, 9]]
    learn(directory, answers)
    write_nonsense(directory, tokens, order, last)
    held = opened(directory)
    for tail in ([1, 2], [0], [5], [9, 9, 9]):
        tokens, _ = held.look_up(tail)
        assert all(-1 <= token < 100 for token in tokens)
    for answer in some_answers(10):
        held.add(answer)
    held.close()
    assert all_texts(directory) == sorted([*some_answers(10), *answers])


def write_nonsense(directory: Path, tokens: list[int], order: list[int], last: int) -> None:
    """Write an index file with these numbers in its first rows and a valid checksum."""
    kept = KeptAnswers(directory, IDENTITY)
    header = {"format": INDEX_FORMAT, "stamp": kept.stamp(), "last": last}
    arrays = [np.array(one, np.int32) for one in (tokens, order)]
    assert kept.index_file
    with kept.index_file.open("wb") as file:
        write_index(file, header, (len(tokens), len(order)), arrays)
    kept.close()


# Processes that end or are killed.


def test_what_was_added_last_is_kept_at_the_processs_end(tmp_path: Path):
    program = textwrap.dedent(
        """
        import sys, pathlib
        from mlxspec.corpus.answers import KeptAnswers, identify
        from mlxspec.corpus.answer_index import AnswerIndex
        from tests.support.tokenizers import FIRST
        memory = AnswerIndex(kept=KeptAnswers(pathlib.Path(sys.argv[1]), identify(FIRST)))
        for number in range(50):
            memory.add([number, 1, 2, 3])
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    assert all_texts(tmp_path) == [[number, 1, 2, 3] for number in range(50)]


WORKING = textwrap.dedent(
    """
    import logging, sys, random, pathlib
    from mlxspec.corpus import answer_index
    from mlxspec.corpus.answers import KeptAnswers, identify
    from mlxspec.corpus.answer_index import AnswerIndex
    from tests.support.tokenizers import FIRST
    answer_index.LIVE_TOKENS = 40
    directory, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(format="trouble %(message)s", stream=sys.stdout)
    held = AnswerIndex(kept=KeptAnswers(directory, identify(FIRST)))
    pick = random.Random(number)
    index = 0
    while True:
        base = [number // 10000, number // 100 % 100, number % 100, index // 100, index % 100]
        answer = base + [pick.randrange(100) for _ in range(pick.randrange(1, 20))]
        held.add(answer)
        held.settle()
        print(*answer, flush=True)
        index += 1
        if index % 7 == 0:
            held.refresh()
        held.look_up(answer[:4])
    """
)


def wait_for_a_line(output: Path) -> None:
    deadline = time.monotonic() + 30
    while not output.stat().st_size and time.monotonic() < deadline:
        time.sleep(0.01)


def killed_while_working(directory: Path, kills: int, seed: int) -> None:
    """Let four processes learn, sort and merge; kill each and start another in its place."""
    pick = random.Random(seed)
    handed_over: list[list[int]] = []
    running: list[subprocess.Popen[str]] = []
    outputs: list[Path] = []

    def start(number: int) -> None:
        output = directory.parent / f"output {number}"
        outputs.append(output)
        with output.open("w") as file:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-c", WORKING, str(directory), str(number), str(output)],
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    for number in range(kills):
        start(number)
        if len(running) == 4:
            place = pick.randrange(4)
            wait_for_a_line(Path(running[place].args[-1]))
            time.sleep(pick.random() * 0.6)
            victim = running.pop(place)
            victim.kill()
            victim.wait()
    for process in running:
        process.kill()
        process.wait()
    for output in outputs:
        lines = output.read_text().split("\n")[:-1]  # the last line may be incomplete
        for line in lines:
            assert line.replace(" ", "").isdigit(), line
            handed_over.append([*map(int, line.split())])
    texts = {*map(tuple, all_texts(directory))}
    assert texts.issuperset(map(tuple, handed_over))
    held = opened(directory)
    for answer in handed_over[-50:]:
        assert looked_up(held, answer[:-1])[0] == (len(answer) - 1, answer[-1:])
    held.close()
    assert {*map(tuple, all_texts(directory))}.issuperset(map(tuple, handed_over))
    assert len(handed_over) > kills
    assert files(directory, ".index")


@pytest.mark.slow
def test_kills_lose_nothing_and_damage_nothing(tmp_path: Path):
    killed_while_working(tmp_path / "d", examples(12, 200), 0)
