"""What is told of an error: option names, and characters that a stream's encoding lacks."""

from __future__ import annotations

import io
import sys
import warnings

import pytest

from mlxspec.cli.common.notes import in_option_names, reported, write_plainly
from mlxspec.cli.generate import generate_command


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("temp is nan: choose", "--temp is nan: choose"),
        ("the seed is nan", "the seed is nan"),
        ("window_size is -1", "--window-size is -1"),
        ("stop_tokens is x", "--stop-token is x"),
        ("kv_bits 7 with kv_group_size 5", "--kv-bits 7 with --kv-group-size 5"),
        ("1 <= ngram_min <= ngram_max", "1 <= --ngram-min <= --ngram-max"),
        ("repetition_context_size is -1", "--repetition-context-size is -1"),
        ("/tmp/top_k/x is no model", "/tmp/top_k/x is no model"),
    ],
)
def test_names_of_the_api_become_those_of_options(message: str, told: str) -> None:
    with generate_command.make_context("generate", ["--prompt", "a"]):
        assert in_option_names(message) == told


def test_without_a_command_a_message_stays_as_it_is() -> None:
    assert in_option_names("top_k is -1") == "top_k is -1"


@pytest.mark.parametrize(
    ("encoding", "output", "error"),
    [
        ("ascii", b"1 ? 2? ?", b"1 \\u2013 2\\xd7 \\u4e00"),
        ("latin-1", b"1 ? 2\xd7 ?", b"1 \\u2013 2\xd7 \\u4e00"),
        ("utf-8", "1 – 2× 一".encode(), "1 – 2× 一".encode()),
    ],
)
def test_what_an_encoding_lacks_is_replaced(
    encoding: str, output: bytes, error: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = io.BytesIO(), io.BytesIO()
    for name, buffer in zip(("stdout", "stderr"), buffers, strict=True):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(buffer, encoding))
    write_plainly()
    for stream in (sys.stdout, sys.stderr):
        stream.write("1 – 2× 一")
        stream.flush()
    assert tuple(buffer.getvalue() for buffer in buffers) == (output, error)


def test_of_warnings_only_those_for_users_become_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The garbage collector runs where it likes: a socket that another library has left open is
    then said to be warned of by a line of ours."""
    monkeypatch.setattr(sys, "warnoptions", [])
    with reported():
        for module in ("mlxspec", "mlxspec.process", "mlx_lm"):
            for category in (UserWarning, ResourceWarning, DeprecationWarning):
                message = f"{category.__name__} in {module}"
                warnings.warn_explicit(message, category, "a.py", 1, module)
    told = capsys.readouterr().err.splitlines()
    assert told == ["Note: UserWarning in mlxspec", "Note: UserWarning in mlxspec.process"]
