"""The output appears complete or not at all, and no other file is deleted."""

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec
from mlxspec.convert.conversion import convert
from mlxspec.errors import FileError, LoadError
from mlxspec.files import new_directory

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
    with new_directory(target, replace=False) as partial:
        (partial / "file").write_text("new")
        assert not target.exists()
        assert partial.parent == target.parent  # on the same file system, so that a rename works
    assert names(target) == {"file"}
    assert names(tmp_path) == {"out", "source"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, FileError, MemoryError])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, source: Path, error: type):
    with (
        pytest.raises(error),
        new_directory(tmp_path / "out", replace=False) as partial,
    ):
        write_half(partial, error())
    assert names(tmp_path) == {"source"}


def test_two_conversions_do_not_write_into_each_other_s_directory(tmp_path: Path, source: Path):
    with new_directory(tmp_path / "out", replace=False) as partial:
        (partial / "file").write_text("first")
        with (
            pytest.raises(FileError, match="out: another process is writing it"),
            new_directory(tmp_path / "out", replace=True),
        ):
            pass
    assert (tmp_path / "out" / "file").read_text() == "first"
    with new_directory(tmp_path / "out", replace=True) as partial:  # the lock is gone
        (partial / "file").write_text("second")
    assert (tmp_path / "out" / "file").read_text() == "second"
    assert names(tmp_path) == {"out", "source"}


def test_a_link_in_the_place_of_the_new_directory_is_not_followed(tmp_path: Path, source: Path):
    (source / "file").write_text("kept")
    (tmp_path / ".out.partial").symlink_to(source)
    with (
        pytest.raises(FileError, match="out: cannot be written"),
        new_directory(tmp_path / "out", replace=False),
    ):
        pass
    assert (source / "file").read_text() == "kept"


@pytest.mark.slow
def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path, source: Path):
    code = (
        "import os, signal; from pathlib import Path\n"
        "from mlxspec.files import new_directory\n"
        f"with new_directory(Path({str(tmp_path / 'out')!r}), replace=False) as partial:\n"
        "    (partial / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    leftovers = names(tmp_path) - {"source"}
    assert leftovers
    with new_directory(tmp_path / "another", replace=False):
        assert leftovers <= names(tmp_path)
    with new_directory(tmp_path / "out", replace=False) as partial:
        assert not (partial / "half").exists()
    assert names(tmp_path) == {"another", "out", "source"}


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path):
    with (
        pytest.raises(FileError, match=r"out: cannot be written \(No space left"),
        new_directory(tmp_path / "out", replace=False) as partial,
    ):
        write_half(partial, OSError(errno.ENOSPC, "No space left on device"))
    assert names(tmp_path) == {"source"}


@pytest.mark.slow
def test_sigterm_leaves_nothing_and_ends_the_process(tmp_path: Path, source: Path):
    code = (
        "import os, signal; from pathlib import Path\n"
        "from mlxspec.cli.common.notes import reported\n"
        "from mlxspec.files import new_directory\n"
        f"with reported(), new_directory(Path({str(tmp_path / 'out')!r}), replace=False) as d:\n"
        "    (d / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGTERM
    assert names(tmp_path) == {"source"}


def test_a_limit_on_file_size_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(FileError, match=r"out: cannot be written \(File too large\)"),
            new_directory(tmp_path / "out", replace=False) as partial,
        ):
            (partial / "file").write_bytes(b"\0" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == {"source"}


def test_an_empty_directory_is_taken(tmp_path: Path, source: Path):
    (tmp_path / "out").mkdir()
    with new_directory(tmp_path / "out", replace=False) as partial:
        (partial / "file").write_text("new")
    assert names(tmp_path / "out") == {"file"}


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path, source: Path):
    target = old_model(tmp_path / "out")
    with pytest.raises(FileError, match=r"is not empty; .+ --force"):
        convert(torch_path=source, mlx_path=target)
    assert (target / "config.json").read_text() == "old"


def test_force_keeps_the_old_model_until_the_new_one_is_complete(tmp_path: Path, source: Path):
    target = old_model(tmp_path / "out")
    with new_directory(target, replace=True) as partial:
        (partial / "config.json").write_text("new")
        assert (target / "config.json").read_text() == "old"
    assert (target / "config.json").read_text() == "new"
    assert names(tmp_path) == {"out", "source"}


def test_force_keeps_the_old_model_after_a_failure(tmp_path: Path, source: Path):
    target = old_model(tmp_path / "out")
    with (
        pytest.raises(KeyboardInterrupt),
        new_directory(target, replace=True) as partial,
    ):
        write_half(partial, KeyboardInterrupt())
    assert (target / "config.json").read_text() == "old"
    assert names(tmp_path) == {"out", "source"}


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path, source: Path):
    target = tmp_path / "out"
    with (
        pytest.raises(FileError, match="cannot be written"),
        new_directory(target, replace=False),
    ):
        old_model(target)
    assert (target / "config.json").read_text() == "old"


def test_force_replaces_only_a_model(tmp_path: Path, source: Path):
    target = tmp_path / "letters"
    target.mkdir()
    (target / "to_my_love.txt").write_text("irreplaceable")
    with pytest.raises(FileError, match="replace a model with --force"):
        convert(torch_path=source, mlx_path=target, force=True)
    assert names(target) == {"to_my_love.txt"}


def test_the_source_and_what_holds_it_are_refused(tmp_path: Path, source: Path):
    for target in (source, tmp_path, source / ".." / "source"):
        with pytest.raises(FileError, match="contains the checkpoint or the working directory"):
            convert(torch_path=source, mlx_path=target, force=True)


def test_files_and_links_are_refused(tmp_path: Path, source: Path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(old_model(tmp_path / "model"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with pytest.raises(FileError, match=f"{name}: is a link or a file"):
            convert(torch_path=source, mlx_path=tmp_path / name, force=True)
    assert (tmp_path / "model" / "config.json").read_text() == "old"


def test_a_parent_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    with (
        pytest.raises(FileError, match="cannot be written"),
        new_directory(tmp_path / "file" / "out", replace=False),
    ):
        pass


def test_the_error_names_an_unreadable_checkpoint_and_not_the_output(tmp_path: Path):
    source = tmp_path / ("x" * 300)
    with pytest.raises(LoadError) as error:
        convert(torch_path=source, mlx_path=tmp_path / "out")
    assert str(error.value).startswith(f"{source}: no such directory")
    assert list(tmp_path.iterdir()) == []


def test_the_working_directory_is_not_replaced(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for target in (Path(), Path("..")):
        with pytest.raises(FileError, match="working directory"):
            convert(torch_path=source, mlx_path=target, force=True)
    assert list((tmp_path / "below").iterdir()) == []
