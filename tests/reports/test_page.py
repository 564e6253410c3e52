"""Writing pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxspec.errors import OptionError
from mlxspec.reports import check_writable, write_page


def test_a_page_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    write_page(page, "new ×")
    assert page.read_text(encoding="utf-8") == "new ×"
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_that_cannot_be_written_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_page(page, "half \ud800")
    assert page.read_text() == "old"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize("name", [".", "missing/page.html"])
def test_a_place_that_takes_no_page_is_known_before(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"--html .* cannot be written"):
        check_writable(tmp_path / name, "--html")
