"""``convert.py`` as a user runs it: messages, exit codes, and files after a failure."""

import errno
import os
import pty
import re
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mlxspec.cli.convert import convert_command
from mlxspec.cli.main import main
from mlxspec.convert import conversion
from tests.support import head_files, original

SCRIPT = Path(__file__).resolve().parents[2] / "convert.py"


@pytest.mark.slow
def test_the_last_line_says_what_was_written_and_what_comes_next(tmp_path: Path, checkpoint: Path):
    command = [sys.executable, SCRIPT, "--torch-path", checkpoint, "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Wrote mlx_model: 0.1 MB, ")
    assert "bits per weight" in done.stdout
    assert "Next: mlxspec generate --model mlx_model" in done.stdout
    assert (tmp_path / "mlx_model" / "model.safetensors").is_file()


def test_as_a_subcommand_it_names_the_next_subcommand(tmp_path: Path, checkpoint: Path):
    arguments = ["--torch-path", str(checkpoint), "--mlx-path", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["convert", *arguments])
    assert result.exit_code == 0, result.stderr
    out = shlex.quote(str(tmp_path / "out"))
    assert f"Next: mlxspec generate --model {out} " in result.stdout


def test_a_home_directory_is_expanded(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(checkpoint)
    result = CliRunner().invoke(main, ["convert", "--torch-path", ".", "--mlx-path=~/out"])
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_directory_with_both_formats_is_read_as_hugging_faces(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """As Mistral's repositories are."""
    both, found = tmp_path / "both", []
    shutil.copytree(checkpoint, both)
    monkeypatch.setattr(conversion, "convert", lambda **given: found.append(given) or (1, 1, None))
    for name in ("config.json", "model.safetensors"):
        assert CliRunner().invoke(main, ["convert", str(both)]).exit_code == 0
        (both / name).touch()
    CliRunner().invoke(main, ["convert", str(both)])
    assert [bool(given["hf_path"]) for given in found] == [False, False, True]


def test_a_head_is_reported_with_its_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = head_files.original(head_files.random_weights("Qwen MTP"))
    head_files.write_target(tmp_path / "source", weights)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["convert", "--head", "source", "-q", "--q-group-size", "32"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Wrote mlx_head: 0.0 MB, 5.")
    assert " bits per weight. Qwen MTP (7 of its 7 norms were centred at zero, " in result.stdout
    assert "Next: mlxspec generate --model MODEL --head mlx_head --prompt" in result.stdout


def test_a_head_of_no_known_kind_is_one_line_and_leaves_nothing(tmp_path: Path):
    head_files.write(tmp_path / "source", {"model_type": "glm4_moe_lite_mtp"}, {})
    arguments = ["--head", str(tmp_path / "source"), "--mlx-path", str(tmp_path / "head")]
    result = CliRunner().invoke(main, ["convert", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "glm4_moe_lite_mtp; supported are Gemma 4's assistants" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_error_is_one_line_and_status_1(tmp_path: Path):
    result = CliRunner().invoke(convert_command, ["--torch-path", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--q-bits=4", "--q-group-size=64", "--q-mode=affine"])
def test_options_of_quantisation_ask_for_it(option: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    def converted(**options: object) -> tuple[int, int, str]:
        asked.append(options["quantize"])
        return 1, 1, ""

    monkeypatch.setattr(conversion, "convert", converted)
    for options in ([], [option]):
        assert CliRunner().invoke(convert_command, ["--hf-path", "x", *options]).exit_code == 0
    assert asked == [False, True]


def test_an_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch):
    def interrupted(**options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", interrupted)
    result = CliRunner().invoke(convert_command, ["--torch-path", "x", "--mlx-path", "out"])
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted."


@pytest.mark.slow
def test_a_disk_without_room_is_an_error_before_anything_is_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3000))
    monkeypatch.setattr(conversion, "_copy_tokenizer", fails)  # comes later
    result = CliRunner().invoke(
        convert_command, ["--torch-path", str(checkpoint), "--mlx-path", str(tmp_path / "out")]
    )
    assert result.exit_code == 1
    assert re.fullmatch(
        r"Error: .*/out: the model needs [\d.]+ kB, but only 3.0 kB are free there; make room, or "
        r"name another --mlx-path\n",
        result.stderr,
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        done = CliRunner().invoke(convert_command, ["--torch-path", str(checkpoint)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.exit_code == 1
    assert re.search(r"mlx_model: cannot be written \(.*\); it needs [\d.]+ kB\n", done.stderr)
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_would_run_code_is_refused_by_name(tmp_path: Path, tokenizer_model: Path):
    from tests.support.torch_file import Call, Global, dumps, write_archive

    source = original.write_checkpoint(tmp_path / "x", tokenizer_model)
    trace = tmp_path / "trace"
    evil = dumps({"a": Call(Global("os", "system"), (f"touch {trace}",))})
    write_archive(source / "consolidated.00.pth", evil, {})
    result = CliRunner().invoke(
        convert_command, ["--torch-path", str(source), "--mlx-path", str(tmp_path / "out")]
    )
    assert result.exit_code == 1
    assert "consolidated.00.pth: asks for os.system, " in result.stderr
    assert not trace.exists()


@pytest.mark.slow
def test_a_bar_shows_on_a_terminal(tmp_path: Path, checkpoint: Path):
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--torch-path", str(checkpoint)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=child,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(child)
    shown = b""
    with suppress(OSError):  # when the process has ended
        while piece := os.read(terminal, 100_000):
            shown += piece
    os.close(terminal)
    assert process.wait() == 0
    assert b"Converting" in shown


def test_help_does_not_wait_for_mlx():
    code = (
        "import sys; from mlxspec.cli.convert import convert_command as c\n"
        "c(['--help'], standalone_mode=False)\n"
        "sys.exit(bool({'mlx.core', 'mlx_lm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent).returncode == 0
