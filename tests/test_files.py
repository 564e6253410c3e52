"""Files change whole or not at all, one writer at a time."""

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache

import mlxspec
from mlxspec import files, save_prompt_cache
from mlxspec.cli.common.output import ReportOptions
from mlxspec.corpus.store import add_to_store, build_store, open_store
from mlxspec.corpus.suffix_index import SEPARATOR
from mlxspec.errors import OptionError, PromptCacheError, StoreError
from mlxspec.files import replaced, sole_writer
from tests.support.tokenizers import FIRST


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def extend(path: Path) -> None:
    add_to_store(path, [[5] * 3000], FIRST)


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
        extend,
        lambda path: add_to_store(path, [[4, 4]], FIRST),
        lambda path: build_store(path, [[4, 4]], FIRST, force=True),
        lambda path: build_store(tmp_path / "new", [[4, 4]], FIRST),
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
            extend(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == {"s"}
    assert open_store(path, FIRST).index.tokens.tolist() == [1, 2, 3, -1]


def test_readers_keep_what_they_opened(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    store = open_store(path)
    build_store(path, [[1, 2, 4]], FIRST, force=True)
    path.unlink()
    assert store.look_up([1, 2]).tokens == [3, SEPARATOR]


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


def test_a_new_file_under_the_name_of_a_leftover_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another process removes the leftover, and a writer takes the name, before this one looks."""
    leftover = tmp_path / ".file.0123456789abcdef.partial"
    leftover.write_text("left")
    newer = tmp_path / "newer"
    newer.write_text("new")
    flock = fcntl.flock

    def late_flock(descriptor: int, flags: int) -> None:
        newer.replace(leftover)
        flock(descriptor, flags)

    monkeypatch.setattr(files.fcntl, "flock", late_flock)
    files.remove_leftovers(tmp_path / "file")
    assert leftover.read_text() == "new"


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path):
    path = tmp_path / "s"
    build_store(path, [[1, 2, 3]], FIRST)
    killing = (
        "import os, sys; from mlxspec.corpus.store import add_to_store\n"
        "from tests.support.tokenizers import FIRST\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "add_to_store(sys.argv[1], [[4, 5]], FIRST)"
    )
    root = Path(mlxspec.__file__).parents[1]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", killing, str(path)], cwd=root)
    assert len(names(tmp_path)) == 2  # the second one removed what the first had left
    others = {".s.other.0123456789abcdef.partial", ".t.0123456789abcdef.partial"}
    for name in others:
        (tmp_path / name).touch()
    assert open_store(path, FIRST).index.tokens.tolist() == [1, 2, 3, -1]
    extend(path)
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
        extend(path)
    extend(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        build_store(tmp_path / "s", [[1, 2, 3]], FIRST)


def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path):
    with pytest.raises(StoreError, match=r"there is no directory .*nowhere"):
        build_store(tmp_path / "nowhere" / "s", [[1, 2, 3]], FIRST)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


WRITERS = {
    "store": (lambda path: build_store(path, [[1, 2, 3]], FIRST, force=True), StoreError),
    "prompt cache": (lambda path: save_prompt_cache(path, [cache.KVCache()]), PromptCacheError),
    "report": (
        lambda path: ReportOptions(html=path).show_tables({}, lambda: ["new"]),
        OptionError,
    ),
}
KINDS = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "link": lambda path: path.symlink_to("victim"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_replaces_or_follows_what_is_no_regular_file(
    tmp_path: Path, writer: str, kind: str
):
    write, error = WRITERS[writer]
    (tmp_path / "victim").write_text("irreplaceable")
    path = tmp_path / "x.safetensors"
    KINDS[kind](path)
    before = os.lstat(path)
    with pytest.raises(error, match=r"x.safetensors: is a .*; name (a|the)"):
        write(path)
    assert os.path.samestat(os.lstat(path), before)
    assert (tmp_path / "victim").read_text() == "irreplaceable"
    assert names(tmp_path) == {"victim", "x.safetensors"}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_every_killed_writer_left_goes_with_its_next_write_and_no_other_file(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
):
    write, _ = WRITERS[writer]
    path = tmp_path / "x.safetensors"
    # A forked child computes nothing on a GPU.
    monkeypatch.setattr(mx, "save_safetensors", lambda file, *_: file.write(b"new"))
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: signal.raise_signal(signal.SIGKILL)
        write(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    left = names(tmp_path) - {path.name}
    assert len(left) == 1
    path.unlink(missing_ok=True)  # the empty one that a writer has locked
    with replaced(path, StoreError) as living:
        living.write(b"alive")
        during = names(tmp_path) - left
        assert len(during) == 1
        write(path)
        assert names(tmp_path) == {path.name} | during
        path.unlink()
    assert path.read_bytes() == b"alive"
    assert names(tmp_path) == {path.name}


def test_files_that_hold_prompts_are_readable_by_their_owner_alone(tmp_path: Path):
    umask = os.umask(0)
    try:
        for name, (write, _) in WRITERS.items():
            path = tmp_path / f"{name}.safetensors"
            write(path)
            expected = 0o644 if name == "report" else 0o600
            assert path.stat().st_mode & 0o777 == expected
    finally:
        os.umask(umask)


def test_a_name_as_long_as_names_may_be_is_written(tmp_path: Path):
    for name in ("x" * 255, "é" * 127):
        with replaced(tmp_path / name, StoreError) as file:
            file.write(b"new")
    assert names(tmp_path) == {"x" * 255, "é" * 127}
