"""The clients that can be pointed at a server, and how each of them is.

Where a client takes a file of its own for that, it gets one, so that what it did before goes on
as it was. What each file may hold is from the client's documentation or source; the function that
makes it names the place.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import OptionError
from .common.api_client import ModelCard
from .common.generation import API_KEY
from .settings_file import Settings, SettingsFile

_US = "mlxspec"  # what clients call us; Zed makes the name of the key's variable, API_KEY, from it
_NO_KEY = "none"  # for clients that insist on one
_MOST_OUTPUT = 8192


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


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        title: its name as it writes it.
        way: in words, how it is set up.
        setup: for a server.
    """

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


def _key_in_shell(server: Server) -> str:
    """The key as a command names it."""
    return f'"${API_KEY}"' if server.needs_key else _NO_KEY


def _key_to_fill_in(server: Server) -> str:
    """The key as a field of a window wants it."""
    return "the server's key" if server.needs_key else _NO_KEY


def _opencode(server: Server) -> Setup:
    """https://opencode.ai/docs/providers (custom provider) and https://opencode.ai/config.json."""
    models: Settings = {}
    for model in server.models:
        models[model.name] = {"name": model.name}
        if length := model.context_length:
            models[model.name]["limit"] = {"context": length, "output": _output(length)}
    options = {"baseURL": server.api}
    if server.needs_key:
        options["apiKey"] = f"{{env:{API_KEY}}}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _US,
        "options": options,
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
    models = []
    for model in server.models:
        if not model.context_length:
            raise OptionError(
                f"Zed needs to know the context length of {model.name}, which the server does not "
                "know: give it with --context-length"
            )
        models.append(
            {
                "name": model.name,
                "max_tokens": model.context_length,
                "max_output_tokens": _output(model.context_length),
            }
        )
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
    models = []
    for model in server.models:
        entry: Settings = {
            "name": f"{model.name} ({_US})",
            "provider": "openai",
            "model": model.name,
            "apiBase": server.api,
            "apiKey": f"${{{{ secrets.{API_KEY} }}}}" if server.needs_key else _NO_KEY,
            "roles": ["chat", "edit", "apply"],
        }
        if length := model.context_length:
            entry["defaultCompletionOptions"] = {
                "contextLength": length,
                "maxTokens": _output(length),
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
    key = f"OPENAI_API_KEY={_key_in_shell(server)} " if server.needs_key else ""
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
        "API Key": _key_to_fill_in(server),
        "Model ID": server.model,
    }
    if length:
        fields["Context Window Size"] = str(length)
        fields["Max Output Tokens"] = str(_output(length))
    command = (
        f"cline auth --provider openai-compatible --baseurl {shlex.quote(server.api)} "
        f"--modelid {shlex.quote(server.model)} --apikey {_key_in_shell(server)}"
    )
    return Setup(
        fields=fields,
        commands=[command],
        notes=["The fields are in Cline's settings in the editor; the command is for its CLI."],
    )


def _open_webui(server: Server) -> Setup:
    """https://docs.openwebui.com/reference/env-configuration (OpenAI), and its quick starts."""
    command = (
        f"OPENAI_API_BASE_URL={shlex.quote(server.api)} OPENAI_API_KEY={_key_in_shell(server)} "
        "open-webui serve --port 3000"
    )
    return Setup(
        fields={"URL": server.api, "Key": _key_to_fill_in(server)},
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
