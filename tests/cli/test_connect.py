"""``mlxspec connect``: the settings that each client's documentation asks for."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from mlxspec.cli import connect as command
from mlxspec.cli.common.generation import API_KEY
from mlxspec.cli.connect import CLIENTS
from mlxspec.cli.main import main
from tests.support.at_terminal import at_terminal
from tests.support.serving import running_server

SECRET = "a-key-of-37-characters-or-fewer"
WITH_FILES = ("opencode", "claude-code", "codex", "zed", "continue", "aider")
MODELS = [
    {"id": "owner/first-4bit", "object": "model", "context_length": 65536},
    {"id": "second", "object": "model", "context_length": 1024},
]
VARIABLES = ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "CONTINUE_GLOBAL_DIR")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any settings."""
    for name in (*VARIABLES, API_KEY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class _Models(BaseHTTPRequestHandler):
    """Lists models, to clients with the key if there is one."""

    answer: bytes = b""
    key: str | None = None

    def do_GET(self) -> None:
        known = self.key is None or self.headers["Authorization"] == f"Bearer {self.key}"
        right = self.path == "/v1/models"
        self.send_response((200 if right else 404) if known else 401)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server with these models; returns its address."""
    servers = []

    def serve(answer: Any = MODELS, key: str | None = None) -> str:
        body = json.dumps({"object": "list", "data": answer}).encode()
        handler = type("Models", (_Models,), {"answer": body, "key": key})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def connect(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["connect", *arguments])


def written(address: str, client: str, *more: str) -> str:
    result = connect(client, "--server", address, "--write", "--yes", *more)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def read_toml(path: Path) -> dict[str, Any]:
    return pytest.importorskip("tomllib").loads(path.read_text())


# --- what is in each client's files ---


def test_opencode(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    assert "opencode --model mlxspec/owner/first-4bit\n" in written(address, "opencode")
    path = home / ".config" / "opencode" / "opencode.json"
    assert json.loads(path.read_text()) == {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "mlxspec": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mlxspec",
                "options": {"baseURL": f"{address}/v1"},
                "models": {
                    "owner/first-4bit": {
                        "name": "owner/first-4bit",
                        "limit": {"context": 65536, "output": 8192},
                    },
                    "second": {"name": "second", "limit": {"context": 1024, "output": 256}},
                },
            }
        },
    }


def test_claude_code(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    assert f"claude --settings {home}/.claude/mlxspec.json\n" in written(address, "claude-code")
    settings = json.loads((home / ".claude" / "mlxspec.json").read_text())
    assert settings == {
        "env": {
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "owner/first-4bit",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "owner/first-4bit",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "owner/first-4bit",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "owner/first-4bit",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "65536",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
    }
    assert all(isinstance(value, str) for value in settings["env"].values())


def test_a_home_with_a_space_in_its_name_is_still_the_home(
    tmp_path: Path, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "Jane Doe"))
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "Jane Doe" / "my settings"))
    address = serve()
    path = shlex.quote(f"{tmp_path}/Jane Doe/my settings/mlxspec.json")
    assert f"claude --settings {path}\n" in written(address, "claude-code")
    path = shlex.quote(f"{tmp_path}/Jane Doe/.aider.mlxspec.yml")
    assert f"aider --config {path}\n" in written(address, "aider")


def test_codex(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    assert "codex --profile mlxspec\n" in written(address, "codex")
    assert read_toml(home / ".codex" / "mlxspec.config.toml") == {
        "model": "owner/first-4bit",
        "model_provider": "mlxspec",
        "model_context_window": 65536,
        "model_providers": {
            "mlxspec": {"name": "mlxspec", "base_url": f"{address}/v1", "wire_api": "responses"}
        },
    }


def test_zed(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    assert API_KEY in written(address, "zed")
    path = home / ".config" / "zed" / "settings.json"
    provider = json.loads(path.read_text())["language_models"]["openai_compatible"]["mlxspec"]
    assert provider == {
        "api_url": f"{address}/v1",
        "available_models": [
            {"name": "owner/first-4bit", "max_tokens": 65536, "max_output_tokens": 8192},
            {"name": "second", "max_tokens": 1024, "max_output_tokens": 256},
        ],
    }


def test_continue(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    written(address, "continue")
    settings = yaml.safe_load((home / ".continue" / "config.yaml").read_text())
    assert {name: settings[name] for name in ("name", "version", "schema")} == {
        "name": "Local Config",
        "version": "1.0.0",
        "schema": "v1",
    }
    assert settings["models"][0] == {
        "name": "owner/first-4bit (mlxspec)",
        "provider": "openai",
        "model": "owner/first-4bit",
        "apiBase": f"{address}/v1",
        "apiKey": "none",
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {"contextLength": 65536, "maxTokens": 8192},
    }
    assert [model["model"] for model in settings["models"]] == ["owner/first-4bit", "second"]


def test_aider(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    assert f"aider --config {home}/.aider.mlxspec.yml\n" in written(address, "aider")
    assert yaml.safe_load((home / ".aider.mlxspec.yml").read_text()) == {
        "model": "openai/owner/first-4bit",
        "openai-api-base": f"{address}/v1",
        "openai-api-key": "none",
    }
    lengths = json.loads((home / ".aider.model.metadata.json").read_text())
    assert [*lengths] == ["openai/owner/first-4bit", "openai/second"]
    assert lengths["openai/second"]["max_input_tokens"] == 1024
    assert lengths["openai/second"]["litellm_provider"] == "openai"


def test_cline_and_open_webui_say_what_to_fill_in(serve: Callable[..., str]) -> None:
    address = serve()
    lines = connect("cline", "--server", address).stdout
    for name, value in {
        "API Provider": "OpenAI Compatible",
        "Base URL": f"{address}/v1",
        "Model ID": "owner/first-4bit",
        "Context Window Size": "65536",
    }.items():
        assert re.search(rf"^{name} +{re.escape(value)}$", lines, re.MULTILINE)
    lines = connect("open-webui", "--server", address).stdout
    command = shlex.split(next(line for line in lines.splitlines() if "serve" in line))
    assert command[:4] == [
        f"OPENAI_API_BASE_URL={address}/v1",
        "OPENAI_API_KEY=none",
        "open-webui",
        "serve",
    ]


@pytest.mark.parametrize("client", ["cline", "open-webui"])
def test_what_is_set_in_a_window_is_not_written(client: str, serve: Callable[..., str]) -> None:
    result = connect(client, "--server", serve(), "--write", "--yes")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "has no settings file to write" in result.stderr


# --- models and keys ---


@pytest.mark.parametrize("client", CLIENTS)
def test_a_key_is_neither_shown_nor_written(
    client: str, home: Path, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, SECRET)
    address = serve(key=SECRET)
    shown = connect(client, "--server", address)
    assert shown.exit_code == 0, shown.stderr
    texts = [shown.stdout]
    if client in WITH_FILES:
        texts.append(written(address, client))
        texts += [path.read_text() for path in home.rglob("*") if path.is_file()]
    for text in texts:
        assert SECRET not in text
        assert client in ("cline", "open-webui") or "none" not in text
    assert any(API_KEY in text for text in texts)


@pytest.mark.parametrize("client", WITH_FILES)
def test_a_key_can_be_added_and_removed(
    client: str, home: Path, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> dict[str, str]:
        return {path.name: path.read_text() for path in home.rglob("*") if path.is_file()}

    address = serve()
    written(address, client)
    before = texts()
    monkeypatch.setenv(API_KEY, SECRET)
    written(address, client)
    during = texts()
    monkeypatch.delenv(API_KEY)
    written(address, client)
    if client == "claude-code":  # for which a token takes precedence over the helper
        assert "apiKeyHelper" in json.loads(during["mlxspec.json"])
        assert "ANTHROPIC_AUTH_TOKEN" not in during["mlxspec.json"]
    if client != "opencode":  # which keeps it without using it
        for name, text in texts().items():
            assert sorted(text.replace(",", "").split()) == sorted(
                before[name].replace(",", "").split()
            )


@pytest.mark.parametrize("given", [None, SECRET])
def test_a_missing_or_wrong_key_is_one_line(
    given: str | None, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        monkeypatch.setenv(API_KEY, given)
    address = serve(key="another")
    result = connect("codex", "--server", address)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert API_KEY in result.stderr
    assert SECRET not in result.stderr


def test_the_model_can_be_chosen(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    written(address, "codex", "--model", "second")
    settings = read_toml(home / ".codex" / "mlxspec.config.toml")
    assert (settings["model"], settings["model_context_window"]) == ("second", 1024)
    result = connect("codex", "--server", address, "--model", "third")
    assert result.exit_code == 1
    assert "--model is third: choose one of the server's: owner/first-4bit, second" in result.stderr


@pytest.mark.parametrize("client", CLIENTS)
def test_an_unknown_context_length_is_left_out_or_required(
    client: str, serve: Callable[..., str]
) -> None:
    address = serve([{"id": name, "context_length": None} for name in ("endless", "other")])
    result = connect(client, "--server", address)
    if client == "zed":
        assert result.exit_code == 1
        assert "give it with --context-length" in result.stderr
    else:
        assert result.exit_code == 0
        assert "context" not in result.stdout.lower().replace("context_length", "")
    result = connect(client, "--server", address, "--context-length", "4096")
    assert result.exit_code == 0
    assert client == "open-webui" or "4096" in result.stdout


def test_variables_name_other_places(
    tmp_path: Path, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve()
    for name in VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name / "a b"))
    for client in ("opencode", "claude-code", "codex", "continue"):
        lines = written(address, client)
        if client == "claude-code":
            path = shlex.quote(f"{tmp_path}/CLAUDE_CONFIG_DIR/a b/mlxspec.json")
            assert f"claude --settings {path}" in lines
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(found) == [
        "CLAUDE_CONFIG_DIR/a b/mlxspec.json",
        "CODEX_HOME/a b/mlxspec.config.toml",
        "CONTINUE_GLOBAL_DIR/a b/config.yaml",
        "XDG_CONFIG_HOME/a b/opencode/opencode.json",
    ]


# --- writing ---


@pytest.mark.parametrize("client", WITH_FILES)
def test_nothing_is_written_unasked(client: str, home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    assert connect(client, "--server", address).exit_code == 0
    result = connect(client, "--server", address, "--write")
    assert result.exit_code == 1
    assert "+++ " in result.stdout  # what would change
    assert result.stderr == (
        "Error: --write asks for confirmation, which needs a terminal: add --yes\n"
    )
    assert not home.exists()


@pytest.mark.parametrize("client", WITH_FILES)
def test_a_second_time_changes_nothing(client: str, home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    written(address, client)

    def state() -> dict[Path, tuple[int, int, int]]:
        """Return each path's file and modification time. Reading may change st_atime."""
        found = {path: path.stat() for path in home.rglob("*")}
        return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}

    before = state()
    again = connect(client, "--server", address, "--write")  # and asks nothing
    assert again.exit_code == 0
    assert "already: nothing was written" in again.stdout
    assert state() == before


def test_what_others_have_stays(home: Path, serve: Callable[..., str]) -> None:
    path = home / ".config" / "opencode" / "opencode.json"
    path.parent.mkdir(parents=True)
    theirs = {
        "model": "anthropic/claude",
        "provider": {"ollama": {"options": {"baseURL": "http://x"}}},
        "mcp": {"files": {"command": ["x", "é"]}},
    }
    path.write_text(json.dumps(theirs, indent=4))
    lines = written(serve(), "opencode").splitlines()
    settings = json.loads(path.read_text())
    assert settings["provider"].pop("mlxspec")
    assert settings == theirs
    removed = [line for line in lines if line.startswith("-") and not line.startswith("---")]
    # A trailing comma, and lists over several lines.
    assert len(removed) <= 3


@pytest.mark.parametrize(
    ("client", "place", "text"),
    [
        ("zed", ".config/zed/settings.json", '// Zed settings\n{"vim_mode": true}\n'),
        ("opencode", ".config/opencode/opencode.json", '{"model": '),
        ("codex", ".codex/mlxspec.config.toml", "model = "),
        ("continue", ".continue/config.yaml", "models: {"),
        ("continue", ".continue/config.yaml", "models: [&a {name: x}, *a]\n"),
        ("aider", ".aider.model.metadata.json", "[]"),
    ],
)
def test_a_file_that_would_lose_something_is_left_alone(
    client: str, place: str, text: str, home: Path, serve: Callable[..., str]
) -> None:
    path = home / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    address = serve()
    result = connect(client, "--server", address, "--write", "--yes")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert str(path) in result.stderr
    assert result.stdout == connect(client, "--server", address).stdout  # what to write there
    assert path.read_text() == text
    assert [one for one in home.rglob("*") if one.is_file()] == [path]


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "status"), [(b"y\n", 0), (b"n\n", 1), (b"\n", 1)])
def test_at_a_terminal_one_is_asked(
    typed: bytes, status: int, home: Path, serve: Callable[..., str]
) -> None:
    ended, shown = at_terminal(typed, "connect", "codex", "--server", serve(), "--write")
    assert ended == status, shown
    assert "Write this file? [y/N]" in shown
    assert "\x1b[32m+model = " in shown
    assert (home / ".codex" / "mlxspec.config.toml").exists() == (status == 0)
    assert ("Nothing was written" in shown) == (status == 1)


def test_what_a_client_writes_in_the_meantime_stays(
    home: Path, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / ".codex" / "mlxspec.config.toml"
    path.parent.mkdir(parents=True)

    def answer(*_: object) -> bool:
        path.write_text("theirs = 1\n")
        return True

    monkeypatch.setattr(command, "confirm", answer)
    result = connect("codex", "--server", serve(), "--write")
    assert result.exit_code == 1
    assert "another program has just changed it" in result.stderr
    assert path.read_text() == "theirs = 1\n"


@pytest.mark.slow
def test_what_is_to_be_copied_is_not_broken(home: Path, serve: Callable[..., str]) -> None:
    address = serve()
    _, narrow = at_terminal(b"", "connect", "claude-code", "--server", address, "--no-color")
    piped = connect("claude-code", "--server", address).stdout
    assert narrow.replace("\r\n", "\n") == piped
    assert json.loads(piped[piped.index("{") : piped.rindex("}") + 1])
    _, colored = at_terminal(b"", "connect", "claude-code", "--server", address)
    assert f"\x1b[1mclaude --settings {home}/.claude/mlxspec.json\x1b[0m" in colored


# --- errors ---


def test_without_a_client_they_are_listed() -> None:
    result = connect()
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [*CLIENTS]


@pytest.mark.parametrize(
    "arguments",
    [
        ("vim",),
        ("zed", "--context-length", "0"),
        ("zed", "--model", ""),
        ("zed", "--server", "127.0.0.1:1"),
        ("zed", "--server", ""),
        ("zed", "--server", "http://127.0.0.1:1/\n"),
    ],
)
def test_a_wrong_use_is_an_error(arguments: tuple[str, ...], home: Path) -> None:
    result = connect(*arguments)
    assert result.exit_code in (1, 2)
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert not home.exists()


def test_writing_needs_a_client() -> None:
    result = connect("--write")
    assert result.exit_code == 1
    assert result.stderr == "Error: --write needs a CLIENT: 'mlxspec connect' lists them\n"


def test_without_a_server_one_line_says_how_to_start_one() -> None:
    result = connect("zed", "--server", "http://127.0.0.1:1/v1/")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: --server http://127.0.0.1:1: ")
    assert result.stderr.endswith(
        "Connection refused; start a server with 'mlxspec serve', or give the address that it "
        "prints\n"
    )


@pytest.mark.parametrize("answer", [[], {}, None, [{}], ["x"], 5])
def test_a_server_that_is_not_ours_is_an_error(answer: Any, serve: Callable[..., str]) -> None:
    result = connect("zed", "--server", serve(answer))
    assert result.exit_code == 1
    assert "or start one with 'mlxspec serve'" in result.stderr


@pytest.mark.slow
def test_a_server_of_ours_is_asked() -> None:
    with running_server() as running:
        result = connect("codex", "--server", f"{running.address}/v1/")
        assert result.exit_code == 0, result.stderr
        card = running.client().models.list().data[0].model_dump()
        assert f'model = "{card["id"]}"' in result.stdout
        assert f"model_context_window = {card['context_length']}" in result.stdout
        assert f'base_url = "{running.address}/v1"' in result.stdout
