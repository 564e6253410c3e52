"""The command as a process: at a terminal, in a pipe, interrupted."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import mlxspec

pytestmark = pytest.mark.slow

ROOT = Path(mlxspec.__file__).parents[1]
LINE = "one two three four\n"
ENDLESS = ("--prompt", "a", "--max-tokens", "1000000")


def start(model: Path, *arguments: str, stdout: int, stderr: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    return subprocess.Popen(
        [sys.executable, "decoder.py", "--model", str(model), *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


class Window:
    """A terminal window that a process writes to."""

    def __init__(self, columns: int) -> None:
        self._master, self.terminal = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._master)

    def read(self, until: str | None = None) -> str:
        """Wait for a text or the end of the output."""
        data = b""
        while until is None or until.encode() not in data:
            try:
                part = os.read(self._master, 65536)
            except OSError:  # on Linux: the other end is closed
                break
            if not part:
                break
            data += part
        return data.decode().replace("\r\n", "\n")

    def run(self, model: Path, *arguments: str) -> subprocess.Popen[str]:
        process = start(model, *arguments, stdout=self.terminal, stderr=self.terminal)
        os.close(self.terminal)
        return process


def after_loading(shown: str) -> str:
    """Return a terminal's output after the progress bar "Loading" is erased."""
    bar, _, rest = shown.rpartition("\x1b[2K")
    assert "Loading" in bar
    return rest


def test_a_terminal_gets_two_colours_and_a_panel_that_fits_its_width(endless: Path):
    with Window(columns=40) as window:
        process = window.run(endless, "--prompt", "a", "--max-tokens", "20", "--n-draft", "10")
        shown = after_loading(window.read())
        assert process.wait() == 0
    assert re.search(r"\x1b\[1;38;5;32m (two|three|four)\x1b\[0m", shown)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert "\x1b" not in plain
    assert plain.startswith(LINE * 4)
    assert "■ accepted draft" in plain
    assert max(map(len, plain.splitlines())) <= 40


def test_a_terminal_gets_no_control_sequence_of_the_model(hostile: Path):
    with Window(columns=80) as window:
        process = window.run(hostile, "--prompt", "a", "--no-color", "--decoder", "plain")
        shown = after_loading(window.read())
        assert process.wait() == 0
    assert shown.startswith("safe␛[2J␛]0;owned␇\ufffd31m\ufffd␡end\n")
    assert "\x1b" not in shown


def test_a_pipe_gets_the_text_of_the_model_and_no_library_s_chatter(hostile: Path):
    process = start(hostile, "--prompt", "a", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    text, errors = process.communicate()
    assert text.startswith("safe\x1b[2J\x1b]0;owned\x07")
    # On a busy machine, mlxspec adds a note about step times.
    assert all(line[:1] in "╭│╰" or "Note: step" in line for line in errors.splitlines())


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("arguments", [ENDLESS, (*ENDLESS, "--n-draft", "0")])
def test_ctrl_c_ends_with_the_text_so_far_the_panel_and_130(
    endless: Path, arguments: tuple[str, ...]
):
    with Window(columns=80) as window:
        process = window.run(endless, *arguments)
        window.read(until="three")
        process.send_signal(signal.SIGINT)
        rest = window.read()
        assert process.wait() == 130
    assert "tokens per step" in rest
    assert "interrupted" in rest
    assert "Traceback" not in rest


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(endless: Path):
    plain = ("--decoder", "plain")
    process = start(endless, *ENDLESS, *plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == LINE
    process.stdout.close()
    assert process.wait() == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def file_of_prompts(tmp_path: Path, count: int, max_tokens: int) -> str:
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": "a", "max_tokens": max_tokens})
    path.write_text(f"{line}\n" * count)
    return str(path)


def test_a_file_of_prompts_has_a_bar_and_ctrl_c_ends_it_with_what_there_is(
    endless: Path, tmp_path: Path
):
    prompts = file_of_prompts(tmp_path, 2, 1_000_000)
    with Window(columns=40) as window, open(tmp_path / "results.jsonl", "w+") as results:
        arguments = ("--prompts", prompts, "--decoder", "plain", "--no-color")
        process = start(endless, *arguments, stdout=results.fileno(), stderr=window.terminal)
        os.close(window.terminal)
        window.read(until="0/?")
        process.send_signal(signal.SIGINT)
        rest = window.read()
        assert process.wait() == 130
        results.seek(0)
        found = [json.loads(line) for line in results]
    assert all(one["finish_reason"] == "interrupted" for one in found)
    assert re.search(r"prompts answered +\d", rest)
    assert "Traceback" not in rest


@pytest.mark.nightly
def test_a_reader_that_closes_the_pipe_ends_a_file_of_prompts_quietly(
    endless: Path, tmp_path: Path
):
    prompts = file_of_prompts(tmp_path, 200, 50)
    arguments = ("--prompts", prompts, "--decoder", "plain")
    process = start(endless, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["text"] == LINE * 10
    process.stdout.close()
    assert process.wait() == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(endless: Path):
    with open("/dev/full", "w") as full:
        plain = ("--prompt", "a", "--decoder", "plain")
        process = start(endless, *plain, stdout=full.fileno(), stderr=subprocess.PIPE)
        errors = process.communicate()[1]
    assert process.returncode == 1
    assert re.fullmatch(r"Error: no space left .*\n", errors)


def test_a_closed_standard_output_is_no_traceback(finite: Path):
    program = shlex.join([sys.executable, "decoder.py", "--model", str(finite)])
    command = f"{program} --prompt a --decoder plain >&-"
    run = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 0
    assert "Traceback" not in run.stderr
