"""Files change completely or not at all, with one writer at a time."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache

import mlxspec
from mlxspec import files, save_prompt_cache
from mlxspec.cli.common.output import ReportOptions
from mlxspec.errors import FileError
from mlxspec.files import new_directory, replaced


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def write(path: Path, content: bytes = b"new" * 3000) -> None:
    with replaced(path) as file:
        file.write(content)


def fail_with(error: BaseException):
    def failing(*arguments: object) -> None:
        raise error

    return failing


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FileError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_whatever_interrupts_a_write_leaves_the_old_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    error: BaseException,
    seen: type[BaseException],
):
    path = tmp_path / "s"
    write(path, b"old")
    monkeypatch.setattr(files.os, function, fail_with(error))
    for name in ("s", "new"):
        with pytest.raises(seen):
            write(tmp_path / name)
        assert names(tmp_path) == {"s"}
        assert path.read_bytes() == b"old"


def test_a_limit_on_file_size_is_one_line_and_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "s"
    write(path, b"old")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(FileError, match=r"s: cannot be written \(File too large\)"):
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == {"s"}
    assert path.read_bytes() == b"old"


def test_readers_keep_what_they_opened(tmp_path: Path):
    path = tmp_path / "s"
    write(path, b"old")
    with path.open("rb") as file:
        write(path, b"new")
        path.unlink()
        assert file.read() == b"old"


def test_who_waits_for_another_writer_sees_what_it_wrote(tmp_path: Path):
    """Three processes update one file repeatedly, and no update is lost."""
    path = tmp_path / "file"
    path.write_text("")

    def append(letter: str) -> None:
        for _ in range(10):
            with replaced(path) as file:
                file.write((path.read_text() + letter).encode())

    threads = [threading.Thread(target=append, args=(letter,)) for letter in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.read_text()) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    assert names(tmp_path) == {"file"}


def test_a_temporary_file_that_leads_to_another_file_is_not_written(tmp_path: Path):
    (tmp_path / "victim").write_text("irreplaceable")
    for trap in (os.link, os.symlink):
        trap(tmp_path / "victim", tmp_path / ".file.partial")
        with replaced(tmp_path / "file") as file:
            file.write(b"new")
        assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "victim").read_text() == "irreplaceable"
    assert names(tmp_path) == {"victim", "file"}


@pytest.mark.slow
def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path):
    path = tmp_path / "s"
    write(path, b"old")
    killing = (
        "import os, sys; from pathlib import Path; from mlxspec.files import replaced\n"
        "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
        "with replaced(Path(sys.argv[1])) as file: file.write(b'new')"
    )
    root = Path(mlxspec.__file__).parents[1]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", killing, str(path)], cwd=root)
    assert names(tmp_path) == {"s", ".s.partial"}
    assert path.read_bytes() == b"old"
    write(path)
    assert names(tmp_path) == {"s"}


def test_a_writer_waits_for_another(tmp_path: Path):
    path = tmp_path / "s"
    write(path, b"old")
    with ThreadPoolExecutor() as pool:
        with replaced(path) as file:
            file.write(path.read_bytes())
            second = pool.submit(write, path)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.1)
        second.result(timeout=10)
    assert names(tmp_path) == {"s"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match="cannot be written"):
        write(tmp_path / "s")


def test_a_directory_that_is_not_there_is_one_line(tmp_path: Path):
    with pytest.raises(FileError, match=r"there is no directory .*nowhere"):
        write(tmp_path / "nowhere" / "s")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


WRITERS = {
    "x.any": write,
    "x.safetensors": lambda path: save_prompt_cache(path, [cache.KVCache()]),
    "x.html": lambda path: ReportOptions(html=path).show_tables({}, ["new"]),
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
def test_no_writer_replaces_or_follows_anything_but_a_regular_file(
    tmp_path: Path, writer: str, kind: str
):
    write = WRITERS[writer]
    (tmp_path / "victim").write_text("irreplaceable")
    path = tmp_path / writer
    KINDS[kind](path)
    before = os.lstat(path)
    with pytest.raises(FileError, match=rf"{writer}: is a .*; name (a|the)"):
        write(path)
    assert os.path.samestat(os.lstat(path), before)
    assert (tmp_path / "victim").read_text() == "irreplaceable"
    assert names(tmp_path) == {"victim", writer}


def test_a_directory_that_a_killed_writer_had_moved_away_comes_back(tmp_path: Path):
    (tmp_path / ".model.replaced").mkdir()
    (tmp_path / ".model.replaced" / "weights").write_text("whole")
    with pytest.raises(KeyError), new_directory(tmp_path / "model", replace=True):
        raise KeyError
    assert (tmp_path / "model" / "weights").read_text() == "whole"
    assert names(tmp_path) == {"model"}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_every_killed_writer_left_goes_with_its_next_write_(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
):
    write = WRITERS[writer]
    path = tmp_path / writer
    # A forked child must not use the GPU.
    monkeypatch.setattr(mx, "save_safetensors", lambda file, *_: file.write(b"new"))
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: signal.raise_signal(signal.SIGKILL)
        write(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert names(tmp_path) == {f".{path.name}.partial"}
    write(path)
    assert names(tmp_path) == {path.name}


def test_files_that_hold_prompts_are_readable_by_their_owner_alone(tmp_path: Path):
    umask = os.umask(0)
    try:
        for name, write in WRITERS.items():
            path = tmp_path / name
            write(path)
            expected = 0o644 if name == "x.html" else 0o600
            assert path.stat().st_mode & 0o777 == expected
    finally:
        os.umask(umask)
