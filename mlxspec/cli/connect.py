"""``mlxspec connect``: what points an editor, an agent or a chat page at a server of ours.

Where a client takes a file of its own for that, it gets one, so that what it did before goes on
as it was. What each file may hold is from the client's documentation or source; the function that
makes it names the place.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

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
from .settings import Settings, SettingsFile

_US = "mlxspec"  # what clients call us; Zed makes the name of the key's variable, API_KEY, from it
_NO_KEY = "none"  # for clients that insist on one
_MOST_OUTPUT = 8192
_SERVER = "http://127.0.0.1"
_PORT = 8080  # of mlxspec serve


@dataclass(frozen=True)
class Server:
    """A server that clients connect to.

    Attributes:
        address: of its root.
        models: those it serves; clients start with the first.
        needs_key: whether clients must send a key.
    """

    address: str
    models: list[ModelCard]
    needs_key: bool

    @property
    def api(self) -> str:
        """The base URL of OpenAI's API."""
        return f"{self.address}/v1"

    @property
    def model(self) -> str:
        """The name of the model to begin with."""
        return self.models[0].name

    def key(self, named: str = f'"${API_KEY}"') -> str:
        """The key as a client is given it, by its name; as commands name it by default."""
        return named if self.needs_key else _NO_KEY


@dataclass(frozen=True)
class Setup:
    """What points a client at a server.

    Attributes:
        files: the settings to write to its files.
        fields: what to enter in its window.
        commands: what starts it.
        notes: what else there is to know, a sentence each.
    """

    files: list[SettingsFile] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Client(NamedTuple):
    """A client: its name as it writes it, how it is set up in words, and for a server."""

    title: str
    way: str
    setup: Callable[[Server], Setup]


def _output(context: int) -> int:
    """Tokens of an answer, which clients keep free for it; the rest is for the prompt."""
    return min(_MOST_OUTPUT, context // 4)


def _folder(variable: str, default: str, *below: str) -> Path:
    """A directory that an environment variable can override."""
    named = os.environ.get(variable)
    return Path(named, *below) if named else Path.home() / default / Path(*below)


def _in_shell(path: Path) -> str:
    """A path as one writes it in a shell."""
    if path.is_relative_to(Path.home()):
        return f"~/{shlex.quote(str(path.relative_to(Path.home())))}"
    return shlex.quote(str(path))


def _opencode(server: Server) -> Setup:
    """https://opencode.ai/docs/providers (custom provider) and https://opencode.ai/config.json."""
    models: Settings = {}
    for model in server.models:
        length = model.context_length
        limit = {"context": length, "output": _output(length)} if length else None
        models[model.name] = {"name": model.name, "limit": limit}
    key = f"{{env:{API_KEY}}}" if server.needs_key else None
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _US,
        "options": {"baseURL": server.api, "apiKey": key},
        "models": models,
    }
    path = _folder("XDG_CONFIG_HOME", ".config", "opencode", "opencode.json")
    schema = {"$schema": "https://opencode.ai/config.json"}
    return Setup(
        files=[SettingsFile(path, {"provider": {_US: provider}}, schema)],
        commands=[f"opencode --model {shlex.quote(f'{_US}/{server.model}')}"],
    )


def _claude_code(server: Server) -> Setup:
    """https://code.claude.com/docs/en/env-vars, /settings and /llm-gateway."""
    length = server.models[0].context_length
    environment: Settings = {
        "ANTHROPIC_BASE_URL": server.address,  # it appends /v1/messages
        "ANTHROPIC_AUTH_TOKEN": None if server.needs_key else _NO_KEY,
        "ANTHROPIC_MODEL": server.model,
        **{f"ANTHROPIC_DEFAULT_{size}_MODEL": server.model for size in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(length) if length else None,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_output(length)) if length else None,
        # A line at the front that is another one in each request: no prompt would be reused.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    settings = {
        "env": environment,
        "apiKeyHelper": f"printenv {API_KEY}" if server.needs_key else None,
    }
    path = _folder("CLAUDE_CONFIG_DIR", ".claude", f"{_US}.json")
    return Setup(
        files=[SettingsFile(path, settings)],
        commands=[f"claude --settings {_in_shell(path)}"],
        notes=["Without --settings Claude Code is as before."],
    )


def _codex(server: Server) -> Setup:
    """https://developers.openai.com/codex/config-advanced (profiles, custom model providers)."""
    provider = {
        "name": _US,
        "base_url": server.api,
        "wire_api": "responses",
        "env_key": API_KEY if server.needs_key else None,
    }
    settings = {
        "model": server.model,
        "model_provider": _US,
        "model_context_window": server.models[0].context_length,
        "model_providers": {_US: provider},
    }
    path = _folder("CODEX_HOME", ".codex", f"{_US}.config.toml")
    return Setup(
        files=[SettingsFile(path, settings)],
        commands=[f"codex --profile {_US}"],
        notes=["Without --profile Codex is as before. Profiles are files since Codex 0.134."],
    )


def _zed(server: Server) -> Setup:
    """https://zed.dev/docs/ai/use-api-access (OpenAI-compatible endpoints).

    Raises:
        OptionError: a model's context length is unknown, without which Zed takes no model.
    """
    for model in server.models:
        if not model.context_length:
            raise OptionError(
                f"Zed needs to know the context length of {model.name}, which the server does not "
                "know: give it with --context-length"
            )
    models = [
        {
            "name": model.name,
            "max_tokens": model.context_length,
            "max_output_tokens": _output(model.context_length or 0),
        }
        for model in server.models
    ]
    provider = {"api_url": server.api, "available_models": models}
    settings = "zed", "settings.json"
    if sys.platform == "darwin":  # where it does not look for the variable
        path = Path.home().joinpath(".config", *settings)
    else:
        path = _folder("XDG_CONFIG_HOME", ".config", *settings)
    key = "the server's key" if server.needs_key else f"any key, as {_NO_KEY!r}"
    return Setup(
        files=[SettingsFile(path, {"language_models": {"openai_compatible": {_US: provider}}})],
        notes=[
            f"Zed asks for a key in Settings, AI, LLM Providers, {_US}: give {key}. It also takes "
            f"{API_KEY} from the environment that it is started in.",
            "Then choose the model in the agent panel.",
        ],
    )


def _continue(server: Server) -> Setup:
    """https://docs.continue.dev/reference (config.yaml)."""
    models: list[Settings] = []
    for model in server.models:
        length = model.context_length
        limits = {"contextLength": length, "maxTokens": _output(length)} if length else None
        entry = {
            "name": f"{model.name} ({_US})",
            "provider": "openai",
            "model": model.name,
            "apiBase": server.api,
            "apiKey": server.key(f"${{{{ secrets.{API_KEY} }}}}"),
            "roles": ["chat", "edit", "apply"],
            "defaultCompletionOptions": limits,
        }
        models.append(entry)
    folder = _folder("CONTINUE_GLOBAL_DIR", ".continue")
    notes = ["Then choose the model below Continue's input."]
    if server.needs_key:
        notes.append(f"It reads the key from a line {API_KEY}=… in {_in_shell(folder / '.env')}.")
    defaults = {"name": "Local Config", "version": "1.0.0", "schema": "v1"}
    return Setup(
        files=[SettingsFile(folder / "config.yaml", {"models": models}, defaults)], notes=notes
    )


def _aider(server: Server) -> Setup:
    """https://aider.chat/docs/llms/openai-compat.html and /docs/config."""
    lengths = {
        f"openai/{model.name}": {
            "max_input_tokens": model.context_length,
            "max_output_tokens": _output(model.context_length),
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        for model in server.models
        if model.context_length
    }
    settings = {
        "model": f"openai/{server.model}",
        "openai-api-base": server.api,
        "openai-api-key": None if server.needs_key else _NO_KEY,
    }
    path = Path.home() / f".aider.{_US}.yml"
    files = [SettingsFile(path, settings)]
    if lengths:  # aider looks for this name by itself
        files.append(SettingsFile(Path.home() / ".aider.model.metadata.json", lengths))
    key = f"OPENAI_API_KEY={server.key()} " if server.needs_key else ""
    return Setup(
        files=files,
        commands=[f"{key}aider --config {_in_shell(path)}"],
        notes=["Without --config aider is as before."],
    )


def _cline(server: Server) -> Setup:
    """https://docs.cline.bot/provider-config/openai-compatible, and ``cline auth --help``."""
    length = server.models[0].context_length
    fields = {
        "API Provider": "OpenAI Compatible",
        "Base URL": server.api,
        "API Key": server.key("the server's key"),
        "Model ID": server.model,
    }
    if length:
        fields["Context Window Size"] = str(length)
        fields["Max Output Tokens"] = str(_output(length))
    command = (
        f"cline auth --provider openai-compatible --baseurl {shlex.quote(server.api)} "
        f"--modelid {shlex.quote(server.model)} --apikey {server.key()}"
    )
    return Setup(
        fields=fields,
        commands=[command],
        notes=["The fields are in Cline's settings in the editor; the command is for its CLI."],
    )


def _open_webui(server: Server) -> Setup:
    """https://docs.openwebui.com/reference/env-configuration (OpenAI), and its quick starts."""
    command = (
        f"OPENAI_API_BASE_URL={shlex.quote(server.api)} OPENAI_API_KEY={server.key()} "
        "open-webui serve --port 3000"
    )
    return Setup(
        fields={"URL": server.api, "Key": server.key("the server's key")},
        commands=[command],
        notes=[
            "The fields are in Admin Settings, Connections, OpenAI, Add Connection. Open WebUI "
            "reads the variables at its first start only.",
            "In Docker write host.docker.internal for 127.0.0.1, and start the server with "
            "--allowed-host host.docker.internal.",
        ],
    )


CLIENTS = {
    "opencode": Client("opencode", "a provider in its settings", _opencode),
    "claude-code": Client("Claude Code", "settings to start it with", _claude_code),
    "codex": Client("Codex", "a profile to start it with", _codex),
    "zed": Client("Zed", "a provider in its settings", _zed),
    "continue": Client("Continue", "models in its settings", _continue),
    "aider": Client("aider", "settings to start it with", _aider),
    "cline": Client("Cline", "fields in its window, or a command", _cline),
    "open-webui": Client("Open WebUI", "fields in its window, or variables", _open_webui),
}
"""By the names that the command line has for them."""


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
        for name, known in CLIENTS.items():
            _print(console, f"{name:<{width}}  {known.title}: {known.way}")
        return
    chosen = CLIENTS[client]
    asked = ApiClient(server or f"{_SERVER}:{port or _PORT}")
    first, *others = asked.models(model)
    models = [
        replace(first, context_length=context_length or first.context_length),
        *(replace(one, context_length=one.context_length or context_length) for one in others),
    ]
    setup = chosen.setup(Server(asked.address, models, bool(os.environ.get(API_KEY))))
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
