"""Telling commands in a chat from messages."""

from __future__ import annotations

import pytest

from mlxspec.cli.chat import COMMANDS, command_in, help_text
from mlxspec.errors import OptionError


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "",
        "what does /help do?",
        " /help",
        "/etc/hosts is what?",
        "/usr/bin",
        "// a comment",
        "/* a comment */\nint main;",
        "/",
        "/ 2",
        "/1",
        "\n/help",
    ],
)
def test_a_message(text: str) -> None:
    assert command_in(text) is None


@pytest.mark.parametrize(
    ("text", "spelling", "argument"),
    [
        ("/help", "/help", ""),
        ("/stats  ", "/stats", ""),
        ("/clear", "/reset /clear", ""),
        ("/quit", "/exit /quit /bye", ""),
        ("/bye", "/exit /quit /bye", ""),
        ("/save  my chat.json ", "/save FILE", "my chat.json"),
        ("/load /etc/hosts", "/load FILE", "/etc/hosts"),
        ("/system You are brief.\nAnd polite.", "/system [TEXT]", "You are brief.\nAnd polite."),
        ("/system", "/system [TEXT]", ""),
        ("/retry 0.5", "/retry [TEMP]", "0.5"),
    ],
)
def test_a_command(text: str, spelling: str, argument: str) -> None:
    assert command_in(text) == (COMMANDS[spelling][1], argument)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/hlep", "did you mean /help?"),
        ("/hlep me", "did you mean /help?"),
        ("/svae x.json", "did you mean /save?"),
        ("/wave", "unknown command /wave"),
        ("/etc is what?", "put a space before it"),
        ("/undo it all", "write it as /undo; to send it as a message"),
        ("/save", "write it as /save FILE"),
    ],
)
def test_an_unknown_command_is_reported_with_a_suggestion(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        command_in(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_help_names_everything_and_fits_a_window_of_80_columns() -> None:
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= 78
    for spelling, (about, _) in COMMANDS.items():
        assert any(line.startswith(spelling) and about in line for line in lines)
