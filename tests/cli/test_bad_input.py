"""Every bad input gives one line that names it and a non-zero exit status."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import mlxspec
from mlxspec.cli.common import output
from mlxspec.cli.common.notes import run_command
from mlxspec.cli.main import main

pytestmark = pytest.mark.slow

ROOT = Path(mlxspec.__file__).parents[1]
START = "from mlxspec.__main__ import main; main()"
LONG = "x" * 300
PROMPT = ("--prompt", "a")

Called = Callable[..., tuple[int, str]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Called:
    """Runs the command as a process does; returns its exit status and its error output."""

    def called(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["mlxspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            run_command(main, "mlxspec")
        return int(end.value.code or 0), capsys.readouterr().err

    return called


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("genrate",),
            "Error: No such command 'genrate'. Did you mean 'generate'? (mlxspec --help)\n",
        ),
        (("replay",), "Error: Missing argument 'TRACES...' (mlxspec replay --help)\n"),
        (
            ("replay", "chats.jsonl"),
            "Error: Missing option '-m' / '--tokenizer' / '--model' (mlxspec replay --help)\n",
        ),
        (
            ("generate", "--max-tokens", "x"),
            "Error: Invalid value for '--max-tokens': 'x' is not a valid integer range "
            "(mlxspec generate --help)\n",
        ),
        (("run", "-m"), "Error: Missing argument 'PROGRAM' (mlxspec run --help)\n"),
        (
            ("generate", "--prompt-ids", "1,x"),
            "Error: Invalid value for '--prompt-ids': '1,x': write token ids as 1,415,2936 "
            "(mlxspec generate --help)\n",
        ),
        (
            ("generate", "-W", "x"),
            "Error: Invalid value for '-W' / '--window-size': 'x' is not a valid integer "
            "(mlxspec generate --help)\n",
        ),
    ],
)
def test_a_wrong_use_is_one_line_and_status_2(called: Called, arguments: tuple, error: str) -> None:
    assert called(*arguments) == (2, error)


def test_an_interrupted_question_ends_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def asks() -> None:
        raise click.Abort  # like click.confirm at Ctrl-C

    monkeypatch.setattr(sys, "argv", ["asks"])
    with pytest.raises(SystemExit, match="130"):
        run_command(asks, "asks")
    assert capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", LONG),
        ("generate", *PROMPT, "--model", LONG),
        ("generate", *PROMPT, "--prompt-cache-file", LONG),
        ("cache-prompt", *PROMPT, "--prompt-cache-file", f"{LONG}.safetensors"),
        ("explain", *PROMPT, "--html", f"{LONG}.html"),
        ("convert", "--torch-path", LONG, "--mlx-path", "out"),
    ],
)
def test_a_file_that_the_system_refuses_is_named_with_the_reason(
    called: Called, arguments: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, error = called(*arguments)
    assert status == 1
    assert error.removeprefix("Error: ").startswith(LONG)
    assert "File name too long" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_help_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", START, "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: no space left")
    assert done.stderr.count(b"\n") == 1


def test_a_table_for_a_reader_that_is_gone_ends_well(endless: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", START, "inspect", str(endless)]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.stderr.decode() == f"Note: loading and examining {endless} …\n"


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

    monkeypatch.setattr(output.os, "replace", full)
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
    assert result.stderr.startswith("Error: the prompt contains the id 999999")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--stop", "--stop-token", "--prompt", "--logit-bias"])
def test_a_text_that_is_not_utf8_is_refused(called: Called, option: str) -> None:
    arguments = () if option == "--prompt" else PROMPT
    status, error = called("generate", *arguments, option, os.fsdecode(b"caf\xe9"))
    assert status
    assert error.startswith("Error: ")
    assert option in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option", "least"),
    [
        *(("bench", option, 1) for option in ("--max-tokens", "--repeats", "--limit")),
        *(("replay", option, 1) for option in ("--concurrency", "--limit")),
        ("calibrate", "--context", 1),
        ("connect", "--context-length", 1),
        *(("explain", "--steps", 1), ("explain", "--skip", 0), ("generate", "--concurrency", 1)),
    ],
)
def test_a_number_that_is_too_small_is_named(
    called: Called, command: str, option: str, least: int
) -> None:
    status, error = called(command, option, str(least - 1))
    assert status
    assert error == (
        f"Error: Invalid value for '{option}': {least - 1} is not in the range x>={least} "
        f"(mlxspec {command} --help)\n"
    )


HUGE = 10**25


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--window-size", size) for size in (99999999999, HUGE)),
        *(("--ngram-size", size) for size in (99999999999, HUGE)),
        *(("--ngram-max", size) for size in (99999999999, HUGE)),
        ("--seed", HUGE),
        ("--kv-bits", HUGE),
    ],
    ids=lambda arguments: f"{arguments[0]} {str(arguments[1])[:20]}",
)
def test_a_size_or_form_that_cannot_be_is_one_short_line(called: Called, arguments: tuple) -> None:
    status, error = called("generate", *PROMPT, *arguments)
    assert status
    assert error.startswith("Error: ")
    assert (error.count("\n"), len(error) < 1200) == (1, True)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--json", "--logprobs", size) for size in (99999999999, HUGE)),
        *(
            ("--repetition-penalty", "1.1", "--repetition-context-size", size)
            for size in (99999999999, HUGE)
        ),
        *(("--top-k", HUGE), ("--n-draft", HUGE), ("--guess-set-size", HUGE)),
        *(("--max-tokens", HUGE), ("--max-kv-size", HUGE)),
    ],
    ids=str,
)
def test_a_size_that_is_more_than_all_is_all(finite: Path, arguments: tuple) -> None:
    given = ["generate", *PROMPT, "--model", str(finite), *map(str, arguments)]
    result: Result = CliRunner().invoke(main, given)
    assert result.exit_code == 0
    assert "one two three four" in result.stdout


@pytest.mark.parametrize("module", ["./demo", ".demo", "..", "no.such", "json.x.y", "/tmp/x.py"])
def test_an_unknown_module_is_one_line(called: Called, module: str) -> None:
    assert called("run", "-m", module) == (
        1,
        f"Error: {module}: no such module; to run a script, leave out -m\n",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--max-tokens", "x" * 100_000),
        ("generate", "--prompt-ids", "x" * 100_000),
        ("generate", *PROMPT, "--logit-bias", "x" * 100_000),
        ("run", "-m", "x" * 100_000),
        ("x" * 100_000,),
    ],
    ids=lambda arguments: arguments[-2][:20] if len(arguments) > 1 else "command",
)
def test_a_message_repeats_a_bounded_part_of_its_input(called: Called, arguments: tuple) -> None:
    status, error = called(*arguments)
    assert status
    assert error.startswith("Error: ")
    assert len(error) < 1200


ODD = "m\x1b]0;x\x07\u200b"  # mlx-lm cannot read directories with a bracket in their name


def test_names_reach_no_terminal_as_they_are(
    finite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / ODD.replace("/", "-")
    shutil.copytree(finite, model)
    odd = tmp_path / f"{model.name}.txt"
    odd.write_text("a text to keep")
    for arguments in (
        ["generate", *PROMPT, "--model", str(model), "--decoder", "plain"],
        ["explain", *PROMPT, "--model", str(model)],
        ["inspect", str(model)],
        ["memory", "add", str(odd), "--model", str(model)],
        ["memory", "show"],
        ["memory", "forget", str(odd), "--yes"],
        ["convert", "--hf-path", str(model), "--mlx-path", f"{model}.mlx"],
    ):
        result: Result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert not {"\x1b", "\u200b"} & set(result.output), arguments[0]
