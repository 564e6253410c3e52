"""Whatever is wrong with an input: one line that names it, and an exit status that is not 0."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import mlxspec
from mlxspec.cli.main import main
from mlxspec.cli.outcome import run_command
from mlxspec.reports import page

ROOT = Path(mlxspec.__file__).parents[1]
START = "from mlxspec._start import main; main()"
LONG = "x" * 300
PROMPT = ("--prompt", "a")

Called = Callable[..., tuple[int, str]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """Runs the command as a process does; its exit status and what it told."""

    def called(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["mlxspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            run_command(main, "mlxspec")
        return int(end.value.code or 0), capsys.readouterr().err

    return called


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("genrate",), "Error: No such command 'genrate' (mlxspec --help)\n"),
        (("bench",), "Error: Missing argument 'MODEL' (mlxspec bench --help)\n"),
        (
            ("generate", "--max-tokens", "x"),
            "Error: Invalid value for '--max-tokens': 'x' is not a valid integer "
            "(mlxspec generate --help)\n",
        ),
        (("run", "-m"), "Error: Option '-m' requires an argument\n"),
    ],
)
def test_a_wrong_use_is_one_line_and_status_2(called: Called, arguments: tuple, told: str) -> None:
    assert called(*arguments) == (2, told)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("generate", *PROMPT, "--model", ""), "--model"),
        (("generate", "--prompt-file", ""), "--prompt-file"),
        (("generate", *PROMPT, "--prompt-cache-file", ""), "--prompt-cache-file"),
        (("generate", *PROMPT, "--store", ""), "--store"),
        (("explain", *PROMPT, "--html", ""), "--html"),
        (("inspect", ""), "MODEL"),
        (("replay", "", "--tokenizer", "demo"), "TRACES"),
        (("store", "build", "docs", "--model", "demo", "-o", ""), "-o"),
        (("convert", "--hf-path", "demo", "--mlx-path", ""), "--mlx-path"),
    ],
)
def test_an_empty_name_is_refused(called: Called, arguments: tuple, name: str) -> None:
    status, told = called(*arguments)
    assert status == 2
    assert told.startswith(f"Error: {name} is empty: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", LONG),
        ("generate", *PROMPT, "--model", LONG),
        ("generate", *PROMPT, "--prompt-cache-file", LONG),
        ("cache-prompt", *PROMPT, "--prompt-cache-file", f"{LONG}.safetensors"),
        ("explain", *PROMPT, "--html", LONG),
        ("convert", "--torch-path", LONG, "--mlx-path", "out"),
    ],
)
def test_a_file_that_the_system_refuses_is_named_with_the_reason(
    called: Called, arguments: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, told = called(*arguments)
    assert status == 1
    assert told.startswith(f"Error: {LONG}")
    assert "File name too long" in told
    assert told.count("\n") == 1


def test_a_working_directory_that_is_gone_is_told(
    called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, told = called("convert", "--hf-path", "checkpoint")
    monkeypatch.chdir(tmp_path)
    assert (status, told.count("\n")) == (1, 1)
    assert told.startswith("Error: the working directory is gone")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_help_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", START, "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: no space is left")
    assert done.stderr.count(b"\n") == 1


def test_a_table_for_a_reader_that_is_gone_ends_well() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", START, "inspect", "demo"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("bench", "{model}", "--max-tokens", "2", "--repeats", "1", "--limit", "1"), "category"),
        (("explain", *PROMPT, "--model", "{model}", "--max-tokens", "9"), "step"),
    ],
)
def test_results_are_shown_though_their_page_cannot_be_written(
    endless: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    shown: str,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page.os, "replace", full)
    file = tmp_path / "page.html"
    given = [argument.format(model=endless) for argument in arguments]
    result: Result = CliRunner().invoke(main, [*given, "--html", str(file)])
    assert result.exit_code == 1
    assert shown in result.stdout
    assert f"Error: {file}: cannot be written (No space left on device)" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_not_preceded_by_the_note_on_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ids = ("--prompt-ids", "999999", "--decoder", "plain")
    result = CliRunner().invoke(main, ["generate", *ids])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: the prompt holds the id 999999")
    assert result.stderr.count("\n") == 1
