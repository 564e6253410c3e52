"""History and completion of a chat's input at a terminal."""

from __future__ import annotations

import os
import pty
import stat
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxspec.cli.chat.terminal import ChatCompleter, kept_history, terminal_reader
from mlxspec.errors import OptionError


def type_in(*messages: str) -> None:
    """Type messages into a chat."""
    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
        read = terminal_reader(True, list, color=False)
        for text in messages:
            keys.send_text(f"{text}\r")
            assert read() == text


def test_messages_are_kept_privately_beside_the_memory_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path / "of" / "mine"))
    type_in("one", "two", "two", " /path", "Grüße 🦊")
    path = tmp_path / "of" / "mine" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    type_in("three")
    kept = [*kept_history().load_history_strings()][::-1]
    assert kept == ["one", "two", " /path", "Grüße 🦊", "three"]


@pytest.mark.parametrize("kind", ["a directory", "below a file"])
def test_history_that_cannot_be_saved_is_reported_once_and_kept_for_this_chat(
    tmp_path: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path))
    if kind == "a directory":
        (tmp_path / "chat_history").mkdir()
    else:
        (tmp_path / "file").write_text("precious")
        monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path / "file"))
    type_in("typed", "typed again")
    shown = capsys.readouterr().err
    assert shown.startswith(f"Note: {tmp_path}")
    assert shown.endswith("messages are not kept for the next chat\n")
    assert shown.count("\n") == 1


def test_a_line_typed_before_the_prompt_appears_is_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_DATA_DIR", str(tmp_path))
    user, terminal = pty.openpty()
    with (
        open(terminal) as stdin,
        create_pipe_input() as keys,
        create_app_session(keys, DummyOutput()),
    ):
        monkeypatch.setattr("sys.stdin", stdin)
        read = terminal_reader(True, list, color=False)
        os.write(user, b"while it loads\rhal")
        assert read() == "while it loads"
        keys.send_text("then\r")
        assert read() == "then"
    os.close(user)
    assert capsys.readouterr().err == "> while it loads\n"
    assert [*kept_history().load_history_strings()] == ["then", "while it loads"]


def completed(text: str) -> list[str]:
    found = ChatCompleter(lambda: ["demo", "other"]).get_completions(
        Document(text), CompleteEvent()
    )
    return [text[: len(text) + one.start_position] + one.text for one in found]


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/un", ["/undo"]),
        ("/s", ["/system", "/save", "/stats"]),
        ("/cl", ["/clear"]),
        ("/model ot", ["/model other"]),
        ("/model  d", ["/model  demo", "/model  directory"]),
        ("/save f", ["/save file.json"]),
        ("/load directory/", ["/load directory/in it"]),
        ("/load ~/f", ["/load ~/file.json"]),
        ("/stats f", []),
        ("/wave f", []),
        ("hello /un", []),
        (" /un", []),
        ("/un\nmore", []),
    ],
)
def test_commands_and_names_are_completed(
    text: str, completions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.json").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "in it").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completed(text) == completions


def test_a_server_that_has_gone_has_no_models() -> None:
    def gone() -> list[str]:
        raise OptionError("gone")

    found = ChatCompleter(gone).get_completions(Document("/model nowhere"), CompleteEvent())
    assert [*found] == []
