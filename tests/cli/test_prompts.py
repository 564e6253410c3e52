"""Sources of the prompt: options, files, arguments and standard input."""

import io
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mlxspec.cli.common import prompt as prompts
from mlxspec.cli.common.prompt import PromptOptions, token_ids
from mlxspec.errors import PromptError
from tests.cli.test_generate import assert_one_line_error, generate


def input_with(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data))


def read_prompt(text: str | None, file: str | None, ids: list[int] | None) -> str | list[int]:
    return PromptOptions(text, file, ids).read()


def error_for(
    text: str | None = None, file: str | None = None, ids: list[int] | None = None
) -> str:
    with pytest.raises(PromptError) as error:
        read_prompt(text, file, ids)
    return str(error.value)


def test_the_text_of_the_option_is_taken_as_it_is():
    assert read_prompt(" text\\n\n", None, None) == " text\\n\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"one\n\n", "one\n"),
        (b"one\r\n", "one"),
        (b"one", "one"),
        ("\ufeffé\n".encode(), "é"),
        (b"a\r\nb\tc \n", "a\r\nb\tc "),
    ],
)
def test_a_file_or_standard_input_loses_one_newline_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, expected: str
):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert read_prompt(None, str(path), None) == expected
    monkeypatch.setattr("sys.stdin", input_with(data))
    assert read_prompt("-", None, None) == expected


@pytest.mark.parametrize("ids", ["1,2,30", "1 2 30", " 1, 2,30 "])
def test_token_ids_are_numbers_with_commas_or_spaces(ids: str):
    assert token_ids(ids) == [1, 2, 30]


@pytest.mark.parametrize("ids", ["", "1,x", "-1", "1.5", "¹"])
def test_anything_else_is_no_token_id(ids: str):
    result = generate("--model", "demo", "--decoder", "plain", "--prompt-ids", ids)
    assert_one_line_error(result, "prompt contains the id -1" if ids == "-1" else "--prompt-ids")


def test_a_prompt_is_needed_and_one_is_enough():
    assert error_for().startswith("no prompt: ")
    assert "--prompt and --prompt-ids" in error_for("a", None, [1])


def test_an_empty_prompt_is_named_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "empty.txt"
    path.write_bytes(b"\n")
    monkeypatch.setattr("sys.stdin", input_with(b""))
    assert error_for("").startswith("--prompt is empty")
    assert error_for(file=str(path)).startswith(f"--prompt-file {path} is empty")
    assert error_for("-").startswith("--prompt - is empty")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "prompt"
    path.write_bytes("café".encode("latin-1"))
    assert "not UTF-8 text (byte 3)" in error_for(file=str(path))
    assert "not UTF-8" in error_for(text="caf\udce9")  # byte E9, as Python decodes arguments


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=str(path)):
            read_prompt(None, str(path), None)


# --- an instruction and a text ---


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch):
    """Redirects standard input to a file, as a shell does."""
    opened: list[io.TextIOWrapper] = []

    def replace(file: Path | int) -> None:
        opened.append(open(file, encoding="utf-8"))  # noqa: SIM115
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield replace
    for file in opened:
        file.close()


def pipe_with(data: bytes) -> int:
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


@pytest.mark.parametrize(
    "options",
    [PromptOptions(argument="do it"), PromptOptions(prompt="do it")],
    ids=["PROMPT", "-p"],
)
def test_a_text_comes_before_the_instruction(
    options: PromptOptions, standard_input, tmp_path: Path
) -> None:
    standard_input(pipe_with(b"a text\n"))
    assert options.read() == "a text\n\ndo it"
    path = tmp_path / "text.txt"
    path.write_text("from a file\n")
    standard_input(path)
    assert options.read() == "from a file\n\ndo it"
    named = PromptOptions(options.prompt, str(path), argument=options.argument)
    standard_input(pipe_with(b"not read"))
    assert named.read() == "from a file\n\ndo it"
    assert sys.stdin.read() == "not read"


def test_a_piped_text_alone_is_the_prompt(standard_input) -> None:
    standard_input(pipe_with(b"a text\n"))
    assert PromptOptions().read() == "a text"


def test_a_dash_takes_all_of_standard_input_wherever_it_comes_from(standard_input) -> None:
    for options in (PromptOptions("-"), PromptOptions(argument="-"), PromptOptions(None, "-")):
        standard_input(pipe_with(b"a text\n"))
        assert options.read() == "a text"
    standard_input(pipe_with(b"a text\n"))
    assert PromptOptions(None, "-", argument="do it").read() == "a text\n\ndo it"


@pytest.mark.parametrize("data", [b"", b"\n", b" \n\t\n"])
def test_a_pipe_with_nothing_in_it_is_no_text(standard_input, data: bytes) -> None:
    standard_input(pipe_with(data))
    assert PromptOptions(argument="do it").read() == "do it"
    standard_input(pipe_with(data))
    with pytest.raises(PromptError, match="no prompt"):
        PromptOptions().read()


def test_a_file_that_a_script_reads_line_by_line_is_the_script_s(
    standard_input, tmp_path: Path
) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("first\nsecond\n")
    standard_input(path)
    os.lseek(sys.stdin.fileno(), 6, os.SEEK_SET)
    assert PromptOptions(argument="first").read() == "first"
    assert sys.stdin.read() == "second\n"


def test_null_devices_and_sockets_bring_nothing(standard_input, tmp_path: Path) -> None:
    options = PromptOptions(argument="do it")
    standard_input(Path(os.devnull))
    assert options.read() == "do it"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        standard_input(os.dup(ours.fileno()))
        assert options.read() == "do it"
    standard_input(os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT))
    assert options.read() == "do it"


def test_a_pipe_that_stays_open_and_empty_is_left_alone(
    standard_input, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(prompts, "_PATIENCE", 0.05)
    reading, writing = os.pipe()
    standard_input(reading)
    assert PromptOptions(argument="do it").read() == "do it"
    (note,) = capsys.readouterr().err.splitlines()
    assert "to wait for the pipe, add --prompt-file -" in note
    os.close(writing)


@pytest.mark.slow
def test_a_text_that_comes_late_is_waited_for(
    standard_input, capsys: pytest.CaptureFixture
) -> None:
    def write_late(pipe: int) -> None:
        time.sleep(0.2)
        os.write(pipe, b"a ")
        time.sleep(0.1)
        os.write(pipe, b"text")
        os.close(pipe)

    for options, expected in (
        (PromptOptions(argument="do it"), "a text\n\ndo it"),
        (PromptOptions(), "a text"),
    ):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)  # as other programs may set it
        standard_input(reading)
        writer = threading.Thread(target=write_late, args=(writing,))
        writer.start()
        assert options.read() == expected
        writer.join()
        assert capsys.readouterr().err == ""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_shell_pipes_files_and_loops(tmp_path: Path, endless: Path) -> None:
    start = "import sys; from mlxspec.__main__ import main; main()"
    options = ("--model", str(endless), "--json", "--max-tokens", "1", "--decoder", "plain")
    generate = [sys.executable, "-c", start, "generate", *options]
    command = f"""
    mlxspec() {{ {shlex.join(generate)} "$@"; }}
    lengths() {{ sed 's/.*"prompt_tokens": \\([0-9]*\\).*/\\1/'; }}
    printf 'a b c\\n' > three.txt
    printf 'a b c\\n' | mlxspec "d e" --raw | lengths
    mlxspec "d e" --raw < three.txt | lengths
    mlxspec --raw < three.txt | lengths
    printf 'a\\na b\\n' > lines.txt
    while read -r line; do mlxspec "$line" --raw | lengths; done < lines.txt
    mlxspec "a" --raw <&- | lengths
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    # BOS and the words.
    assert done.stdout.split() == ["6", "6", "4", "2", "3", "2"], done.stderr
