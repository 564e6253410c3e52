"""``mlxspec chat`` through a pipe and at a terminal."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from select import select

import pytest
from click.testing import CliRunner, Result

from mlxspec.cli.chat import ChatInput, chat_command
from tests.cli.test_process import ROOT, Window

pytestmark = pytest.mark.slow

LINE = "one two three four\n"


def chat(*arguments: object, stdin: str | bytes) -> Result:
    options = ("--decoder", "prompt-lookup", *arguments)
    return CliRunner().invoke(chat_command, list(map(str, options)), input=stdin)


def test_each_line_of_a_pipe_is_a_turn_and_the_output_its_answers(endless: Path) -> None:
    result = chat("--model", endless, "--max-tokens", 5, stdin="a\n\nb\r\n  \nc")
    assert result.exit_code == 0
    assert result.stdout == LINE * 3
    assert result.stderr == ""


def test_commands(endless: Path) -> None:
    said = "a\n/stats\n/reset\n/wave\nb\n/stats\n/help\n/exit\nc\n"
    result = chat("--model", endless, "--max-tokens", 5, stdin=said)
    assert result.exit_code == 0
    assert result.stdout == LINE * 2
    assert "there is no command /wave" in result.stderr
    assert re.findall(r"answers +(\d+)", result.stderr) == ["1", "1"]
    assert "/reset   begin" in result.stderr


def test_a_path_at_the_start_of_a_message_is_no_command(endless: Path) -> None:
    result = chat("--model", endless, "--max-tokens", 5, stdin="/etc/hosts is what?\n")
    assert result.stdout == LINE


def test_a_model_without_a_chat_template_is_refused_in_a_line(finite: Path) -> None:
    result = chat("--model", finite, stdin="a\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: this model's tokenizer has no chat template")
    assert result.stderr.count("\n") == 1


def test_a_turn_of_a_pipe_that_cannot_be_answered_ends_the_chat() -> None:
    result = chat("--model", "demo", "--max-tokens", 5, stdin="word " * 2000)
    assert result.exit_code == 1
    assert "shorten the prompt" in result.stderr


def test_a_turn_of_a_pipe_that_is_not_utf_8_is_refused_after_the_answers_before(
    endless: Path,
) -> None:
    result = chat("--model", endless, "--max-tokens", 5, stdin=b"a\ncaf\xe9\nb\n")
    assert result.exit_code == 1
    assert result.stdout == LINE
    assert result.stderr == "Error: standard input is not UTF-8 text: convert it to UTF-8\n"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("one\ntwo", ["one", "two"]),
        ('"""one\n\ntwo"""\nthree\n', ["one\n\ntwo", "three"]),
        ('"""\none\n  two\n"""\n', ["one\n  two"]),
        ('"""one"""\n', ["one"]),
        ('"""one\ntwo', ["one\ntwo"]),
        ("one\\\ntwo\\\nthree\nfour", ["one\ntwo\nthree", "four"]),
        ("", []),
    ],
)
def test_messages_of_several_lines(
    text: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    turns = ChatInput()
    assert list(iter(turns.message, None)) == messages


class Terminal(Window):
    """A terminal with a keyboard."""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self, process: subprocess.Popen[str], until: str) -> str:
        """Press Ctrl-C at a prompt, and again where it came before readline waited for keys."""
        shown = False
        while not shown:
            process.send_signal(signal.SIGINT)
            shown = bool(select([self._master], [], [], 5)[0])
        return self.read(until=until)


def start(
    model: Path, terminal: int, max_tokens: int = 1_000_000, **environment: str
) -> subprocess.Popen[str]:
    program = "from mlxspec.cli.main import main; main()"
    options = ["--model", str(model), "--decoder", "prompt-lookup", f"--max-tokens={max_tokens}"]
    return subprocess.Popen(
        [sys.executable, "-c", program, "chat", *options],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        text=True,
    )


def test_at_a_terminal_ctrl_c_stops_an_answer_and_twice_leaves(endless: Path) -> None:
    with Terminal(columns=60) as window:
        process = start(endless, window.terminal, NO_COLOR="1")
        assert "/help says what can be typed" in " ".join(window.read(until="> ").split())
        for _ in range(2):
            window.type("go on\n")
            window.read(until=LINE.strip())
            process.send_signal(signal.SIGINT)
            figures = window.read(until="> ")
            assert "per step" in figures
            assert "stopped" in figures
            assert "\x1b[1" not in figures
        assert "Ctrl-C again or Ctrl-D leaves." in window.interrupt(process, until="> ")
        window.interrupt(process, until="\n")
        assert process.wait() == 0


def test_an_answer_that_is_cut_says_by_what(endless: Path) -> None:
    with Terminal(columns=100) as window:
        process = start(endless, window.terminal, max_tokens=3)
        window.read(until="> ")
        window.type("go on\n")
        assert "cut by --max-tokens" in window.read(until="\r\n> ")
        window.type("\x04")
        assert process.wait() == 0


def test_ctrl_d_leaves(endless: Path) -> None:
    with Terminal(columns=30) as window:
        process = start(endless, window.terminal)
        window.read(until="> ")
        window.type("\x04")
        assert process.wait() == 0


def test_the_greeting_names_any_model_and_nothing_of_it_takes_effect(
    endless: Path, tmp_path: Path
) -> None:
    model = tmp_path / "m[" / "x]\x1b[2J"
    shutil.copytree(endless, model)
    with Terminal(columns=1000) as window:
        process = start(model, window.terminal, NO_COLOR="1")
        shown = window.read(until="> ")
        window.type("\x04")
        assert process.wait() == 0
    assert f"Chatting with {tmp_path}/m[/x]␛[2J. /help" in shown
