"""What a stream's encoding lacks."""

from __future__ import annotations

import io
import sys

import pytest

from mlxspec.cli.plain_characters import write_plainly


@pytest.mark.parametrize(
    ("encoding", "output", "error"),
    [
        ("ascii", b"1 - 2x ?", b"1 - 2x \\u4e00"),
        ("latin-1", b"1 - 2\xd7 ?", b"1 - 2\xd7 \\u4e00"),
        ("utf-8", "1 – 2× 一".encode(), "1 – 2× 一".encode()),
    ],
)
def test_a_dash_becomes_a_hyphen_where_there_is_none(
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
