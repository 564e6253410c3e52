"""Characters missing from a stream's encoding, and warnings shown as notes."""

from __future__ import annotations

import io
import sys
import warnings

import pytest

from mlxspec.cli.common.notes import reported


@pytest.mark.parametrize(
    ("encoding", "output"),
    [
        ("ascii", b"1 ? 2? ?"),
        ("latin-1", b"1 ? 2\xd7 ?"),
        ("utf-8", "1 – 2× 一".encode()),
    ],
)
def test_what_an_encoding_lacks_is_replaced(
    encoding: str, output: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding))
    with reported():
        sys.stdout.write("1 – 2× 一")
    assert buffer.getvalue() == output


def test_warnings_of_libraries_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "warnoptions", [])
    with reported():
        for category in (UserWarning, ResourceWarning, DeprecationWarning):
            warnings.warn_explicit("a warning", category, "a.py", 1, "mlx_lm")
    assert capsys.readouterr().err == ""
