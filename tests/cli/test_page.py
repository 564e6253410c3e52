"""HTML pages of reports: their paths, and files that they never replace."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxspec.cli.common.output import ReportOptions
from mlxspec.cli.main import main
from mlxspec.errors import MlxspecError


def write(path: Path, content: str) -> None:
    """Check the path and write a page with this content."""
    ReportOptions(html=path).show_tables({}, [content])


@pytest.mark.parametrize("before", [None, "", "<!DOCTYPE html>\n<html>"])
def test_a_page_replaces_another_one_and_leaves_nothing_else(
    tmp_path: Path, before: str | None
) -> None:
    path = tmp_path / "report.html"
    if before is not None:
        path.write_text(before)
    write(path, "new × <b>")
    assert "new × &lt;b&gt;" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "link to a report", "dangling link"])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str) -> None:
    path, report = tmp_path / "page.html", tmp_path / "report.html"
    report.write_text("an older one")
    if kind == "device":
        path = Path(os.devnull)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to(report if kind == "link to a report" else "nowhere")
    before = os.lstat(path)
    with pytest.raises(MlxspecError):
        write(path, "new")
    assert os.path.samestat(os.lstat(path), before)
    assert report.read_text() == "an older one"


def test_names_that_are_no_utf_8_do_not_keep_a_page_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxspec.cli.common.output.print_tables", lambda *_: None)
    write(tmp_path / "page.html", "half \ud800")
    assert "half ?" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "--model", "owner/none", "--prompt", "a", "--html"],
        ["bench", "owner/none", "--html"],
        ["replay", "nowhere.jsonl", "--tokenizer", "owner/none", "--html"],
        ["calibrate", "owner/none", "--html"],
    ],
)
def test_every_command_refuses_another_place_before_its_work(
    tmp_path: Path, command: list[str]
) -> None:
    notes = tmp_path / "notes"
    notes.write_text("irreplaceable")
    for path, refusal in (
        (notes, f"Error: --html {notes}: choose a name *.html"),
        (tmp_path / "missing" / "page.html", f"Error: {tmp_path}/missing/page.html: cannot be"),
    ):
        result = CliRunner().invoke(main, [*command, str(path)])
        assert result.exit_code == 1
        assert result.stderr.startswith(refusal)
        assert result.stderr.count("\n") == 1
    assert notes.read_text() == "irreplaceable"
