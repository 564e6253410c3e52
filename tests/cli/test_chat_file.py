"""Saved chats: their format for other programs, and files that are never overwritten."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from mlxspec.cli.chat import read_chat, write_chat
from mlxspec.errors import FileError

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Wer liest “das”? 🦊\n\tZeile 2"},
    {"role": "assistant", "content": "Ich."},
]


def test_a_saved_chat_is_openai_s_and_private_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "my chat.json"
    write_chat(path, "demo", [SYSTEM, *TURNS])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["messages"] == [SYSTEM, *TURNS]
    assert record["model"] == "demo"
    assert "🦊" in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_chat(path) == (SYSTEM["content"], TURNS)
    write_chat(path, "other", TURNS)  # an older save is replaced
    assert read_chat(path) == (None, TURNS)
    assert os.listdir(tmp_path) == ["my chat.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"precious",
        b"",
        b"[]",
        b'{"model": "m", "created": 1, "messages": []',
        b'{"model": "m", "created": 1, "messages": [{"role": "tool", "content": ""}]}',
    ],
)
def test_only_saved_chats_are_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FileError, match="is not a saved chat"):
        write_chat(path, "demo", TURNS)
    assert path.read_bytes() == content


def test_links_pipes_and_directories_are_neither_written_nor_waited_for(tmp_path: Path) -> None:
    write_chat(tmp_path / "chat", "demo", TURNS)
    (tmp_path / "link").symlink_to("chat")
    (tmp_path / "nowhere").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("link", "nowhere", "pipe", "directory", "missing/chat"):
        with pytest.raises(FileError):
            write_chat(tmp_path / name, "demo", TURNS)
    for name in ("nowhere", "directory", "missing"):
        with pytest.raises(FileError):
            read_chat(tmp_path / name)
    assert read_chat(tmp_path / "link") == (None, TURNS)


def test_what_other_programs_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    path.write_text(json.dumps({"messages": messages, "temperature": 1}), encoding="utf-8-sig")
    assert read_chat(path) == (SYSTEM["content"], [{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no json", "Expecting value"),
        (b"\xff", "can't decode byte"),
        (b"[" * 100_000, "recursion"),
        (b"{}", 'it must have "messages"'),
        (b'{"messages": [{"content": "a"}]}', 'each with a "role"'),
        (
            b'{"messages": [{"role": "tool", "content": "a"}]}',
            "its messages must alternate between user and assistant",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "a"}]}',
            "alternate between user and assistant",
        ),
    ],
)
def test_an_invalid_saved_chat_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FileError) as error:
        read_chat(path)
    assert str(error.value).startswith(f"{path}: is not a saved chat (")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="File name too long"):
        write_chat(tmp_path / ("a" * 300), "demo", TURNS)
