"""``mlxspec service``: keeps ``mlxspec serve`` running, as a service of the user."""

from __future__ import annotations

import os
import re
import shutil
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from ..errors import MlxspecError, OptionError
from .common.generation import API_KEY
from .common.notes import say
from .common.options import Command, group, option
from .common.output import output_console
from .connect import write_texts
from .serve import bracketed, checked, serve_options
from .service_managers import Launchd, Systemd, manager, run
from .settings import SettingsFile

_ABOUT = "mlxspec at "  # the description of the service; the address follows
_PATHS = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_KILL = 10  # seconds beyond --grace after which the process is killed
_PATIENCE = 5.0  # seconds for the server's answer


class _Given(Command):
    """A command whose object is the words that it was given, without ``--yes``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = [word for word in args if word != "--yes"]
        return super().parse_args(ctx, args)


@group("service", short_help="Keep a server running.")
def service_command() -> None:
    """Keep 'mlxspec serve' running from login on, by launchd on macOS and systemd on Linux."""


@service_command.command("install", cls=_Given)
@serve_options
@option("--yes", "Write without asking.", group="Writing")
@click.pass_obj
def install_command(words: list[str], *, yes: bool, color: bool | None, **given: Any) -> None:
    """Install and start the service, with the arguments and options of 'mlxspec serve'.

    \b
    Examples:
      mlxspec service install mlx-community/Mistral-7B-Instruct-v0.3-4bit
      mlxspec service install demo --port 8081 --yes

    It shows what it writes or changes, and asks. The server starts in the current directory, with
    the present values of MLXSPEC_*, HF_HOME, HF_HUB_CACHE and XDG_*. Keys are never written.
    """
    options, system = given["options"], manager()
    checked(given["models"], options, given["drafting"], "")
    if options.port == 0:
        raise OptionError("--port is 0: a service needs the same port each time; name one")
    if os.environ.get(API_KEY) and not options.api_key_file:
        raise OptionError(f"{API_KEY} is set, and is not written: use --api-key-file, or unset it")
    system.check()
    command = [_stable_path(), "serve", *words]
    about = f"{_ABOUT}http://{bracketed(options.host)}:{options.port}"
    try:
        text = system.text(command, _variables(), about, int(options.grace) + _KILL)
        text.encode()
    except ValueError as error:
        raise OptionError(f"the command cannot be written ({error}); rename the file") from error
    file = SettingsFile(system.path, {})
    if not write_texts(output_console(color), [(file, file.read(), text)], yes, "install"):
        say(f"{file.path} stays the same.")
    system.start()
    say("Started. 'mlxspec service status' shows whether it answers.")


def _variables() -> dict[str, str]:
    """The variables that the service needs; no keys, since others may read its file."""
    ours = {name for name in os.environ if name.startswith("MLXSPEC_") and name != API_KEY}
    return {name: os.environ[name] for name in sorted({*ours, *_PATHS} & {*os.environ})}


def _stable_path() -> str:
    """The command's path that stays after an upgrade, such as Homebrew's link on PATH.

    Raises:
        MlxspecError: mlxspec is not installed, or only for now, by uvx.
    """
    ours = Path(sys.argv[0]).absolute()
    if ours.name != "mlxspec":  # such as python -m mlxspec
        ours = Path(sys.executable).with_name("mlxspec")
    if "/archive-v" in str(ours) or not os.access(ours, os.X_OK):
        raise MlxspecError(f"{ours} does not last: install mlxspec with 'uv tool install mlxspec'")
    found = shutil.which("mlxspec")
    return found if found and os.path.samefile(found, ours) else str(ours)


@service_command.command("status")
def status_command() -> None:
    """Show whether the service runs, since when, its address, and whether it answers.

    The exit status is 1 if it does not answer.
    """
    system, address = _installed()
    answers = _answers(address)
    say(f"State: {system.state()}")
    say(f"Address: {address}")
    say(f"Answers: {answers}")
    sys.exit(0 if answers == "yes" else 1)


def _answers(address: str) -> str:
    """Whether the server answers: "yes", or why not."""
    at = urlsplit(address)
    try:
        connection = HTTPConnection(at.hostname or "", at.port, timeout=_PATIENCE)
        connection.request("GET", "/ready", headers={"Host": at.netloc})
        status = connection.getresponse().status
    except TimeoutError:  # it listens before it has loaded the models
        return "not yet: it is loading its models"
    except (OSError, HTTPException) as error:
        return f"no: {getattr(error, 'strerror', None) or error}"
    return "yes" if status == 200 else f"no: /ready has status {status}"


@service_command.command("logs")
@option("-f --follow", "Show new lines as they come.")
def logs_command(follow: bool) -> None:
    """Show the last 100 lines that the service printed."""
    system, _ = _installed()
    run(*system.reader, *["-f"] * follow, shown=True, remedy="see 'mlxspec service status'")


@service_command.command("uninstall")
def uninstall_command() -> None:
    """Stop the service, and remove what install wrote."""
    system, _ = _installed()
    system.stop()
    system.path.unlink()
    say(f"Stopped the service, and removed {system.path}.")
    if system.log:
        say(f"Its log stays: {system.log}.")


def _installed() -> tuple[Launchd | Systemd, str]:
    """The service's manager and address.

    Raises:
        MlxspecError: there is no service.
    """
    system = manager()
    try:
        text = system.path.read_text(encoding="utf-8", errors="replace")
        return system, re.findall(rf"{_ABOUT}(http://[^\s<]+)", text)[0].replace("%%", "%")
    except (FileNotFoundError, LookupError):
        raise MlxspecError(
            f"there is no service in {system.path}: 'mlxspec service install' makes one"
        ) from None
