"""``mlxspec service``: keeps ``mlxspec serve`` running, with launchd or systemd's user manager."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import click

from ..errors import MlxspecError, OptionError
from .common.generation import API_KEY
from .common.notes import say
from .common.options import group, option
from .common.output import output_console
from .connect import write_texts
from .serve import bracketed, checked, serve_options
from .settings import SettingsFile

_ABOUT = "mlxspec at "  # begins the service's description; the address follows
_PATHS = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_KILL = 10  # seconds beyond --grace after which the process is killed
_PATIENCE = 5.0  # seconds for the server's answer


@group("service", short_help="Keep a server running.")
def service_command() -> None:
    """Keep 'mlxspec serve' running from login on, by launchd on macOS and systemd on Linux."""


@service_command.command("install", short_help="Install and start the service.")
@serve_options
@option("--yes", "Write without asking.", group="Writing")
@click.pass_obj
def install_command(words: list[str], *, yes: bool, color: bool | None, **given: Any) -> None:
    """Install and start the service, with the arguments and options of 'mlxspec serve'.

    \b
    Examples:
      mlxspec service install mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec service install demo --port 8081 --yes

    It shows the files it would write or change, and asks. The server starts in the current
    directory, with the current values of MLXSPEC_*, HF_HOME, HF_HUB_CACHE and XDG_*. Keys are never
    written.
    """
    from ..models.model_files import find_directory

    options, system = given["options"], _manager()
    checked(given["models"], options, given["drafting"], "")
    if options.port == 0:
        raise OptionError("--port is 0, but a service needs the same port each time: name one")
    if os.environ.get(API_KEY) and not options.api_key_file:
        raise OptionError(f"{API_KEY} is set, but is not written: use --api-key-file, or unset it")
    system.check()
    command = [_stable_path(), "serve", *(word for word in words if word != "--yes")]
    about = f"{_ABOUT}http://{bracketed(options.host)}:{options.port}"
    text = system.text(command, _variables(), about, int(options.grace) + _KILL)
    for model in given["models"]:  # a wrong name would make the service fail and restart unnoticed
        find_directory(model, None, weights=())
    file = SettingsFile(system.path, {})
    if not write_texts(output_console(color), [(file, file.read(), text)], yes, "install"):
        say(f"{file.path} is unchanged.")
    system.start()
    say("Started. 'mlxspec service status' shows whether it answers.")


def _variables() -> dict[str, str]:
    """The environment variables that the service needs; no keys, since others may read its file."""
    ours = {name for name in os.environ if name.startswith("MLXSPEC_") and name != API_KEY}
    return {name: os.environ[name] for name in sorted({*ours, *_PATHS} & {*os.environ})}


def _stable_path() -> str:
    """A path of the command that survives upgrades, such as Homebrew's link on PATH.

    Raises:
        MlxspecError: mlxspec is not installed, or only temporarily, by uvx.
    """
    ours = Path(sys.argv[0]).absolute()
    if ours.name != "mlxspec":  # such as python -m mlxspec
        ours = Path(sys.executable).with_name("mlxspec")
    if "/archive-v" in str(ours) or not os.access(ours, os.X_OK):
        raise MlxspecError(f"{ours} is temporary: install mlxspec with 'uv tool install mlxspec'")
    found = shutil.which("mlxspec")
    return found if found and os.path.samefile(found, ours) else str(ours)


@service_command.command("status", short_help="Show whether it runs and answers.")
def status_command() -> None:
    """Show whether the service runs, its address, and whether it answers.

    The exit status is 1 if it does not answer.
    """
    system, address = _installed()
    answers = _answers(address)
    say(f"State: {system.state()}")
    say(f"Address: {address}")
    say(f"Answers: {answers}")
    sys.exit(0 if answers == "yes" else 1)


def _answers(address: str) -> str:
    """Return "yes" if the server answers, or why it does not."""
    direct = build_opener(ProxyHandler({}))
    try:
        direct.open(f"{address}/ready", timeout=_PATIENCE).close()
    except TimeoutError:  # the server listens before its models are loaded
        return "not yet: it is still loading its models"
    except (OSError, HTTPException) as error:
        return f"no: {getattr(error, 'reason', error)}"
    return "yes"


@service_command.command("logs")
@option("-f --follow", "Keep showing new lines.")
def logs_command(follow: bool) -> None:
    """Show the last 100 lines that the service printed."""
    system, _ = _installed()
    subprocess.run([*system.reader, "-f"] if follow else system.reader)


@service_command.command("uninstall")
def uninstall_command() -> None:
    """Stop the service, and remove what install wrote."""
    system, _ = _installed()
    system.stop()
    system.path.unlink()
    say(f"Stopped the service, and removed {system.path}.")


def _installed() -> tuple[Launchd | Systemd, str]:
    """The service's manager and address.

    Raises:
        MlxspecError: there is no service.
    """
    system = _manager()
    try:
        text = system.path.read_text(encoding="utf-8", errors="replace")
        return system, re.findall(rf"{_ABOUT}(http://[^\s<]+)", text)[0].replace("%%", "%")
    except (FileNotFoundError, LookupError):
        raise MlxspecError(
            f"there is no service in {system.path}: 'mlxspec service install' makes one"
        ) from None


# --- the managers ---

_UNIT = """\
[Unit]
Description={about}
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
WorkingDirectory={directory}
{environment}ExecStart={command}
Restart=on-failure
RestartSec=10
TimeoutStopSec={stop}

[Install]
WantedBy=default.target
"""


class Systemd:
    """A systemd user unit; see systemd.service(5) and systemd.syntax(7).

    The methods, like launchd's, raise :class:`MlxspecError` if one of the manager's programs is
    missing or fails.

    Attributes:
        path: the file that describes the service.
        reader: the command that shows its last 100 log lines; with -f, it keeps showing new ones.
    """

    name = "mlxspec.service"
    reader = ("journalctl", "--no-pager", "-n100", f"--user-unit={name}")

    def __init__(self) -> None:
        config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        self.path = Path(config) / "systemd" / "user" / self.name

    def check(self) -> None:
        """Check that the manager runs for this user."""
        remedy = "log in as this user, not with su or sudo, or run 'mlxspec serve' instead"
        run("systemctl", "--user", "show-environment", remedy=remedy)

    def text(self, command: list[str], env: Mapping[str, str], about: str, stop: int) -> str:
        """Make the file's text.

        Args:
            command: the command and its arguments; it will start in the current directory.
            env: variables to add to its environment.
            about: a one-line description.
            stop: the seconds that it may take to stop.
        """
        path, *words = map(_quoted, command)
        variables = (_quoted(f"{name}={value}") for name, value in env.items())
        return _UNIT.format(
            about=about.replace("%", "%%"),
            directory=os.getcwd().replace("%", "%%"),
            environment="".join(f"Environment={one}\n" for one in variables),
            command=" ".join([path, *(word.replace("$", "$$") for word in words)]),
            stop=stop,
        )

    def start(self) -> None:
        """Start the service from its current file, now and at each login."""
        run("systemctl", "--user", "daemon-reload")
        run("systemctl", "--user", "enable", str(self.path))
        run("systemctl", "--user", "reset-failed", self.name, check=False)  # resets the start limit
        run("systemctl", "--user", "restart", self.name)

    def stop(self) -> None:
        """Stop the service, and do not start it at the next login."""
        run("systemctl", "--user", "disable", "--now", self.name)

    def state(self) -> str:
        """The service's state, in the manager's word."""
        return run("systemctl", "--user", "show", "--value", "-p", "ActiveState", self.name).strip()


class Launchd:
    """A launchd agent in the user's graphical session; see launchd.plist(5), launchctl(1).

    It has the methods and attributes of :class:`Systemd`.
    """

    name = "io.github.mlxspec"

    def __init__(self) -> None:
        library = Path.home() / "Library"
        self.path = library / "LaunchAgents" / f"{self.name}.plist"
        self.log = library / "Logs" / "mlxspec" / "serve.log"
        self.reader = ("tail", "-n100", str(self.log))
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{self.name}"

    def check(self) -> None:
        remedy = "log in at this Mac's screen, or run 'mlxspec serve' instead"
        run("launchctl", "print", self._domain, remedy=remedy)

    def text(self, command: list[str], env: Mapping[str, str], about: str, stop: int) -> str:
        agent = {
            "Label": self.name,
            "Description": about,  # for us; launchd ignores it
            "ProgramArguments": command,
            "EnvironmentVariables": dict(env),
            "WorkingDirectory": os.getcwd(),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 60,  # seconds between starts; launchd cannot limit their number
            "ExitTimeOut": stop,
            "ProcessType": "Interactive",  # launchd slows other types down
            "StandardOutPath": str(self.log),
            "StandardErrorPath": str(self.log),
        }
        return plistlib.dumps(agent, sort_keys=False).decode()

    def start(self) -> None:
        self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stop()
        run("launchctl", "enable", self._target)
        run("launchctl", "bootstrap", self._domain, str(self.path))

    def stop(self) -> None:
        run("launchctl", "bootout", self._target, check=False)  # fails if it is not loaded
        for _ in range(600):  # bootout may return before the process has ended
            if not self._shown():
                return
            time.sleep(0.1)
        raise MlxspecError("launchctl: the service has not stopped yet; try again in a minute")

    def state(self) -> str:
        found = re.search(r"^\tstate = (.*)$", self._shown(), re.MULTILINE)
        return found[1] if found else "not loaded"

    def _shown(self) -> str:
        return run("launchctl", "print", self._target, check=False)


def run(*words: str, remedy: str = "see 'mlxspec service logs'", check: bool = True) -> str:
    """Run a system program, and return its output; "" if it fails and ``check`` is False.

    Args:
        words: the program and its arguments.
        remedy: what to do if it fails, for the error.
        check: raise an error if it fails.

    Raises:
        MlxspecError: it is missing, or fails.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise MlxspecError(
            f"{words[0]}: not found on this system; run 'mlxspec serve' instead"
        ) from None
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise MlxspecError(f"{' '.join(words)}: {said}; {remedy}")
    return "" if done.returncode else done.stdout


def _quoted(word: str) -> str:
    """A word quoted for a unit; systemd understands JSON's escapes."""
    return json.dumps(word, ensure_ascii=False).replace("%", "%%")


def _manager() -> Launchd | Systemd:
    """The service manager of this system."""
    return Launchd() if sys.platform == "darwin" else Systemd()
