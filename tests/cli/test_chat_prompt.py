"""What a terminal's user has typed before, and what is completed."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxspec.cli.chat import terminal as chat_prompt
from mlxspec.cli.chat.terminal import ChatCompleter, TerminalInput, keep_message, kept_messages
from mlxspec.errors import OptionError


def kept(path: Path) -> list[str]:
    """As prompt_toolkit reads it, the oldest first."""
    return list(FileHistory(path).load_history_strings())[::-1]


def test_messages_are_kept_privately_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "of" / "mine" / "history"
    typed = ["one", "two\n\n# lines\n+ and a sign", " /path", "Grüße 🦊", "bytes \udcff"]
    for text in typed:
        keep_message(path, text)
    assert kept(path) == [*typed[:-1], "bytes ?"]
    assert kept_messages(path) == kept(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_several_chats_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history"

    def chat(number: int) -> list[str]:
        typed = [f"{number} {turn}\n" + f"{number}" * 30_000 for turn in range(5)]
        for text in typed:
            keep_message(path, text)
        return typed

    with ThreadPoolExecutor(4) as pool:
        typed = [text for own in pool.map(chat, range(4)) for text in own]
    assert sorted(kept(path)) == sorted(typed)


def test_a_long_history_loses_its_older_half_and_no_part_of_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_prompt, "_MOST_BYTES", 10_000)
    path = tmp_path / "history"
    typed = [f"{number}\n{'x' * 90}" for number in range(100)]
    for count, text in enumerate(typed, 1):
        keep_message(path, text)
        assert kept(path) == typed[:count][-len(kept(path)) :]
        assert path.stat().st_size < 10_200
    assert 35 < len(kept(path)) < 100
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_message_longer_than_the_history_may_be_goes_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_prompt, "_MOST_BYTES", 10_000)
    path = tmp_path / "history"
    keep_message(path, "x" * 20_000)
    keep_message(path, "short")
    assert kept(path) == ["short"]


@pytest.mark.parametrize("kind", ["a directory", "a link", "below a file"])
def test_what_cannot_be_kept_is_told_once_and_stays_for_this_chat(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history"
    if kind == "a directory":
        path.mkdir()
    elif kind == "a link":
        (tmp_path / "other").write_text("precious")
        path.symlink_to("other")
    else:
        path.write_text("precious")
        path /= "history"
    with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
        turns = TerminalInput(path, list, color=False)
        for text in ("typed", "typed again", "and again"):
            keys.send_text(f"{text}\r")
            assert turns.message() == text
    told = capsys.readouterr().err
    assert told.startswith("Note: ")
    assert told.endswith("messages are not kept for the next chat\n")
    assert told.count("\n") == 1
    assert str(tmp_path) in told
    if kind == "a link":
        assert (tmp_path / "other").read_text() == "precious"


def completed(text: str, asked: bool = True, models: tuple[str, ...] = ("demo", "other")) -> list:
    completer = ChatCompleter(lambda: models)
    event = CompleteEvent(completion_requested=asked)
    found = completer.get_completions(Document(text), event)
    return [text[: len(text) + one.start_position] + one.text for one in found]


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/un", ["/undo"]),
        ("/s", ["/system ", "/save ", "/stats"]),
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
        ("", []),
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


def test_files_are_looked_up_when_tab_is_pressed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.json").touch()
    monkeypatch.chdir(tmp_path)
    assert completed("/save f", asked=False) == []
    assert completed("/un", asked=False) == ["/undo"]


def test_a_server_that_has_gone_has_no_models() -> None:
    def gone() -> list[str]:
        raise OptionError("gone")

    completer = ChatCompleter(gone)
    assert [*completer.get_completions(Document("/model "), CompleteEvent())] == []


def test_the_history_is_beside_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxspec.cli.chat.terminal import history_file

    monkeypatch.setenv("MLXSPEC_DATA_DIR", os.sep + "elsewhere")
    assert history_file() == Path("/elsewhere/chat_history")
