"""The output appears whole or not at all, and nothing else is ever deleted."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mlxspec
from mlxspec.convert.conversion import check_outside, convert, output_directory
from mlxspec.errors import ConversionError

ROOT = Path(mlxspec.__file__).parents[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "params.json").write_text("{}")
    return path


def old_model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("old")
    return path


def write_half(directory: Path, error: BaseException) -> None:
    (directory / "config.json").write_text("half")
    raise error


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_the_directory_is_not_there_before_it_is_complete(tmp_path: Path, source: Path):
    target = tmp_path / "out"
    with output_directory(target, force=False) as partial:
        (partial / "file").write_text("new")
        assert not target.exists()
        assert partial.parent == target.parent  # on the same file system, to be renamed
    assert names(target) == {"file"}
    assert names(tmp_path) == {"out", "source"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConversionError, MemoryError])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, source: Path, error: type):
    with (
        pytest.raises(error),
        output_directory(tmp_path / "new" / "deep" / "out", force=False) as partial,
    ):
        write_half(partial, error())
    assert names(tmp_path) == {"source"}


@pytest.mark.slow
def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path, source: Path):
    code = (
        "import os, signal; from pathlib import Path\n"
        "from mlxspec.convert.conversion import output_directory\n"
        f"with output_directory(Path({str(tmp_path / 'out')!r}), force=False) as partial:\n"
        "    (partial / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    (leftover,) = names(tmp_path) - {"source"}
    with output_directory(tmp_path / "another", force=False):
        assert leftover in names(tmp_path)
    with output_directory(tmp_path / "out", force=False):
        assert leftover not in names(tmp_path)
    assert names(tmp_path) == {"another", "out", "source"}


def test_a_conversion_that_runs_is_left_alone_and_so_is_what_only_looks_like_one(tmp_path: Path):
    target = tmp_path / "out"
    (tmp_path / ".out.mine.partial").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.0123456789abcdef.partial").symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path)
    with output_directory(target, force=False) as first:
        (first / "file").write_text("first")
        with pytest.raises(KeyboardInterrupt), output_directory(target, force=False):
            raise KeyboardInterrupt
        assert names(first) == {"file"}
    assert names(tmp_path) == before | {"out"}


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path):
    with (
        pytest.raises(ConversionError, match=r"out: cannot be written \(No space left"),
        output_directory(tmp_path / "out", force=False) as partial,
    ):
        write_half(partial, OSError(errno.ENOSPC, "No space left on device"))
    assert names(tmp_path) == {"source"}


def test_a_limit_on_file_size_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(ConversionError, match=r"out: cannot be written \(File too large\)"),
            output_directory(tmp_path / "out", force=False) as partial,
        ):
            (partial / "file").write_bytes(b"\0" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == {"source"}


def test_an_empty_directory_is_taken(tmp_path: Path, source: Path):
    (tmp_path / "out").mkdir()
    with output_directory(tmp_path / "out", force=False) as partial:
        (partial / "file").write_text("new")
    assert names(tmp_path / "out") == {"file"}


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path, source: Path):
    target = old_model(tmp_path / "out")
    with (
        pytest.raises(ConversionError, match=r"exists and is not empty; .+ --force"),
        output_directory(target, force=False),
    ):
        pass
    assert (target / "config.json").read_text() == "old"


def test_force_keeps_the_old_model_until_the_new_one_is_complete(tmp_path: Path, source: Path):
    target = old_model(tmp_path / "out")
    with output_directory(target, force=True) as partial:
        (partial / "config.json").write_text("new")
        assert (target / "config.json").read_text() == "old"
    assert (target / "config.json").read_text() == "new"
    assert names(tmp_path) == {"out", "source"}


def test_force_keeps_the_old_model_after_a_failure(tmp_path: Path, source: Path):
    target = old_model(tmp_path / "out")
    with (
        pytest.raises(KeyboardInterrupt),
        output_directory(target, force=True) as partial,
    ):
        write_half(partial, KeyboardInterrupt())
    assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == {"out", "source"}


def test_a_conversion_killed_anywhere_leaves_a_whole_model_to_the_next_run(tmp_path: Path):
    """A child is killed before the first act on files after its model is complete, the second, …"""
    target = tmp_path / "out"

    def convert_until(act: int) -> None:
        acts = iter(range(act))

        def kill(event: str, _: object) -> None:
            if event.startswith(("os.", "open", "shutil.", "ctypes.")) and next(acts, None) is None:
                signal.pthread_kill(threading.get_ident(), signal.SIGKILL)

        with output_directory(target, force=True) as partial:
            for name in ("config.json", "weights"):
                (partial / name).write_text("new")
            sys.addaudithook(kill)

    found = set()
    for act in range(1000):
        shutil.rmtree(target, ignore_errors=True)
        (old_model(target) / "weights").write_text("old")
        child = os.fork()
        if child == 0:
            try:
                convert_until(act)
            finally:
                os._exit(0)
        killed = os.waitpid(child, 0)[1]
        was_there = target.exists()
        with pytest.raises(ConversionError, match="exists and is not empty"):
            output_directory(target, force=False).__enter__()
        contents = {(target / name).read_text() for name in ("config.json", "weights")}
        assert contents in ({"old"}, {"new"})
        assert names(tmp_path) == {"out"}
        found.add((was_there, *contents))
        if not killed:
            break
    assert contents == {"new"}
    assert found == {(True, "old"), (False, "old"), (True, "new")}


def test_the_old_model_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    target = old_model(tmp_path / "out")
    rename = Path.rename

    def fails_once(path: Path, to: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fails_once)
    with (
        pytest.raises(ConversionError, match="Input/output error"),
        output_directory(target, force=True),
    ):
        pass
    assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == {"out", "source"}


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path, source: Path):
    target = tmp_path / "out"
    with (
        pytest.raises(ConversionError, match="cannot be written"),
        output_directory(target, force=False),
    ):
        old_model(target)
    assert (target / "config.json").read_text() == "old"


def test_force_replaces_only_a_model(tmp_path: Path, source: Path):
    target = tmp_path / "letters"
    target.mkdir()
    (target / "to_my_love.txt").write_text("irreplaceable")
    with (
        pytest.raises(ConversionError, match="holds no model"),
        output_directory(target, force=True),
    ):
        pass
    assert names(target) == {"to_my_love.txt"}


def test_the_source_and_what_holds_it_are_refused(tmp_path: Path, source: Path):
    for target in (source, tmp_path, source / ".." / "source"):
        with pytest.raises(ConversionError, match="holds the checkpoint itself"):
            check_outside(source, target)
    check_outside(source, source / "mlx_model")


def test_files_and_links_are_refused(tmp_path: Path, source: Path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(old_model(tmp_path / "model"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with (
            pytest.raises(
                ConversionError, match=f"{name}: exists and is a link or not a directory"
            ),
            output_directory(tmp_path / name, force=True),
        ):
            pass
    assert (tmp_path / "model" / "config.json").read_text() == "old"


def test_a_parent_that_cannot_be_written_is_one_line(tmp_path: Path, source: Path):
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(ConversionError, match="cannot be written"),
        output_directory(tmp_path / "file" / "out", force=False),
    ):
        pass


def test_a_checkpoint_that_cannot_be_read_is_told_and_not_the_output(tmp_path: Path):
    source = tmp_path / ("x" * 300)
    with pytest.raises(ConversionError) as error:
        convert(torch_path=source, mlx_path=tmp_path / "out")
    assert str(error.value) == f"{source / 'params.json'}: cannot be read (File name too long)"
    assert list(tmp_path.iterdir()) == []


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for target in (Path(), Path("..")):
        with (
            pytest.raises(ConversionError, match="working directory"),
            output_directory(target, force=True),
        ):
            pass
    assert list((tmp_path / "below").iterdir()) == []
