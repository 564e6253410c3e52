"""``mlxspec chat`` through a pipe and at a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import termios
from pathlib import Path
from select import select

import pytest
from click.testing import CliRunner, Result
from prompt_toolkit.history import FileHistory

from mlxspec.cli.chat import chat_command
from mlxspec.cli.chat.terminal import read_line
from tests.cli.test_process import ROOT, Window
from tests.support.scripted_model import write_scripted_model

pytestmark = pytest.mark.slow

LINE = "one two three four\n"
PROMPT = ">\x08"
"""Written by prompt_toolkit once it waits for keys."""


def chat(*arguments: object, stdin: str | bytes) -> Result:
    options = ("--decoder", "prompt-lookup", *arguments)
    return CliRunner().invoke(chat_command, list(map(str, options)), input=stdin)


def test_each_line_of_a_pipe_is_a_turn_and_the_output_its_answers(endless: Path) -> None:
    result = chat("--model", endless, "--max-tokens", 5, stdin="a\n\nb\r\n  \nc")
    assert result.exit_code == 0
    assert result.stdout == LINE * 3
    assert result.stderr == ""


def test_commands(endless: Path) -> None:
    said = "a\n/stats\n/reset\nb\n/stats\n/help\n/exit\nc\n"
    result = chat("--model", endless, "--max-tokens", 5, stdin=said)
    assert result.exit_code == 0
    assert result.stdout == LINE * 2
    assert re.findall(r"answers +(\d+)", result.stderr) == ["1", "1"]
    assert "begin a new conversation" in result.stderr


def test_a_pipe_s_command_that_there_is_not_ends_the_chat(endless: Path) -> None:
    result = chat("--model", endless, "--max-tokens", 5, stdin="a\n/wave\nb\n")
    assert (result.exit_code, result.stdout) == (1, LINE)
    assert "Error: unknown command /wave" in result.stderr


def test_a_path_at_the_start_of_a_message_is_no_command(endless: Path) -> None:
    result = chat("--model", endless, "--max-tokens", 5, stdin="/etc/hosts is what?\n")
    assert result.stdout == LINE


def test_commands_of_a_pipe_save_load_and_take_back(endless: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    said = f"/system Be brief.\na\nb\n/undo\n/save {path}\n/reset\n/load {path}\n/undo\n/system\n"
    result = chat("--model", endless, "--max-tokens", 5, stdin=said)
    assert result.exit_code == 0, result.stderr
    assert messages(path) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": LINE},
    ]
    assert "Removed: b\n" in result.stderr
    assert "Loaded 1 turn.\nRemoved: a\nSystem prompt: Be brief.\n" in result.stderr
    result = chat("--model", endless, "--load", path, "--max-tokens", 5, stdin=f"c\n/save {path}\n")
    assert [message["content"] for message in messages(path)[1::2]] == ["a", "c"]
    result = chat("--model", endless, "--load", path, stdin=f"/save {tmp_path}\n")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        f"Error: {tmp_path}: is a directory, a link or a device; name a regular file\n"
    )
    result = chat("--model", "missing", "--load", tmp_path / "none", stdin="")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path / 'none'}: cannot be read")


def test_another_model_goes_on_and_takes_the_place_of_the_first(
    endless: Path, finite: Path, tmp_path: Path
) -> None:
    other = write_scripted_model(tmp_path / "other", ("ah", " oh"), ends=True)
    said = f"a\n/model {other}\nb\n/model {tmp_path}/none\n"
    result = chat("--model", endless, "--max-tokens", 5, stdin=said)
    assert result.stdout == f"{LINE}ah oh\n"
    assert result.exit_code == 1
    assert f"Error: {tmp_path}/none: no such directory" in result.stderr
    said = f"a\n/model {finite}\n"
    result = chat("--model", endless, "--max-tokens", 5, stdin=said)
    assert result.stderr.startswith("Error: this model's tokenizer has no chat template")


def test_the_model_that_answers_is_known_by_its_alias(
    endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSPEC_CONFIG_DIR", str(tmp_path))
    other = write_scripted_model(tmp_path / "other", ("ah", " oh"), ends=True)
    (tmp_path / "config.toml").write_text(f'[alias]\none = "{endless}"\ntwo = "{other}"\n')
    result = chat("one", "--max-tokens", 5, stdin="/model one\n/model two\na\n")
    assert f"Chatting with {endless}.\nChatting with {other}.\n" in result.stderr
    assert result.stdout == "ah oh\n"


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
        ("one\n\ntwo", ["one", "", "two"]),
        ('"""one\n\ntwo"""\nthree\n', ["one\n\ntwo", "three"]),
        ('"""\none\n  two\n"""\n', ["one\n  two"]),
        ('"""one"""\n', ["one"]),
        ('"""one\ntwo', ["one\ntwo"]),
        ("", []),
    ],
)
def test_messages_of_several_lines(
    text: str, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [read_line() for _ in messages] == messages
    with pytest.raises(EOFError):
        read_line()


class Terminal(Window):
    """A terminal with a keyboard, whose output can be read incrementally."""

    def __init__(self, columns: int) -> None:
        super().__init__(columns)
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read(self, until: str | None = None) -> str:
        """Return new output up to the end of ``until``; the next call continues after it."""
        while until and until not in self._unread:
            ready = select([self._master], [], [], 60)[0]
            assert ready, f"{until!r} does not come after {self._unread!r}"
            self._unread += os.read(self._master, 65536).decode().replace("\r\n", "\n")
        if until is None:
            return self._unread + super().read()
        shown, _, self._unread = self._unread.partition(until)
        return shown + until

    def shown(self, until: str) -> str:
        """Like :meth:`read`, without escape sequences for colours, cursor and modes."""
        return plain(self.read(until))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\x1b[=>78]|\r", "", text)


def start(
    model: Path, terminal: int, *arguments: object, max_tokens: int = 1_000_000, **environment: str
) -> subprocess.Popen[str]:
    program = "from mlxspec.cli.main import main; main()"
    options = ["--model", model, "--decoder", "prompt-lookup", f"--max-tokens={max_tokens}"]
    return subprocess.Popen(
        [sys.executable, "-c", program, "chat", *map(str, [*options, *arguments])],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        text=True,
    )


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """An environment with its own data directory, whose user has seen the hint about answers."""
    (tmp_path / "data" / "memory").mkdir(parents=True)
    return {"MLXSPEC_DATA_DIR": str(tmp_path / "data")}


def history(data: dict[str, str]) -> list[str]:
    """Return the saved answers, the oldest first."""
    path = Path(data["MLXSPEC_DATA_DIR"], "chat_history")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return list(FileHistory(path).load_history_strings())[::-1]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("width", [40, 80, 160])
def test_at_a_terminal_ctrl_c_stops_an_answer_and_twice_leaves(endless: Path, width: int) -> None:
    with Terminal(columns=width) as window:
        process = start(endless, window.terminal, NO_COLOR="1")
        assert "/help lists commands and keys" in " ".join(window.shown(until=PROMPT).split())
        for _ in range(2):
            window.type("go on\r")
            window.read(until=LINE.strip())
            process.send_signal(signal.SIGINT)
            assert "\x1b[1" not in window.read(until="stopped")
            window.read(until=PROMPT)
        window.type("never sent\x03\x03")  # the first press clears the line
        assert "Press Ctrl-C again or Ctrl-D to leave." in " ".join(
            window.shown(until="leave.").split()
        )
        window.read(until=PROMPT)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_pasted_lines_are_one_message_as_they_are_and_kept_for_the_next_chat(
    endless: Path, tmp_path: Path, data: dict[str, str]
) -> None:
    code = '"""Doc."""\ndef f(x):\n\treturn x \\\n  + 1\n/help'
    with Terminal(columns=80) as window:
        process = start(endless, window.terminal, max_tokens=5, **data)
        window.read(until=PROMPT)
        window.type(f"\x1b[200~{code.replace(chr(10), chr(13))}\x1b[201~\r")
        assert LINE in window.shown(until="reused")
        window.read(until=PROMPT)
        window.type("second\x1b\rthird\x0afourth\r")  # two ways to enter a new line
        window.read(until="reused")
        window.read(until=PROMPT)
        window.type('"""\rone\r\r  two"""\r')
        window.read(until="reused")
        window.read(until=PROMPT)
        window.type(f"/save {tmp_path / 'chat.json'}\r")
        window.read(until="Saved 3 turns")
        window.read(until=PROMPT)
        window.type("\x04")
        assert process.wait() == 0
    asked = [message["content"] for message in messages(tmp_path / "chat.json")[::2]]
    assert asked == [code, "second\nthird\nfourth", "one\n\n  two"]
    typed = [*asked[:2], '"""\none\n\n  two"""', f"/save {tmp_path / 'chat.json'}"]
    assert history(data) == typed
    with Terminal(columns=80) as window:
        process = start(endless, window.terminal, max_tokens=5, **data)
        window.read(until=PROMPT)
        window.type("\x10\x10\r")  # back to the message before the command
        window.read(until="reused")
        window.read(until=PROMPT)
        window.type(f"/save {tmp_path / 'again.json'}\r")
        window.read(until="Saved")
        window.read(until=PROMPT)
        window.type("/exit\r")
        assert process.wait() == 0
    assert messages(tmp_path / "again.json")[0]["content"] == asked[2]


def messages(path: Path) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return found


def test_what_is_typed_during_an_answer_waits_at_the_prompt(endless: Path, tmp_path: Path) -> None:
    with Terminal(columns=80) as window:
        process = start(endless, window.terminal, "--no-history", "--no-color")
        window.read(until=PROMPT)
        window.type("early\r")
        window.read(until=LINE.strip())
        window.type("late")
        for more in ("\r", f"/save {tmp_path / 'chat.json'}\r"):
            process.send_signal(signal.SIGINT)
            window.read(until="stopped")
            window.read(until=PROMPT)
            window.type(more)
            window.read(until=LINE.strip() if more == "\r" else "Saved 2 turns")
        window.read(until=PROMPT)
        window.type("/exit\r")
        assert process.wait() == 0
    asked = [message["content"] for message in messages(tmp_path / "chat.json")[::2]]
    assert asked == ["early", "late"]


def test_commands_are_completed_and_a_cut_answer_says_how_to_get_another(
    endless: Path, tmp_path: Path
) -> None:
    with Terminal(columns=100) as window:
        process = start(endless, window.terminal, "--no-history", max_tokens=3)
        window.read(until=PROMPT)
        window.type("/und")
        window.read(until="remove the last message")
        window.type("\t\r")
        window.read(until="nothing has been said yet")
        window.read(until=PROMPT)
        window.type("go on\r")
        window.read(until="cut by --max-tokens")
        window.read(until=PROMPT)
        window.type("/sav")
        window.read(until="write the conversation")
        window.type(f"\t {tmp_path / 'chat.json'}\r")
        window.read(until="Saved 1 turn")
        window.read(until=PROMPT)
        window.type("/retry\r")
        window.read(until="gets the same answer")
        window.read(until="cut by --max-tokens")
        window.read(until=PROMPT)
        window.type("/retry 0.5\r")
        window.read(until="cut by --max-tokens")
        window.read(until=PROMPT)
        window.type("/retry hot\r")
        window.read(until="give a temperature")
        window.read(until=PROMPT)
        window.type("/retry -1\r")
        window.read(until="temp is -1")
        window.read(until=PROMPT)
        window.type("/undo\r")
        window.read(until="Removed: go on")
        window.read(until=PROMPT)
        window.type("/retry\r")
        window.read(until="nothing has been said yet")
        window.read(until=PROMPT)
        window.type("\x04")
        assert process.wait() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["\x04", "/quit\r", "/bye\r"])
def test_leaving_gives_the_terminal_back_as_it_was(endless: Path, end: str) -> None:
    with Terminal(columns=30) as window:
        before = termios.tcgetattr(window.terminal)
        process = start(endless, window.terminal)
        window.read(until=PROMPT)
        window.type(end)
        assert process.wait() == 0
        assert termios.tcgetattr(window.terminal) == before
        os.close(window.terminal)
        assert "\x1b[?2004h" not in window.read().rpartition("\x1b[?2004l")[2]


def test_an_error_gives_the_terminal_back_as_it_was(tmp_path: Path) -> None:
    with Terminal(columns=80) as window:
        before = termios.tcgetattr(window.terminal)
        process = start(tmp_path / "missing", window.terminal)
        assert process.wait() == 1
        assert termios.tcgetattr(window.terminal) == before


def test_a_dumb_terminal_gets_lines_and_nothing_else(endless: Path) -> None:
    with Terminal(columns=80) as window:
        process = start(endless, window.terminal, max_tokens=5, TERM="dumb")
        shown = window.read(until="> ")
        window.type("go on\n")
        shown += window.read(until="\n> ")
        window.type("/exit\n")
        assert process.wait() == 0
    assert LINE in shown
    assert "\x1b" not in shown


def test_the_output_may_go_to_a_file_while_a_user_types(endless: Path, tmp_path: Path) -> None:
    options = ["--model", str(endless), "--decoder", "prompt-lookup", "--max-tokens", "5"]
    program = "from mlxspec.cli.main import main; main()"
    with Terminal(columns=80) as window, (tmp_path / "out").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", *options],
            cwd=ROOT,
            stdin=window.terminal,
            stdout=output,
            stderr=window.terminal,
        )
        window.read(until="> ")
        window.type("go on\n")
        window.read(until="reused")
        window.type("/exit\n")
        assert process.wait() == 0
    assert (tmp_path / "out").read_text() == LINE


def test_the_greeting_names_any_model_and_answers_are_rendered_if_wanted(tmp_path: Path) -> None:
    """Nothing of the model's name takes effect, and the terminal is given back as it was."""
    pieces = ("a", " **big**", " one")
    model = write_scripted_model(tmp_path / "m\x1b]2;x\a", pieces, ends=True)
    with Terminal(columns=1000) as window:
        before = termios.tcgetattr(window.terminal)
        process = start(model, window.terminal, "--markdown", NO_COLOR="1")
        shown = window.read(until=PROMPT)
        window.type("a\r")
        assert "a big one" in window.shown(until="reused")
        window.read(until=PROMPT)
        window.type("\x04")
        assert process.wait() == 0
        assert termios.tcgetattr(window.terminal) == before
    assert f"Chatting with {tmp_path}/m␛]2;x␇. /help" in shown
