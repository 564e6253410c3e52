"""Outputs that a store learns, from one process and from several."""

import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec
from mlxspec.corpus.building import build_store
from mlxspec.corpus.learner import Learner
from mlxspec.corpus.store import open_store
from mlxspec.corpus.suffix_index import SEPARATOR
from mlxspec.errors import OptionError
from tests.corpus.test_store import texts_in
from tests.support.tokenizers import FIRST

# Learns 20 outputs of its own, one after the other, each with a write of the file.
LEARNING = """
import sys
from mlxspec.corpus.learner import Learner
from tests.support.tokenizers import FIRST
path, number = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for index in range(20):
    with Learner(path, FIRST) as learner:
        learner.add([number, index, number])
"""


def learn(path: Path, *outputs: list[int], **options: int) -> list[list[int]]:
    """Learn outputs and return the texts of the store."""
    with Learner(path, FIRST, **options) as learner:
        for output in outputs:
            learner.add(output)
    return texts_in(open_store(path, FIRST))


def test_outputs_are_found_in_the_next_process(tmp_path: Path):
    build_store(tmp_path / "s", [[1, 2, 3]], FIRST)
    assert learn(tmp_path / "s", [4, 5, 6], [7, 8]) == [[1, 2, 3], [4, 5, 6], [7, 8]]
    store = open_store(tmp_path / "s", FIRST)
    assert store.look_up([4, 5]).tokens == [6, SEPARATOR]
    assert store.info.learned_tokens == 5


def test_a_store_begins_with_what_is_learned(tmp_path: Path):
    assert learn(tmp_path / "s", [4, 5, 6]) == [[4, 5, 6]]
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_without_an_output_nothing_is_written(tmp_path: Path):
    with Learner(tmp_path / "s", FIRST) as learner:
        learner.add([])
        learner.add([3])
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_outputs_go_first_and_built_texts_stay(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, [[1] * 50], FIRST)
    assert learn(path, [2, 2, 2], [3, 3], max_tokens=6) == [[1] * 50, [2, 2, 2], [3, 3]]
    assert learn(path, [4, 4], max_tokens=6) == [[1] * 50, [3, 3], [4, 4]]
    assert learn(path, [5, 6, 7, 8, 9, 8, 7], max_tokens=6) == [[1] * 50, [6, 7, 8, 9, 8, 7]]


def test_a_process_that_never_ends_remembers_no_more_than_the_store_will(tmp_path: Path):
    learner = Learner(tmp_path / "s", FIRST, max_tokens=10)
    for index in range(1000):
        learner.add([index % 100, 1, 2])
    assert sum(map(len, learner._outputs)) <= 10 * 4


def test_an_output_that_comes_again_is_kept_once_as_the_newest(tmp_path: Path):
    assert learn(tmp_path / "s", [2, 2], [3, 3]) == [[2, 2], [3, 3]]
    assert learn(tmp_path / "s", [2, 2]) == [[3, 3], [2, 2]]


def test_what_was_generated_before_an_interrupt_is_learned(tmp_path: Path):
    path = tmp_path / "s"

    def interrupted() -> None:
        with Learner(path, FIRST) as learner:
            learner.add([4, 5, 6])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert texts_in(open_store(path)) == [[4, 5, 6]]


def test_outputs_saved_once_are_not_saved_again(tmp_path: Path):
    path = tmp_path / "s"
    with Learner(path, FIRST) as learner:
        learner.add([4, 5])
        learner.save()
        path.unlink()
    assert not path.exists()


def test_an_empty_file_is_taken_for_a_store_to_be(tmp_path: Path):
    (tmp_path / "s").touch()
    assert learn(tmp_path / "s", [4, 5]) == [[4, 5]]


def test_learning_nothing_is_no_option(tmp_path: Path):
    with pytest.raises(OptionError, match="max_tokens is 0"):
        Learner(tmp_path / "s", FIRST, max_tokens=0)


def test_processes_that_learn_at_once_lose_nothing(tmp_path: Path):
    """Three processes, with no store at first, so that they race for its creation too."""
    path = tmp_path / "s"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEARNING, str(path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(mlxspec.__file__).parents[1],
            text=True,
        )
        for number in (1, 2, 3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    outputs = texts_in(open_store(path, FIRST))
    assert sorted(outputs) == [[n, index, n] for n in (1, 2, 3) for index in range(20)]
    assert list(tmp_path.iterdir()) == [path]
