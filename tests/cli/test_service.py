"""``mlxspec service``, with programs in the places of launchctl and systemctl."""

from __future__ import annotations

import ast
import os
import plistlib
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxspec.cli import service
from mlxspec.cli.common.generation import API_KEY
from mlxspec.cli.service import Systemd
from tests.support.command_line import run

FAKE = """\
#!/bin/sh
echo "${0##*/} $*" >> "$FAKES/calls"
if [ -e "$FAKES/broken" ]; then echo "Failed to connect to bus: No medium found" >&2; exit 1; fi
case "$*" in
*" show "*) echo active;;
bootstrap*) : > "$FAKES/loaded";;
bootout*) [ -e "$FAKES/loaded" ] || exit 3; /bin/rm "$FAKES/loaded";;
"print gui/"*/*) [ -e "$FAKES/loaded" ] || exit 113
    printf '%s = {\\n\\tstate = running\\n\\tpid = 123\\n\\t\\tstate = active\\n}\\n' "$2";;
esac
"""
PROGRAMS = ("launchctl", "systemctl", "journalctl", "tail")
VARIABLES = (*service._PATHS, API_KEY, "MLXSPEC_MODEL", "MLXSPEC_MEMORY")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with these programs and ``mlxspec``, which is all of PATH; "calls" has the calls."""
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith("MLXSPEC_"))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLXSPEC_CONFIG_DIR", str(tmp_path / "config"))
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name in (*PROGRAMS, "mlxspec"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("FAKES", str(folder))
    monkeypatch.setattr(sys, "argv", [str(folder / "mlxspec")])
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def linux(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "platform", "linux")
    return Path.home() / ".config/systemd/user/mlxspec.service"


@pytest.fixture
def mac(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "platform", "darwin")
    return Path.home() / "Library/LaunchAgents/io.github.mlxspec.plist"


@pytest.fixture(params=["linux", "mac"])
def unit(request: pytest.FixtureRequest) -> Path:
    """The file of the service, on either system."""
    path: Path = request.getfixturevalue(request.param)
    return path


def installed(*arguments: str) -> str:
    result = run("service", "install", "--yes", *arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*arguments: str) -> str:
    """The error of a command, in one line."""
    result = run("service", *arguments)
    assert result.exit_code in (1, 2)
    *_, error = result.stderr.splitlines()
    return error


def calls(fakes: Path) -> list[str]:
    path = fakes / "calls"
    made = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return made


def unit_words(unit: Path, name: str) -> list[list[str]]:
    """The words of a unit's lines of this name, by the escapes of C, which systemd has too."""
    lines = re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)
    quoted = [re.findall(r'"(?:[^"\\]|\\.)*"', line.replace("%%", "%")) for line in lines]
    return [[ast.literal_eval(word) for word in words] for words in quoted]


def test_systemd_runs_it(linux: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSPEC_MEMORY", "/a 100%/$x")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    told = installed("demo", "--port", "8123", "--chat-template-config", '{"a": "$x 5%"}')
    words = [str(fakes / "mlxspec"), "serve", "demo", "--port", "8123", "--chat-template-config"]
    assert unit_words(linux, "ExecStart") == [[*words, '{"a": "$$x 5%"}']]
    assert unit_words(linux, "Environment") == [
        [f"MLXSPEC_CONFIG_DIR={Path.cwd()}/config"],
        ["MLXSPEC_MEMORY=/a 100%/$x"],
    ]
    text = linux.read_text()
    assert f"\nWorkingDirectory={Path.cwd()}\n" in text
    assert "\nTimeoutStopSec=20\n" in text
    assert all(f"+{line}" in told.splitlines() for line in text.splitlines())
    assert calls(fakes) == [
        "systemctl --user show-environment",
        "systemctl --user daemon-reload",
        f"systemctl --user enable {linux}",
        "systemctl --user reset-failed mlxspec.service",
        "systemctl --user restart mlxspec.service",
    ]


def test_launchd_runs_it(mac: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/models & more")
    installed("demo", "--grace", "20.5", "-q")
    agent = plistlib.loads(mac.read_bytes())
    assert agent["ProgramArguments"] == [
        *(str(fakes / "mlxspec"), "serve", "demo", "--grace", "20.5", "-q")
    ]
    assert agent["EnvironmentVariables"] == {
        "HF_HOME": "/models & more",
        "MLXSPEC_CONFIG_DIR": f"{Path.cwd()}/config",
    }
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] == 30
    log = Path(agent["StandardErrorPath"])
    assert log == Path.home() / "Library/Logs/mlxspec/serve.log"
    assert log.parent.stat().st_mode & 0o777 == 0o700
    gui = f"gui/{os.getuid()}"
    at = f"{gui}/{agent['Label']}"
    assert calls(fakes) == [
        f"launchctl print {gui}",
        f"launchctl bootout {at}",
        f"launchctl print {at}",
        f"launchctl enable {at}",
        f"launchctl bootstrap {gui} {mac}",
    ]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "a $b 5%" / "mlxspec"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(program.parent)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    hostile = [str(program), "serve", "%n", "$HOME ${x}", 'a"b\\c', "é\n;", "", "\x1b\x7f"]
    text = Systemd().text(hostile, {"MLXSPEC_MEMORY": '/%h "x" $y\t'}, "mlxspec at http://x:1", 20)
    unit = tmp_path / "mlxspec.service"

    def complaints(text: str) -> str:
        unit.write_text(text)
        words = ("systemd-analyze", "--user", "verify", str(unit))
        told = subprocess.run(words, capture_output=True, text=True)
        return "".join(line for line in told.stderr.splitlines() if "mlxspec" in line)

    assert complaints(text) == ""
    assert complaints(text.replace("Type=exec", "Type=other"))
    assert complaints(text.replace("/mlxspec", "/other"))


def test_the_present_one_is_replaced_after_its_changes_are_shown(unit: Path, fakes: Path) -> None:
    installed("demo", "--port", "8123")
    first = unit.read_text()
    calls(fakes)
    again = installed("demo", "--port", "8123")
    assert "is unchanged" in again
    assert calls(fakes)[-1].split()[1:3] in (
        ["--user", "restart"],
        ["bootstrap", *[f"gui/{os.getuid()}"]],
    )
    told = installed("demo", "--port", "8124")
    changed = [line for line in told.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changed) == 4  # the description and the command, before and after
    assert all("8123" in line or "8124" in line for line in changed)
    assert unit.read_text() == first.replace("8123", "8124")


def test_nothing_is_written_unasked(unit: Path, fakes: Path) -> None:
    assert refused("install", "demo") == (
        "Error: install asks for confirmation, which needs a terminal: add --yes"
    )
    assert not unit.exists()
    assert len(calls(fakes)) == 1  # whether there is a manager


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--prot", "1"], "No such option"),
        (["--port", "x"], "'x' is not a valid integer"),
        (["--port", "0"], "a service needs the same port each time"),
        (["--port", "70000"], "not in the range 0<=x<=65535"),
        (["--host", "0.0.0.0"], "give a key with --api-key-file"),
        (["--api-key-file", "missing"], "missing: No such file"),
        (["--stop", "x"], "No such option"),
        (["nowhere"], "nowhere: no such directory"),
    ],
)
def test_what_serve_refuses_is_not_written(arguments: list[str], error: str, unit: Path) -> None:
    result = run("service", "install", "--yes", *arguments)
    assert result.exit_code in (1, 2)
    assert error in result.stderr
    assert not unit.exists()


def test_keys_are_in_files_only(
    unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "a-secret")
    assert "use --api-key-file, or unset it" in refused("install", "--yes")
    assert "give a key with" in refused("install", "--yes", "--host", "0.0.0.0")
    assert not unit.exists()
    (tmp_path / "keys").write_text("another-secret\n")
    installed("--host", "0.0.0.0", "--api-key-file", "keys")
    assert "secret" not in unit.read_text()


def test_the_path_is_one_that_stays(
    linux: Path, fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link on PATH, as Homebrew has it, and not what it links to."""
    cellar = tmp_path / "Cellar" / "mlxspec" / "0.1.0" / "mlxspec"
    cellar.parent.mkdir(parents=True)
    (fakes / "mlxspec").rename(cellar)
    monkeypatch.setattr(sys, "argv", [str(cellar)])
    installed()
    assert unit_words(linux, "ExecStart")[0][0] == str(cellar)
    (fakes / "mlxspec").symlink_to(cellar)
    installed()
    assert unit_words(linux, "ExecStart")[0][0] == str(fakes / "mlxspec")
    other = tmp_path / "bin" / "mlxspec"  # another installation
    other.parent.mkdir()
    shutil.copy(cellar, other)
    monkeypatch.setattr(sys, "argv", ["bin/mlxspec"])
    installed()
    assert unit_words(linux, "ExecStart")[0][0] == str(other)
    passing = tmp_path / "uv" / "archive-v0" / "x" / "mlxspec"
    passing.parent.mkdir(parents=True)
    shutil.copy(cellar, passing)
    monkeypatch.setattr(sys, "argv", [str(passing)])
    assert "is temporary: install mlxspec" in refused("install", "--yes")


class _Ready(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Ready)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_status_says_whether_it_runs_and_answers(
    unit: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("demo", "--port", str(port))
    result = run("service", "status")
    state, address, answers = result.stdout.splitlines()
    assert state in ("State: active", "State: running")
    assert address == f"Address: http://127.0.0.1:{port}"
    assert (answers, result.exit_code) == ("Answers: yes", 0)
    monkeypatch.setattr(_Ready, "status", 503)
    result = run("service", "status")
    assert "Answers: no: Service Unavailable" in result.stdout
    assert result.exit_code == 1


def test_status_of_a_server_that_loads_or_has_ended(
    unit: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_PATIENCE", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        installed("demo", "--port", str(listening.getsockname()[1]))
        assert "Answers: not yet: it is still loading its models" in run("service", "status").stdout
    (fakes / "loaded").unlink(missing_ok=True)
    result = run("service", "status")
    assert "Answers: no: [Errno" in result.stdout
    assert result.exit_code == 1


def test_logs_are_the_system_s(unit: Path, fakes: Path) -> None:
    installed("demo")
    calls(fakes)
    log = Path.home() / "Library/Logs/mlxspec/serve.log"
    for more, ending in ([], ""), (["-f"], " -f"):
        assert run("service", "logs", *more).exit_code == 0
        assert calls(fakes)[0] in (
            f"tail -n100 {log}{ending}",
            f"journalctl --no-pager -n100 --user-unit=mlxspec.service{ending}",
        )


def test_uninstall_removes_what_install_wrote(unit: Path, fakes: Path) -> None:
    installed("demo")
    calls(fakes)
    result = run("service", "uninstall")
    assert result.exit_code == 0
    assert f"removed {unit}." in result.stdout
    assert not unit.exists()
    assert not (fakes / "loaded").exists()
    stopped = calls(fakes)[0]
    assert stopped == "systemctl --user disable --now mlxspec.service" or "bootout" in stopped
    for command in ("uninstall", "status", "logs"):
        assert refused(command).endswith("'mlxspec service install' makes one")


def test_without_a_manager_one_line_says_so(unit: Path, fakes: Path) -> None:
    (fakes / "broken").touch()
    assert "No medium found; log in" in refused("install", "--yes")
    for name in PROGRAMS:
        (fakes / name).unlink()
    assert "ctl: not found on this system; run 'mlxspec serve'" in refused("install", "--yes")
    assert not unit.exists()
