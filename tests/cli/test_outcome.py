"""Characters that a stream's encoding lacks, and warnings that become notes."""

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
