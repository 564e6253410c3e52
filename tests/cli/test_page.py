"""Pages: where they are written, and how trees are drawn in them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxspec.cli.common.output import check_page, html_page, write_page
from mlxspec.cli.main import main
from mlxspec.errors import OptionError


def page(name: str) -> str:
    """A page with a name of the user's in its title."""
    return html_page([name], name)


@pytest.mark.parametrize("kind", ["html", "nothing yet"])
def test_a_report_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "report"
    path.write_bytes({"html": page("a").encode(), "nothing yet": b""}[kind])
    check_page(path, force=False)
    write_page(path, "new ×", force=False)
    assert path.read_text(encoding="utf-8") == "new ×"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content", [b"# mlxspec\n", b"<!DOCTYPE html>\n<html>", b"\x89PNG", b"\xff"]
)
def test_another_file_is_replaced_with_force_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    for write in (
        lambda: check_page(path, force=False),
        lambda: write_page(path, "new", force=False),
    ):
        with pytest.raises(
            OptionError, match=r"--html .*notes: exists and is not a report .*--force"
        ):
            write()
    assert path.read_bytes() == content
    write_page(path, "new", force=True)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "link to a report", "dangling link"])
def test_what_is_no_regular_file_stays_as_it_is(tmp_path: Path, kind: str, force: bool) -> None:
    path, report = tmp_path / "page.html", tmp_path / "report.html"
    report.write_text(page("a"))
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
    for write in (
        lambda: check_page(path, force=force),
        lambda: write_page(path, "new", force=force),
    ):
        with pytest.raises(
            OptionError, match=r"--html .*: is a directory, a link or a device; name a"
        ):
            write()
    assert os.path.samestat(os.lstat(path), before)
    assert report.read_text() == page("a")


def test_names_that_are_no_utf_8_do_not_keep_a_page_from_being_written(tmp_path: Path) -> None:
    write_page(tmp_path / "page", "half \ud800", force=False)
    assert (tmp_path / "page").read_text() == "half ?"


@pytest.mark.parametrize(
    ("name", "reason"), [(".", "is a directory"), ("missing/page.html", "cannot be written")]
)
def test_a_place_that_takes_no_page_is_known_before(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(OptionError, match=f"--html .*{reason}"):
        check_page(tmp_path / name, force=False)


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "--model", "owner/none", "--prompt", "a", "--html"],
        ["bench", "owner/none", "--html"],
        ["replay", "nowhere.jsonl", "--tokenizer", "owner/none", "--html"],
        ["calibrate", "owner/none", "--html"],
    ],
)
def test_every_command_refuses_another_file_before_its_work(
    tmp_path: Path, command: list[str]
) -> None:
    notes = tmp_path / "notes"
    notes.write_text("irreplaceable")
    for path, force, refusal in (
        (notes, [], f"Error: {command[-1]} {notes}: exists and is not a report"),
        (
            Path(os.devnull),
            ["--force"],
            f"Error: {command[-1]} {os.devnull}: is a directory, a link",
        ),
    ):
        result = CliRunner().invoke(main, [*command, str(path), *force])
        assert result.exit_code == 1
        assert result.stderr.startswith(refusal)
        assert result.stderr.count("\n") == 1
    assert notes.read_text() == "irreplaceable"
