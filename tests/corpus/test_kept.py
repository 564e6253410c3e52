"""Answers kept on disk: over runs, by several processes, and whatever happens to the files."""

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec.corpus import KeptTexts, Memory, part
from mlxspec.corpus.contents import (
    contents,
    earned_by_day,
    finished,
    forget,
    kept_texts,
)
from mlxspec.corpus.part import SUPERSEDED, Merged
from mlxspec.corpus.part_file import FilePart, write_part
from mlxspec.corpus.tokenizer_identity import identify
from tests.corpus.test_memory import looked_up, make_small
from tests.support.examples import examples
from tests.support.hostile import mutated
from tests.support.tokenizers import FIRST, SECOND

IDENTITY = identify(FIRST)
ROOT = Path(mlxspec.__file__).parents[1]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def opened(directory: Path, lines: list[str] | None = None, **options: int) -> Memory:
    """A memory that has taken over what is there."""
    kept = KeptTexts(directory, IDENTITY, **options)
    held = Memory(kept=kept, on_trouble=fail if lines is None else lines.append)
    held.settle()
    return held


def fail(line: str) -> None:
    raise AssertionError(line)


def all_texts(directory: Path) -> list[list[int]]:
    """Every kept text, sorted."""
    return sorted(text.tokens.tolist() for text in kept_texts(KeptTexts(directory, IDENTITY), fail))


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


def test_answers_are_found_in_the_next_run(tmp_path: Path):
    answers = some_answers(60)
    for start in range(0, 60, 7):
        learn(tmp_path, answers[start : start + 7])
    assert all_texts(tmp_path) == sorted(answers)
    held = opened(tmp_path)
    for answer in answers:
        assert looked_up(held, answer[:-1])[0] == (len(answer) - 1, answer[-1:])
    assert len(held._shelf.searched.parts) <= 4
    held.close()


def test_nothing_of_a_prompt_is_kept(tmp_path: Path):
    prompt = [91, 92, 93]
    answers = [[*range(first, first + 5)] for first in range(0, 85, 5)]
    held = opened(tmp_path)
    for answer in answers:
        held.add(answer, prompt=prompt)
        held.settle()
        found = held.look_up(prompt, limit=1).tokens[:-1]
        assert found in (answer, [])  # sorted answers are not found by their prompts
    assert files(tmp_path, "part")
    assert all_texts(tmp_path) == sorted(answers)
    held.close()
    assert all_texts(tmp_path) == sorted(answers)
    encoded = np.array(prompt, np.int32).tobytes()
    assert not any(encoded in file.read_bytes() for file in tmp_path.iterdir())


def test_files_and_directory_are_their_owners_alone(tmp_path: Path):
    umask = os.umask(0)
    try:
        learn(tmp_path / "new", some_answers(20))
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
    kinds = {path.suffix for path in (tmp_path / "new").iterdir()}
    assert kinds <= {".part", ".used", ".journal", ""}
    assert ".part" in kinds


def test_a_part_takes_no_more_than_its_page_says(tmp_path: Path):
    pick = random.Random(0)
    learn(tmp_path, [[pick.randrange(100) for _ in range(200)] for _ in range(100)])
    told = contents(KeptTexts(tmp_path, IDENTITY), fail)
    assert (told.texts, told.tokens) == (100, 20000)
    assert told.nbytes <= 10 * told.tokens


def test_counts_times_and_figures_by_day(tmp_path: Path):
    before = int(time.time())
    answers = some_answers(30)
    learn(tmp_path, answers)
    kept = KeptTexts(tmp_path, IDENTITY)
    told = contents(kept, fail)
    assert (told.texts, told.tokens) == (30, sum(map(len, answers)))
    assert told.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert told.oldest is not None
    assert told.newest is not None
    assert before <= told.oldest <= told.newest <= time.time()
    days = earned_by_day(kept, fail).values()
    assert sum(day["answers"] for day in days) == 30
    assert sum(day["tokens"] for day in days) == told.tokens
    assert sum(day["context"] for day in days) == 30
    assert sum(day["lookahead"] for day in days) == 0


def test_an_equal_answer_is_kept_once_over_runs(tmp_path: Path):
    answers = some_answers(20)
    for _ in range(3):
        learn(tmp_path, answers)
    assert all_texts(tmp_path) == sorted(answers)
    kept = KeptTexts(tmp_path, IDENTITY)
    assert contents(kept, fail).texts == 20


def test_what_is_full_forgets_what_was_not_used_for_the_longest_time(tmp_path: Path):
    answers = some_answers(200)
    learn(tmp_path, answers[:20], max_tokens=2000)
    held = opened(tmp_path, max_tokens=2000)
    held.settle(tidy=True)
    for one in held._shelf.searched.parts:
        one.used[one.used != SUPERSEDED] = 1
    for answer in answers[:10]:
        held.used(held.look_up(answer).sources[0])
    held.close()
    learn(tmp_path, answers[20:140], max_tokens=2000)
    kept = all_texts(tmp_path)
    assert 1000 < sum(map(len, kept)) <= 2000
    assert answers[139] in kept


def test_days_of_use_are_shared_by_processes_and_kept(tmp_path: Path):
    answers = some_answers(30)
    learn(tmp_path, answers)
    first, second = opened(tmp_path), opened(tmp_path)
    first.settle(tidy=True)
    second.settle(tidy=True)
    (source,) = first.look_up(answers[0][:-1], limit=1).sources
    for held in (first, second):
        for one in held._shelf.searched.parts:
            one.used[:] = 7
    first.used(source)
    marked = [int((one.used == part.today()).sum()) for one in second._shelf.searched.parts]
    assert sum(marked) == 1
    first.close()
    second.close()
    again = opened(tmp_path)
    assert sum(int((p.used == part.today()).sum()) for p in again._shelf.searched.parts) == 1
    again.close()


def test_what_other_processes_keep_is_seen_when_asked_for(tmp_path: Path):
    first, second = opened(tmp_path), opened(tmp_path)
    answers = some_answers(40)
    for answer in answers:
        second.add(answer)
    second.settle(tidy=True)
    deadline = time.monotonic() + 20
    while not looked_up(first, answers[0]) and time.monotonic() < deadline:
        first.refresh()
        first.settle()
    assert looked_up(first, answers[0][:-1])[0] == (len(answers[0]) - 1, answers[0][-1:])
    first.close()
    second.close()
    assert all_texts(tmp_path) == sorted(answers)


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
    third.close()
    assert all_texts(tmp_path) == sorted(answers)


def test_who_cannot_merge_waits_for_nothing(tmp_path: Path):
    kept = KeptTexts(tmp_path, IDENTITY)
    answers = some_answers(60)
    with kept.merging() as alone:
        assert alone
        learn(tmp_path, answers)
        assert files(tmp_path, ".part") == []
    assert all_texts(tmp_path) == sorted(answers)
    learn(tmp_path, [[1, 2, 3]])
    assert all_texts(tmp_path) == sorted([*answers, [1, 2, 3]])
    assert files(tmp_path, ".part")


# Files that are not as they were written.


def test_every_flipped_bit_is_borne(tmp_path: Path):
    """Opened or left aside, and whatever is read from what remains was written so."""
    answers = some_answers(45)
    learn(tmp_path / "d", answers[:40])
    directory = tmp_path / "d"
    while not files(directory, ".journal"):
        learn(directory, [answers.pop()])
    whole = {path: path.read_bytes() for path in directory.iterdir()}
    kinds = {path.suffix for path in whole}
    assert {".part", ".used", ".journal"} <= kinds
    pick = random.Random(0)
    everything = all_texts(directory)
    (journal,) = files(directory, ".journal")
    kept = KeptTexts(directory, IDENTITY)
    journaled = [[*np.frombuffer(a.text, "<i4")] for a in kept.journaled(journal.stem, fail)]
    for path, data in whole.items():
        places = range(len(data)) if path.suffix == ".journal" else range(0, len(data), 13)
        for place in [*places][:150]:
            for name in directory.iterdir():
                name.unlink()
            for other, content in whole.items():
                other.write_bytes(content)
            flipped = bytearray(data)
            flipped[place] ^= 1 << pick.randrange(8)
            path.write_bytes(flipped)
            lines: list[str] = []
            held = opened(directory, lines)
            for answer in answers[::6]:
                tokens, occurrences, _ = held.look_up(answer[:-1])
                assert all(-1 <= token < 100 for token in tokens)
                assert len(occurrences) <= 8
            held.add([1, 2, 3])
            held.close()
            kept = KeptTexts(directory, IDENTITY)
            assert all("\n" not in line for line in lines)
            found = [text.tokens.tolist() for text in kept_texts(kept, lines.append)]
            assert [1, 2, 3] in found
            assert all(text in everything or text == [1, 2, 3] for text in found)
            if path.suffix == ".used":
                assert len(found) >= 30
            elif path.suffix == ".part":
                assert all(text in found for text in journaled)


def test_a_damaged_part_is_left_aside_and_not_merged(tmp_path: Path):
    learn(tmp_path, some_answers(40))
    for path in files(tmp_path, ".part"):
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
    lines: list[str] = []
    held = opened(tmp_path, lines)
    for answer in some_answers(200, seed=1):
        held.add(answer)
    held.close()
    assert files(tmp_path, ".damaged")
    assert lines
    for line in lines:
        assert ".part: is damaged (a checksum is wrong); it is left aside" in line
    texts = all_texts(tmp_path)
    assert all(answer in texts for answer in some_answers(200, seed=1))


@pytest.mark.parametrize("size", [0, 1, 60, 200])
def test_files_that_are_cut_short_are_passed_over(tmp_path: Path, size: int):
    learn(tmp_path, some_answers(40))
    for path in tmp_path.iterdir():
        os.truncate(path, min(size, path.stat().st_size))
    lines: list[str] = []
    held = opened(tmp_path, lines)
    assert held.look_up(some_answers(1)[0]).occurrences == []
    held.add([1, 2, 3])
    held.close()
    assert [1, 2, 3] in all_texts_of_what_can_be_read(tmp_path)
    assert any("is cut short" in line for line in lines)


def all_texts_of_what_can_be_read(directory: Path) -> list[list[int]]:
    return [text.tokens.tolist() for text in kept_texts(KeptTexts(directory, IDENTITY), str)]


def test_another_tokenizers_files_are_passed_over(tmp_path: Path):
    learn(tmp_path, some_answers(45))
    lines: list[str] = []
    other = Memory(kept=KeptTexts(tmp_path, identify(SECOND)), on_trouble=lines.append)
    other.settle()
    assert other.look_up(some_answers(1)[0]).occurrences == []
    other.close()
    assert lines


def test_a_torn_end_is_cut_off(tmp_path: Path):
    learn(tmp_path, [[1, 2, 3], [4, 5, 6]])
    (journal,) = files(tmp_path, ".journal")
    data = journal.read_bytes()
    for end in range(len(data) - 1, 0, -3):
        for path in files(tmp_path, ".journal"):
            path.unlink()
        journal.write_bytes(data[:end])
        learn(tmp_path, [[7, 8, 9]])
        found = all_texts(tmp_path)
        assert [7, 8, 9] in found
        whole = (len(data) - 48 - 4) // 2
        expected = [[1, 2, 3]] if end >= len(data) - whole else []
        assert found == [*expected, [7, 8, 9]]


@pytest.mark.parametrize("limit", [0, 20, 100, 600, 3000])
def test_a_full_disk_leaves_the_old_state_and_one_line(tmp_path: Path, limit: int):
    answers = some_answers(40)
    learn(tmp_path, answers)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines: list[str] = []
    new = some_answers(60, seed=1)
    held = opened(tmp_path, lines)
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
    assert len(lines) == 1
    assert "File too large; answers are remembered until this process ends" in lines[0]
    found = all_texts(tmp_path)
    assert all(answer in found for answer in answers)
    assert all(text in answers or text in new for text in found)
    learn(tmp_path, new)
    assert all_texts(tmp_path) == sorted(answers + new)


# Forgetting.


def test_forgetting_takes_texts_out_of_all_files(tmp_path: Path):
    answers = some_answers(45)
    learn(tmp_path, answers)
    kept = KeptTexts(tmp_path, IDENTITY)
    gone = answers[::3]
    number = forget(kept, lambda text: text.tokens.tolist() in gone, fail)
    assert number == len(gone)
    assert all_texts(tmp_path) == sorted(answer for answer in answers if answer not in gone)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for answer in answers:
        assert (np.array(answer, "<i4").tobytes() in written) == (answer not in gone)
    assert forget(kept, lambda text: True, fail) == 30
    assert {path.name for path in tmp_path.iterdir()} <= {"lock"}


def test_what_is_damaged_is_not_told_and_is_forgotten_with_whatever_is(tmp_path: Path):
    learn(tmp_path, some_answers(45))
    for journal in files(tmp_path, ".journal"):
        journal.unlink()
    learn(tmp_path, [[1, 2, 3]])
    (whole,) = files(tmp_path, ".journal")
    damaged = whole.with_name(f"{'0' * 16}.journal")
    damaged.write_bytes(b"no header" + whole.read_bytes())
    parts = files(tmp_path, ".part")
    for path in parts:
        data = bytearray(path.read_bytes())
        at = FilePart(path, IDENTITY)._ends[1]
        data[at : at + 4] = b"\xfe" * 4  # an id below 0
        path.write_bytes(data)
    lines: list[str] = []
    told = [
        text.tokens.tolist() for text in kept_texts(KeptTexts(tmp_path, IDENTITY), lines.append)
    ]
    assert told == [[1, 2, 3]]
    assert any(".part: is damaged (a checksum is wrong); the answers in it are" in _ for _ in lines)
    forgotten = forget(KeptTexts(tmp_path, IDENTITY), lambda text: False, lines.append)
    assert forgotten == 0
    assert all_texts(tmp_path) == [[1, 2, 3]]
    assert not files(tmp_path, ".part") + files(tmp_path, ".damaged")
    assert not damaged.exists()
    assert sum(line.endswith("is removed, with all that was in it") for line in lines) == 1 + len(
        parts
    )


def test_what_another_process_merges_meanwhile_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learn(tmp_path, [[1, 2, 3]])
    assert not files(tmp_path, ".part")
    journal_names = KeptTexts.journal_names
    new = some_answers(40, seed=1)

    def merged_first(kept: KeptTexts) -> set[str]:
        monkeypatch.undo()
        make_small(monkeypatch)
        learn(tmp_path, new)
        return journal_names(kept)

    monkeypatch.setattr(KeptTexts, "journal_names", merged_first)
    told = all_texts(tmp_path)
    assert files(tmp_path, ".part")
    assert told == sorted([[1, 2, 3], *new])


def test_nothing_forgotten_comes_back_from_a_living_process(tmp_path: Path):
    answers = some_answers(43)
    held = opened(tmp_path)
    for answer in answers:
        held.add(answer)
    held.settle(tidy=True)
    gone = [answers[0], answers[30], answers[41], answers[42]]
    assert len(held._shelf.searched.live) > 0
    forget(KeptTexts(tmp_path, IDENTITY), lambda text: text.tokens.tolist() in gone, fail)
    held.refresh()
    held.settle()
    for answer in answers:
        found = looked_up(held, answer[:-1])
        is_found = bool(found) and found[0] == (len(answer) - 1, answer[-1:])
        assert is_found == (answer not in gone)
    new = some_answers(100, seed=1)
    for answer in new:
        held.add(answer)
    held.close()
    remaining = [answer for answer in answers if answer not in gone]
    assert all_texts(tmp_path) == sorted(remaining + new)


def test_a_process_that_did_not_look_forgets_before_it_writes(tmp_path: Path):
    held = opened(tmp_path)
    held.add([1, 2, 3])
    held.add([4, 5, 6])
    held.settle()
    forget(KeptTexts(tmp_path, IDENTITY), lambda text: text.tokens[0] == 1, fail)
    held.add([7, 8, 9])
    held.close()
    assert all_texts(tmp_path) == [[4, 5, 6], [7, 8, 9]]


def test_sorted_answers_that_wait_for_the_lock_are_forgotten_too(tmp_path: Path):
    kept = KeptTexts(tmp_path, IDENTITY)
    answers = some_answers(30)
    held = opened(tmp_path)
    with kept.merging():
        for answer in answers:
            held.add(answer)
        held.settle(tidy=True)
        assert files(tmp_path, ".part") == []
    gone = answers[:25]
    forget(kept, lambda text: text.tokens.tolist() in gone, fail)
    held.refresh()
    held.settle(tidy=True)
    new = some_answers(30, seed=1)
    for answer in new:
        held.add(answer)
    held.close()
    assert all_texts(tmp_path) == sorted(answers[25:] + new)


def test_a_journal_that_was_moved_by_a_killed_process_is_found(tmp_path: Path):
    learn(tmp_path, [[1, 2, 3]])
    (journal,) = files(tmp_path, ".journal")
    journal.rename(journal.with_suffix(".moved"))
    held = opened(tmp_path)
    for answer in some_answers(30):
        held.add(answer)
    held.close()
    assert [1, 2, 3] in all_texts(tmp_path)


# Files that somebody means harm with.


@settings(max_examples=examples(60))
@given(
    tokens=st.lists(st.one_of(st.integers(-2, 9), st.sampled_from([99, 100, 2**31 - 1, -(2**31)]))),
    order=st.lists(st.one_of(st.integers(-2, 30), st.sampled_from([2**31 - 1, -(2**31)]))),
    ends=st.lists(st.one_of(st.integers(0, 30), st.just(2**32 - 1)), max_size=4),
)
def test_what_has_the_right_checksums_and_makes_no_sense_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], order: list[int], ends: list[int]
):
    directory = tmp_path_factory.mktemp("memory")
    learn(directory, [[5, 6, 7, 8]])
    n_places = len(tokens) - 2 * len(ends)
    assume(n_places >= 0)
    order = [*order, *[1] * n_places][:n_places]
    write_nonsense(directory, tokens, order, ends)
    lines: list[str] = []
    held = opened(directory, lines)
    for tail in ([1, 2], [0], [5], [9, 9, 9]):
        found = held.look_up(tail)
        assert all(-1 <= token < 100 for token in found.tokens)
    for answer in some_answers(10):
        held.add(answer)
    held.close()
    kept = KeptTexts(directory, IDENTITY)
    found = [text.tokens.tolist() for text in kept_texts(kept, lines.append)]
    assert all(answer in found for answer in [*some_answers(10), [5, 6, 7, 8]])
    assert all(0 <= token < 100 for text in found for token in text)


def write_nonsense(directory: Path, tokens: list[int], order: list[int], ends: list[int]) -> None:
    """A part with these numbers, and checksums that are right."""
    records = np.zeros(len(ends), part.RECORD)
    records["end"] = ends

    class Nonsense(Merged):
        def __init__(self) -> None:
            self.records = records
            self.n_tokens, self.n_places = len(tokens), len(order)

        def used(self) -> np.ndarray:
            return np.ones(len(ends), np.uint16)

        def tokens(self) -> Iterator[np.ndarray]:
            yield np.array(tokens, np.int32)

        def order(self) -> Iterator[np.ndarray]:
            yield np.array(order, np.int32)

    finished(write_part(directory, Nonsense(), IDENTITY, ()))


@settings(max_examples=examples(60))
@given(data=st.data())
def test_whatever_stands_in_a_journal_is_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    directory = tmp_path_factory.mktemp("memory")
    learn(directory, [[1, 2, 3], [4, 5, 6]])
    (journal,) = files(directory, ".journal")
    journal.write_bytes(data.draw(mutated(journal.read_bytes())))
    lines: list[str] = []
    held = opened(directory, lines)
    held.add([7, 8, 9])
    held.close()
    found = [
        text.tokens.tolist() for text in kept_texts(KeptTexts(directory, IDENTITY), lines.append)
    ]
    assert [7, 8, 9] in found
    assert all(text in ([1, 2, 3], [4, 5, 6], [7, 8, 9]) for text in found)


def test_a_part_that_proves_to_be_damaged_while_drafting_is_left_out(tmp_path: Path):
    learn(tmp_path, [[1, 2, 3, 4]])
    write_nonsense(tmp_path, [1, 2, 150, -1], [1, 2], [4])
    lines: list[str] = []
    held = opened(tmp_path, lines)
    assert looked_up(held, [1, 2]) == [(2, [3, 4])]
    assert len(lines) == 1
    assert lines[0].endswith(".part: is damaged; what it holds is not drafted from")
    for answer in some_answers(10):
        held.add(answer)
    held.close()
    assert len(files(tmp_path, ".damaged")) == 1


# Processes that end, and such that are killed.


def test_what_was_added_last_is_kept_at_the_processs_end(tmp_path: Path):
    program = textwrap.dedent(
        """
        import sys, pathlib
        from mlxspec.corpus import KeptTexts, Memory, identify
        from tests.support.tokenizers import FIRST
        memory = Memory(kept=KeptTexts(pathlib.Path(sys.argv[1]), identify(FIRST)))
        for number in range(50):
            memory.add([number, 1, 2, 3])
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    assert all_texts(tmp_path) == [[number, 1, 2, 3] for number in range(50)]


WORKING = textwrap.dedent(
    """
    import sys, random, pathlib
    from mlxspec.corpus import KeptTexts, Memory, memory, part
    from mlxspec.corpus.tokenizer_identity import identify
    from tests.support.tokenizers import FIRST
    memory.LIVE_TOKENS, part._SORTED_ANEW = 40, 80
    directory, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    lines = []
    held = Memory(kept=KeptTexts(directory, identify(FIRST)), on_trouble=lines.append)
    pick = random.Random(number)
    index = 0
    while True:
        base = [number // 10000, number // 100 % 100, number % 100, index // 100, index % 100]
        answer = base + [pick.randrange(100) for _ in range(pick.randrange(1, 20))]
        held.add(answer)
        held.settle()
        if lines:
            print("trouble", lines, flush=True)
        print(*answer, flush=True)
        index += 1
        if index % 7 == 0:
            held.refresh()
        held.look_up(answer[:4])
    """
)


def killed_while_working(directory: Path, kills: int, seed: int) -> None:
    """Four processes learn, sort and merge; each is killed, and another takes its place."""
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
                    [sys.executable, "-c", WORKING, str(directory), str(number)],
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    for number in range(kills):
        start(number)
        if len(running) == 4:
            time.sleep(pick.random() * 0.6)
            victim = running.pop(pick.randrange(4))
            victim.kill()
            victim.wait()
    for process in running:
        process.kill()
        process.wait()
    for output in outputs:
        lines = output.read_text().split("\n")[:-1]  # the last one may be torn
        for line in lines:
            assert line.replace(" ", "").isdigit(), line
            handed_over.append([*map(int, line.split())])
    texts = all_texts(directory)
    missing = [answer for answer in handed_over if answer not in texts]
    assert missing == []
    held = opened(directory)
    for answer in handed_over[-50:]:
        assert looked_up(held, answer[:-1])[0] == (len(answer) - 1, answer[-1:])
    held.close()
    after = all_texts(directory)
    assert all(answer in after for answer in handed_over)
    assert len(handed_over) > kills
    assert files(directory, ".part")
    assert not list(directory.glob("*.damaged"))


@pytest.mark.slow
def test_kills_lose_nothing_and_damage_nothing(tmp_path: Path):
    killed_while_working(tmp_path / "d", examples(12, 200), 0)
