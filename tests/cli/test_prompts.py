"""Where the prompt comes from."""

import io
from pathlib import Path

import pytest

from mlxspec.cli import prompts
from mlxspec.cli.prompts import PromptOptions
from mlxspec.errors import PromptError


class StandardInput:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def read_prompt(text: str | None, file: str | None, ids: str | None) -> str | list[int]:
    return PromptOptions(text, file, ids).read()


def error_for(text: str | None = None, file: str | None = None, ids: str | None = None) -> str:
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
    monkeypatch.setattr("sys.stdin", StandardInput(data))
    assert read_prompt("-", None, None) == expected


@pytest.mark.parametrize("ids", ["1,2,30", "1 2 30", " 1, 2,30 "])
def test_token_ids_are_numbers_with_commas_or_spaces(ids: str):
    assert read_prompt(None, None, ids) == [1, 2, 30]


@pytest.mark.parametrize("ids", ["", "1,x", "-1", "1.5", "¹"])
def test_anything_else_is_no_token_id(ids: str):
    assert "--prompt-ids" in error_for(ids=ids)


def test_a_prompt_is_needed_and_one_is_enough():
    assert "--prompt TEXT" in error_for()
    assert "--prompt and --prompt-ids" in error_for("a", None, "1")


def test_an_empty_prompt_is_named_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "empty.txt"
    path.write_bytes(b"\n")
    monkeypatch.setattr("sys.stdin", StandardInput(b""))
    assert error_for("").startswith("--prompt is empty")
    assert error_for(file=str(path)).startswith(f"--prompt-file {path} is empty")
    assert error_for("-").startswith("standard input is empty")


def test_what_is_no_utf8_text_is_refused(tmp_path: Path):
    path = tmp_path / "prompt"
    path.write_bytes("café".encode("latin-1"))
    assert "not UTF-8 text (byte 3)" in error_for(file=str(path))
    path.write_bytes(b"PK\x03\x04\0\0")
    assert "binary" in error_for(file=str(path))
    assert "not UTF-8" in error_for(text="caf\udce9")  # an argument's byte E9, as Python has it


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    assert "No such file" in error_for(file=str(tmp_path / "missing"))
    assert f"--prompt-file {tmp_path} cannot be read" in error_for(file=str(tmp_path))


def test_what_never_ends_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_MOST_BYTES", 1000)
    assert error_for(file="/dev/zero").startswith("--prompt-file /dev/zero is more than 1,000")
