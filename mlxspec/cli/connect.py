"""``mlxspec connect``: point an editor, an agent or a chat page at a running server.

A client that can be started with a settings file gets one of its own, so that its usual settings
stay as they are. The settings follow the client's documentation or source, which its template
names.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..errors import OptionError, SettingsError
from ..terminal import visible
from .common.api_client import ApiClient, ModelCard
from .common.generation import API_KEY
from .common.model_choice import MODEL
from .common.notes import say
from .common.options import argument, check_least, color_option, command, option
from .common.output import at_terminal, output_console
from .settings import SettingsFile

_MOST_OUTPUT = 8192
_SERVER = "http://127.0.0.1"
_PORT = 8080  # of mlxspec serve


CLIENTS = {
    "opencode": ("opencode", "a provider in its settings"),
    "claude-code": ("Claude Code", "settings to start it with"),
    "codex": ("Codex", "a profile to start it with"),
    "zed": ("Zed", "a provider in its settings"),
    "continue": ("Continue", "models in its settings"),
    "aider": ("aider", "settings to start it with"),
    "cline": ("Cline", "fields in its window, or a command"),
    "open-webui": ("Open WebUI", "fields in its window, or variables"),
}
"""By the names that the command line has for them: their own names, and how they are set up.

What points each of them at a server is in ``clients/NAME.yaml``, a template of Jinja's.
"""


@dataclass(frozen=True)
class Setup:
    """How a client is pointed at a server.

    Attributes:
        files: the settings to write to its files.
        fields: what to enter in its window.
        commands: what starts it.
        notes: what else there is to know, a sentence each.
    """

    files: list[SettingsFile]
    fields: dict[str, str]
    commands: list[str]
    notes: list[str]


def _setup(client: str, address: str, models: list[ModelCard]) -> Setup:
    """Fill in a client's template.

    Raises:
        OptionError: a model's context length is unknown, without which Zed takes no model.
    """
    import yaml
    from jinja2 import Environment, PackageLoader, StrictUndefined

    unknown = [model.name for model in models if not model.context_length]
    if client == "zed" and unknown:
        raise OptionError(
            f"Zed needs to know the context length of {unknown[0]}, which the server does not "
            "know: give it with --context-length"
        )
    known = [_known(model) for model in models]
    needs_key = bool(os.environ.get(API_KEY))
    environment = Environment(
        loader=PackageLoader(__package__, "clients"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_as_yaml,
    )
    environment.filters |= {"sh": shlex.quote, "in_shell": _in_shell}
    text = environment.get_template(f"{client}.yaml").render(
        address=address,
        api=f"{address}/v1",
        models=known,
        model=known[0]["name"],
        context=known[0]["context"],
        output=known[0]["output"],
        key=needs_key,
        key_in_shell=f'"${API_KEY}"' if needs_key else "none",
        folder=_folder,
        mac=sys.platform == "darwin",
    )
    found = yaml.safe_load(text)
    files = [
        SettingsFile(Path(file["path"]), file["settings"], file.get("defaults", {}))
        for file in found.get("files", [])
    ]
    others = found.get("fields", {}), found.get("commands", []), found.get("notes", [])
    return Setup(files, *others)


def _known(model: ModelCard) -> dict[str, Any]:
    """A model's name and context, and the tokens of an answer that clients keep free in it."""
    context = model.context_length
    output = min(_MOST_OUTPUT, context // 4) if context else None
    return {"name": model.name, "context": context, "output": output}


def _as_yaml(value: object) -> str:
    """A value as YAML: a text in quotes, with all but ASCII escaped."""
    if isinstance(value, str):
        escaped = value.encode("unicode_escape").decode().replace('"', r"\"")
        return f'"{escaped}"'
    return "null" if value is None else str(value)


def _folder(variable: str, default: str) -> str:
    """A place in the home directory that an environment variable can override."""
    return os.environ.get(variable) or str(Path.home() / default)


def _in_shell(name: str) -> str:
    """A path as one writes it in a shell."""
    path = Path(name)
    if path.is_relative_to(Path.home()):
        return f"~/{shlex.quote(str(path.relative_to(Path.home())))}"
    return shlex.quote(name)


# --- the command ---


@command("connect", short_help="Point an editor or an agent at a server.")
@argument(
    "client",
    "The program to point at the server; without it, all are listed.",
    required=False,
    type=click.Choice([*CLIENTS]),
    metavar="[CLIENT]",
)
@option("--server URL", f"The server's address.  [default: {_SERVER}:{_PORT}]", group="Server")
@option("--port N", f"Its port, where its address is {_SERVER}.", type=int, group="Server")
@option(
    "-m --model NAME",
    "The model to begin with.  [default: the server's first]",
    type=MODEL,
    group="Server",
)
@option(
    "--context-length N",
    "Give the client N tokens as the model's context.  [default: all that it has]",
    type=int,
    group="Server",
)
@option("--write", "Put it into the client's files, after showing what changes.", group="Writing")
@option("-y --yes", "Write without asking.", group="Writing")
@color_option("Output", "Colour what changes.")
def connect_command(
    *,
    client: str | None,
    server: str | None,
    port: int | None,
    model: str | None,
    context_length: int | None,
    write: bool,
    yes: bool,
    color: bool | None,
) -> None:
    """Show how CLIENT is pointed at a running server, or do it.

    Without CLIENT the clients are listed. Names and context lengths of the models are asked of
    the server. Nothing is written without --write, and then all else in a file stays.

    \b
    Examples:
      mlxspec connect
      mlxspec connect zed
      mlxspec connect opencode --write
      mlxspec connect codex --server http://mac.local:8080 --write --yes

    If the server needs a key, set MLXSPEC_API_KEY to it, here and for the client. It is neither
    shown nor written: files and commands name the variable.
    """
    check_least(1, context_length=context_length, port=port)
    if server is not None and port is not None:
        raise OptionError("--server has the port in its address: leave out --port")
    if yes and not write:
        raise OptionError("--yes is for --write: add it, or leave out --yes")
    console = output_console(color)
    if client is None:
        if write:
            raise OptionError("--write needs a client: 'mlxspec connect' lists them")
        width = max(map(len, CLIENTS))
        for name, (title, way) in CLIENTS.items():
            _print(console, f"{name:<{width}}  {title}: {way}")
        return
    title, _ = CLIENTS[client]
    asked = ApiClient(server or f"{_SERVER}:{port or _PORT}")
    first, *others = asked.models(model)
    models = [
        replace(first, context_length=context_length or first.context_length),
        *(replace(one, context_length=one.context_length or context_length) for one in others),
    ]
    setup = _setup(client, asked.address, models)
    if not write:
        _show(console, setup)
        return
    if not setup.files:
        raise OptionError(
            f"{title} has no file for it: 'mlxspec connect {client}' says what to fill in"
        )
    _write(console, setup, title, yes)
    _show_start(console, setup)


def _write(console: Console, setup: Setup, title: str, yes: bool) -> None:
    """Show what changes in the client's files, ask, and write them.

    Raises:
        OptionError: there is no terminal to ask at.
        SettingsError: a file cannot be changed; then what to put there is shown.
    """
    try:
        texts = [(file, old := file.read(), file.merged(old)) for file in setup.files]
    except SettingsError:
        _show(console, setup)
        raise
    changes = [(file, old, new) for file, old, new in texts if new != old]
    for file, old, new in changes:
        names = (str(file.path) if old else os.devnull, str(file.path))
        for line in unified_diff(old.splitlines(), new.splitlines(), *names, lineterm=""):
            _print(console, line, {"+": "green", "-": "red", "@": "dim"}.get(line[0], ""))
    if changes and not (yes or _may_write(changes)):
        say("Nothing was written.")
        sys.exit(1)
    for file, old, new in changes:
        if file.read() != old:
            raise SettingsError(f"{file.path}: has changed in the meantime; try again")
        file.write(new)
        say(f"Wrote {file.path}.")
    if not changes:
        say(f"{title} is set up so already: nothing was written.")


def _show(console: Console, setup: Setup) -> None:
    """Print all that points a client at a server, to be copied."""
    for file in setup.files:
        _print(console, f"{file.path}:", "bold")
        _print(console, f"\n{file.merged('')}")
    width = max(map(len, setup.fields), default=0)
    for name, value in setup.fields.items():
        _print(console, f"{name:<{width}}  {value}")
    if setup.fields:
        _print(console, "")
    _show_start(console, setup)


def _show_start(console: Console, setup: Setup) -> None:
    for line in setup.commands:
        _print(console, line, "bold")
    for line in setup.notes:
        _print(console, line)


def _may_write(changes: list[tuple[SettingsFile, str, str]]) -> bool:
    """Ask the user.

    Raises:
        OptionError: there is no terminal to ask on.
    """
    if not at_terminal():
        raise OptionError("--write asks for confirmation, which needs a terminal: add --yes")
    what = "this file" if len(changes) == 1 else f"these {len(changes)} files"
    return click.confirm(f"Write {what}?", err=True)


def _print(console: Console, line: str, style: str = "") -> None:
    """Print a line without breaking it, so that it can be copied."""
    console.print(Text(visible(line), style), soft_wrap=True)
