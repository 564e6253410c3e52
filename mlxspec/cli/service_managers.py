"""launchd and systemd's user manager, each with one service of ours.

Their methods raise :class:`MlxspecError` if a program of the manager is missing or fails. ``path``
is the file that describes the service. ``log`` is the file to which the service prints, or None if
the manager keeps that; ``reader`` is the command that shows its last 100 lines, or follows with -f.
"""

from __future__ import annotations

import json
import os
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import MlxspecError
from .common.notes import say

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
    """A unit of the user; see systemd.service(5) and systemd.syntax(7)."""

    name = "mlxspec.service"
    log = None
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
            command: the words of the command, which will start in the current directory.
            env: variables to add to its environment.
            about: a description of one line.
            stop: seconds that it may take to end.
        """
        path, *words = map(self._quoted, command)
        variables = (self._quoted(f"{name}={value}") for name, value in env.items())
        return _UNIT.format(
            about=about.replace("%", "%%"),
            directory=os.getcwd().replace("%", "%%"),
            environment="".join(f"Environment={one}\n" for one in variables),
            command=" ".join([path, *(word.replace("$", "$$") for word in words)]),
            stop=stop,
        )

    def _quoted(self, word: str) -> str:
        """A quoted word; systemd knows the escapes that JSON has."""
        return json.dumps(word, ensure_ascii=False).replace("%", "%%")

    def start(self) -> None:
        """Start the service as its file says now, and at each login."""
        run("systemctl", "--user", "daemon-reload")
        run("systemctl", "--user", "enable", str(self.path))
        run("systemctl", "--user", "reset-failed", self.name, check=False)  # the limit of starts
        run("systemctl", "--user", "restart", self.name)
        say("It stops when you log out, unless 'loginctl enable-linger' is set.")

    def stop(self) -> None:
        """Stop the service, and do not start it at the next login."""
        run("systemctl", "--user", "disable", "--now", self.name)

    def state(self) -> str:
        """Whether the service runs, and since when, in the manager's words."""
        names = ("ActiveState", "SubState", "StateChangeTimestamp")
        shown = run("systemctl", "--user", "show", self.name, f"--property={','.join(names)}")
        found = dict(line.partition("=")[::2] for line in shown.splitlines())
        active, detail, since = (found.get(name, "") for name in names)
        return f"{active} ({detail})" + f" since {since}" * bool(since)


class Launchd:
    """An agent in the user's graphical session; see launchd.plist(5) and launchctl(1)."""

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
            "ThrottleInterval": 60,  # seconds between two starts; launchd cannot limit their number
            "ExitTimeOut": stop,
            "ProcessType": "Interactive",  # launchd slows others down
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
            if not run("launchctl", "print", self._target, check=False):
                return
            time.sleep(0.1)
        raise MlxspecError("launchctl: the service has not ended yet; try again in a minute")

    def state(self) -> str:
        shown = run("launchctl", "print", self._target, check=False)
        found = dict(re.findall(r"^\t([a-z ]+) = (.*)$", shown, re.MULTILINE))
        state = found.get("state", "not loaded")
        if "pid" not in found:
            return f"{state} (last exit code: {found.get('last exit code', 'unknown')})"
        since = run("ps", "-o", "lstart=", "-p", found["pid"], check=False).strip()
        return f"{state} (process {found['pid']}) since {since}"


def run(*words: str, remedy: str = "", shown: bool = False, check: bool = True) -> str:
    """Run a program of the system, and return its output; "" if it fails and need not succeed.

    Args:
        words: the program and its arguments.
        remedy: what to do if it fails, for the error.
        shown: let it print to standard output and standard error instead.
        check: raise an error if it fails.

    Raises:
        MlxspecError: it is missing, or fails.
    """
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=not shown, text=True, errors="replace"
        )
    except FileNotFoundError:
        reason = "there is no such program here; run 'mlxspec serve' instead"
        raise MlxspecError(f"{words[0]}: {reason}") from None
    if check and done.returncode:
        said = (done.stderr or done.stdout or f"status {done.returncode}").strip().partition("\n")
        remedy = remedy or "see 'mlxspec service logs'"
        raise MlxspecError(f"{' '.join(words)}: {said[0]}; {remedy}")
    return "" if done.returncode else done.stdout or ""


def manager() -> Launchd | Systemd:
    """The service manager of this system."""
    return Launchd() if sys.platform == "darwin" else Systemd()
