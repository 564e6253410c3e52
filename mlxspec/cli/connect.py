"""``mlxspec connect``: points an editor, an agent or a chat page at a running server.

If a client can be started with a separate settings file, that file is written, and the client's
usual settings stay unchanged. Each template names the documentation or source that it follows.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from ..errors import FileError, OptionError
from ..terminal import visible
from .common.api_client import ApiClient
from .common.generation import API_KEY
from .common.model_choice import MODEL
from .common.notes import say
from .common.options import COUNT, color_option, command, option
from .common.output import confirm, output_console, print_rows
from .settings import SettingsFile

_MOST_OUTPUT = 8192
_SERVER = "http://127.0.0.1:8080"  # the default of mlxspec serve


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
"""The clients' titles and how to set them up, by the clients' names on the command line.

``clients/NAME.yaml`` is a Jinja template that points a client at a server.
"""


Setup = dict[str, Any]
"""How to point a client at a server: the ``files`` to write, the ``fields`` of its window with
their values, the ``commands`` that start it, and ``notes`` for the user.
"""


def _setup(client: str, address: str, models: Mapping[str, int | None]) -> Setup:
    """Fill in a client's template."""
    import yaml
    from jinja2 import Environment, PackageLoader, StrictUndefined

    known = []
    for name, context in models.items():
        output = min(_MOST_OUTPUT, context // 4) if context else None
        known.append({"name": name, "context": context, "output": output})
        if client == "zed" and not context:
            raise OptionError(
                f"Zed needs the context length of {name}, which the server does not know: "
                "give it with --context-length"
            )
    needs_key = bool(os.environ.get(API_KEY))
    environment = Environment(
        loader=PackageLoader(__package__, "clients"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=partial(json.dumps, ensure_ascii=False),  # JSON's values are YAML, too
    )
    environment.filters["sh"] = shlex.quote
    text = environment.get_template(f"{client}.yaml").render(
        address=address,
        api=f"{address}/v1",
        models=known,
        model=known[0]["name"],
        **known[0],
        key=needs_key,
        key_in_shell=f'"${API_KEY}"' if needs_key else "none",
        folder=_folder,
        mac=sys.platform == "darwin",
    )
    setup: Setup = {"files": [], "fields": {}, "commands": [], "notes": [], **yaml.safe_load(text)}
    setup["files"] = [
        SettingsFile(Path(file["path"]), file["settings"], file.get("first", {}))
        for file in setup["files"]
    ]
    return setup


def _folder(variable: str, default: str) -> str:
    """A folder in the home directory, unless an environment variable names another."""
    return os.environ.get(variable) or str(Path.home() / default)


# --- the command ---


@command("connect", short_help="Point an editor or an agent at a server.")
@click.argument(
    "client",
    help="The program to point at the server; without it, list all.",
    required=False,
    type=click.Choice([*CLIENTS]),
    metavar="[CLIENT]",
)
@option("--server URL", f"The server's address.  [default: {_SERVER}]", group="Server")
@option(
    "-m --model NAME",
    "The model to use first.  [default: the server's first]",
    type=MODEL,
    group="Server",
)
@option(
    "--context-length N",
    "The context length to write into the client's settings.  [default: the model's]",
    type=COUNT,
    group="Server",
)
@option("--write", "Write the settings to the client's files, after asking.", group="Writing")
@option("-y --yes", "Write without asking.", group="Writing")
@color_option("Output", "Colour the changes.")
def connect_command(
    *,
    client: str | None,
    server: str | None,
    model: str | None,
    context_length: int | None,
    write: bool,
    yes: bool,
    color: bool | None,
) -> None:
    """Show the settings that point CLIENT at a running server, or write them with --write.

    Without CLIENT, list the clients. The names and context lengths of the models come from the
    server. Nothing is written without --write, which leaves a file's other content unchanged.

    \b
    Examples:
      mlxspec connect
      mlxspec connect zed
      mlxspec connect opencode --write
      mlxspec connect codex --server http://mac.local:8080 --write --yes

    If the server needs a key, put the key in MLXSPEC_API_KEY, here and for the client. The key is
    neither shown nor written: files and commands name the variable.
    """
    console = output_console(color)
    if client is None:
        if write or yes:
            raise OptionError("--write needs a CLIENT: 'mlxspec connect' lists them")
        print_rows(*((name, f"{title}: {way}") for name, (title, way) in CLIENTS.items()))
        return
    title, _ = CLIENTS[client]
    api_client = ApiClient(server or _SERVER)
    models = api_client.models(model)
    if context_length:
        models = dict.fromkeys(models, context_length)
    setup = _setup(client, api_client.address, models)
    if not (write or yes):
        _show(console, setup)
    elif setup["files"]:
        try:
            read = [(file, file.read()) for file in setup["files"]]
            texts = [(file, old, file.merged(old)) for file, old in read]
        except FileError:  # the file cannot be changed, such as JSON with comments
            _show(console, setup)
            raise
        if not _write(console, texts, yes):
            say(f"{title} is set up already: nothing was written.")
        _show(console, {**setup, "files": [], "fields": {}})
    else:
        raise OptionError(
            f"{title} has no settings file to write: 'mlxspec connect {client}' shows what to enter"
        )


def _write(console: Console, texts: list[tuple[SettingsFile, str, str]], yes: bool) -> bool:
    """Show the changes to files, ask, and write them; exit if the user refuses.

    Args:
        texts: files with their old and new texts.
        yes: whether to write without asking.

    Returns:
        whether any text is new.

    Raises:
        OptionError: there is no terminal to ask at.
        FileError: a file cannot be written, or has just been changed.
    """
    changes = [(file, old, new) for file, old, new in texts if new != old]
    for file, old, new in changes:
        names = (str(file.path) if old else os.devnull, str(file.path))
        for line in unified_diff(old.splitlines(), new.splitlines(), *names, lineterm=""):
            _print(console, line, {"+": "green", "-": "red", "@": "dim"}.get(line[0], ""))
    if changes and not yes:
        what = "this file" if len(changes) == 1 else f"these {len(changes)} files"
        confirm("--write", f"Write {what}?", "Nothing was written.")
    for file, old, new in changes:
        if file.read() != old:
            raise FileError(f"{file.path}: another program has just changed it; try again")
        file.write(new)
        say(f"Wrote {file.path}.")
    return bool(changes)


def _show(console: Console, setup: Setup) -> None:
    """Print the settings, fields, commands and notes, for the user to copy."""
    for file in setup["files"]:
        _print(console, f"{file.path}:", "bold")
        _print(console, f"\n{file.merged('')}")
    if fields := setup["fields"]:
        print_rows(*fields.items())
        _print(console, "")
    for line in setup["commands"]:
        _print(console, line, "bold")
    for line in setup["notes"]:
        _print(console, line)


def _print(console: Console, line: str, style: str = "") -> None:
    """Print a line without wrapping it, since users copy it."""
    console.print(Text(visible(line), style), soft_wrap=True)
