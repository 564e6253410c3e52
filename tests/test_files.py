"""Files change whole or not at all, one writer at a time."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mlxspec
from mlxspec import files
from mlxspec.errors import StoreError
from mlxspec.files import replaced, sole_writer
from mlxspec.store import Learner, add_to_store, build_store, open_store
from tests.store.tokenizers import FIRST


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def learn(path: Path) -> None:
    with Learner(path, FIRST) as learner:
        learner.add([5] * 3000)


def fail_with(error: BaseException):
    def failing(*arguments: object) -> None:
        raise error

    return failing


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StoreError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_whatever_interrupts_a_write_leaves_the_old_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    error: BaseException,
    seen: type[BaseException],
):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    before = path.read_bytes()
    monkeypatch.setattr(files.os, function, fail_with(error))
    for write in (
        learn,
        lambda path: add_to_store(path, [[4, 4]], FIRST),
        lambda path: build_store(path, [[4, 4]], FIRST, force=True),
        lambda path: build_store(tmp_path / "new", [[4, 4]], FIRST),
        lambda path: learn(tmp_path / "new"),
    ):
        with pytest.raises(seen):
            write(path)
        assert names(tmp_path) == {"s"}
        assert path.read_bytes() == before


def test_a_limit_on_file_size_is_one_line_and_leaves_the_old_store(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"s: cannot be written \(File too large\)"):
            learn(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == {"s"}
    assert list(open_store(path, FIRST).tokens) == [1, 2, 3, -1]


def test_readers_keep_what_they_opened(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    store = open_store(path)
    build_store(path, [[1, 2, 4]], FIRST, force=True)
    path.unlink()
    assert [store.tokens[p] for _, p in store.occurrences([1, 2], 9)] == [3]


def test_who_waits_for_the_old_file_then_waits_for_the_new_one(tmp_path: Path):
    """Three writers of one file, each of which replaces it over and over: none is lost."""
    path = tmp_path / "file"
    path.write_text("")

    def append(letter: str) -> None:
        for _ in range(10):
            with sole_writer(path, StoreError, create=False):
                text = path.read_text()
                with replaced(path, StoreError) as file:
                    file.write((text + letter).encode())

    threads = [threading.Thread(target=append, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text()) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    assert names(tmp_path) == {"file"}


def test_a_file_that_is_replaced_before_its_lock_is_taken_is_left_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, newer = tmp_path / "file", tmp_path / "newer"
    path.write_text("old")
    newer.write_text("new")
    flock = fcntl.flock

    def late_flock(descriptor: int, flags: int) -> None:
        if newer.exists():
            newer.replace(path)
        flock(descriptor, flags)

    monkeypatch.setattr(files.fcntl, "flock", late_flock)
    with (
        sole_writer(path, StoreError, create=False),
        path.open() as current,
        pytest.raises(BlockingIOError),
    ):
        flock(current, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    killing = (
        "import os, sys; from mlxspec.store import Learner\n"
        "from tests.store.tokenizers import FIRST\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "with Learner(sys.argv[1], FIRST) as learner: learner.add([4, 5])"
    )
    root = Path(mlxspec.__file__).parents[1]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", killing, str(path)], cwd=root)
    assert len(names(tmp_path)) == 2  # the second one removed what the first had left
    others = {".s.other.0123456789abcdef.partial", ".t.0123456789abcdef.partial"}
    for name in others:
        (tmp_path / name).touch()
    assert list(open_store(path, FIRST).tokens) == [1, 2, 3, -1]
    learn(path)
    assert names(tmp_path) == {"s"} | others


def test_a_writer_that_never_ends_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    with (
        sole_writer(path, StoreError, create=False),
        pytest.raises(StoreError, match="another process has been writing it"),
    ):
        learn(path)
    learn(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        build_store(tmp_path / "s", [[1, 2, 3]], FIRST)


def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path):
    with pytest.raises(StoreError, match=r"there is no directory .*nowhere"):
        build_store(tmp_path / "nowhere" / "s", [[1, 2, 3]], FIRST)
    with pytest.raises(StoreError, match="there is no directory"):
        Learner(tmp_path / "nowhere" / "s", FIRST)
