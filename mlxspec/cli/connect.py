"""``mlxspec connect``: what points an editor, an agent or a chat page at a server of ours."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from difflib import unified_diff

import click
from rich.console import Console
from rich.text import Text

from ..errors import OptionError, SettingsError
from ..terminal import visible
from .clients import CLIENTS, Server, Setup
from .common.generation import API_KEY
from .common.model_choice import MODEL
from .common.notes import say
from .common.options import argument, check_least, color_option, command, option
from .common.output import at_terminal, output_console
from .settings_file import SettingsFile

_SERVER = "http://127.0.0.1"
_PORT = 8080  # of mlxspec serve


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
        _list(console)
        return
    chosen = CLIENTS[client]
    setup = chosen.setup(_ask(server or f"{_SERVER}:{port or _PORT}", model, context_length))
    if not write:
        _show(console, setup)
        return
    if not setup.files:
        raise OptionError(
            f"{chosen.title} has no file for it: 'mlxspec connect {client}' says what to fill in"
        )
    _write(console, setup, chosen.title, yes)
    _show_start(console, setup)


def _write(console: Console, setup: Setup, title: str, yes: bool) -> None:
    """Show what changes in the client's files, ask, and write them.

    Raises:
        OptionError: no one can be asked.
        SettingsError: a file cannot be changed; then what to put there is shown.
    """
    try:
        texts = [(file, *_texts(file)) for file in setup.files]
    except SettingsError:
        _show(console, setup)
        raise
    changes = [(file, old, new) for file, old, new in texts if new != old]
    for file, old, new in changes:
        _print_difference(console, file, old, new)
    if changes and not (yes or _may_write(changes)):
        say("Nothing was written.")
        sys.exit(1)
    for file, old, new in changes:
        if (file.read() or "") != old:
            raise SettingsError(f"{file.path}: has changed in the meantime; try again")
        file.write(new)
        say(f"Wrote {file.path}.")
    if not changes:
        say(f"{title} is set up so already: nothing was written.")


def _list(console: Console) -> None:
    width = max(map(len, CLIENTS))
    for name, client in CLIENTS.items():
        _print(console, f"{name:<{width}}  {client.title}: {client.way}")


def _ask(address: str, model: str | None, context_length: int | None) -> Server:
    """What the server says of itself.

    Raises:
        OptionError: it does not answer, or has no such model.
        PromptError: it refuses to.
    """
    from .common.api_client import ApiClient

    client = ApiClient(address)
    first, *others = client.models(model)
    models = [
        replace(first, context_length=context_length or first.context_length),
        *(replace(one, context_length=one.context_length or context_length) for one in others),
    ]
    return Server(client.address, models, bool(os.environ.get(API_KEY)))


def _show(console: Console, setup: Setup) -> None:
    """All that points a client at a server, to be copied."""
    for file in setup.files:
        _print(console, f"{file.path}:", "bold")
        _print(console, f"\n{file.text()}")
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


def _texts(file: SettingsFile) -> tuple[str, str]:
    """A file's present text and its new one.

    Raises:
        SettingsError: it cannot be changed.
    """
    text = file.read()
    if text is None:
        return "", file.text()
    return text, file.merged(text)


def _print_difference(console: Console, file: SettingsFile, old: str, new: str) -> None:
    before = str(file.path) if old else os.devnull
    for line in unified_diff(
        old.splitlines(), new.splitlines(), before, str(file.path), lineterm=""
    ):
        _print(console, line, {"+": "green", "-": "red", "@": "dim"}.get(line[0], ""))


def _may_write(changes: list[tuple[SettingsFile, str, str]]) -> bool:
    """Ask at a terminal.

    Raises:
        OptionError: there is no terminal to ask on.
    """
    if not at_terminal():
        raise OptionError("--write asks first, which needs a terminal: add --yes")
    what = "this file" if len(changes) == 1 else f"these {len(changes)} files"
    return click.confirm(f"Write {what}?", err=True)


def _print(console: Console, line: str, style: str = "") -> None:
    """A line as long as it is: what is broken cannot be copied."""
    console.print(Text(visible(line), style), soft_wrap=True)
