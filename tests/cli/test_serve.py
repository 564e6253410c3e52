"""``mlxspec serve`` as a process, and ``mlxspec chat --server`` as its client."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlxspec import PromptLookupDecoder, load
from mlxspec.cli.chat import chat_command
from mlxspec.cli.common.generation import DraftingOptions, GenerationSettings
from mlxspec.cli.serve import (
    ServeOptions,
    _duration,
    _hosts,
    _Loader,
    _locked,
    _origin,
    _size,
    serve_command,
)
from mlxspec.engine.params import CacheOptions, SamplingParams
from mlxspec.errors import OptionError
from tests.support.adapters import write_adapters
from tests.support.brake import wait_until

pytestmark = pytest.mark.slow

PLAIN = ("--decoder", "prompt-lookup")
LINE = "one two three four\n"


class Server:
    """A server process and the address that it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.key = ""
        assert process.stderr
        self.panel = ""
        while "Ctrl-C ends the server" not in self.panel:
            line = process.stderr.readline()
            assert line, self.panel
            self.panel += line
        found = re.search(r"http://\S+:\d+", self.panel)
        assert found
        self.address = found[0]

    def ask(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "x-api-key": self.key}
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def end(self) -> tuple[str, str]:
        """Press Ctrl-C once; return the rest of both streams."""
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=30)


@contextmanager
def serving(*arguments: object) -> Iterator[Server]:
    start = "from mlxspec.__main__ import main; main()"
    command = [sys.executable, "-c", start, "serve", "--port", "0", *map(str, arguments)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def refused(*arguments: object) -> Result:
    result = CliRunner().invoke(serve_command, list(map(str, arguments)))
    assert result.exit_code
    assert isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_server_answers_logs_and_ends_with_ctrl_c(endless: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = "--log-json", "--strict-model-names", "--cache-dir", kept
    with serving("--model", endless, *PLAIN, *options) as server:
        assert f"OPENAI_BASE_URL={server.address}/v1" in server.panel
        assert re.search(r"at most [\d,.]+ [MG]iB, including \d+ MiB of weights", server.panel)
        assert "its chat template has no place for them" in server.panel
        prompt = [1, *[7] * 40]
        answer = server.ask("/v1/completions", prompt=prompt, max_tokens=4)
        assert answer["choices"][0]["text"].split() == LINE.split()
        answered = CliRunner().invoke(
            chat_command, ["--server", server.address, "--max-tokens", "5"], input="a\nb\n"
        )
        assert answered.stdout == LINE * 2, answered.stderr
        server.ask("/v1/completions", prompt="a", max_tokens=3, n=2, temperature=1)
        with pytest.raises(urllib.error.HTTPError):
            server.ask("/v1/completions", prompt="a", model="my secret")
        other = ["--server", server.address, "--model", "other"]
        error = CliRunner().invoke(chat_command, other, input="a\n").stderr
        assert error == f"Error: --model is other: choose one of the server's: {endless.name}\n"
        second = refused("--model", endless, *PLAIN, "--port", 0, "--cache-dir", kept)
        assert "another server uses it" in second.stderr
        output, errors = server.end()
        assert server.process.returncode == 0
        assert errors == ""
        loading, loaded, *records = [json.loads(line) for line in output.splitlines()]
        assert (loading["outcome"], loaded["outcome"]) == ("loading", "loaded")
        assert [record["outcome"] for record in records] == [*["length"] * 5, "refused"]
        assert records[0]["prompt_tokens"] == len(prompt)
        assert records[0]["tokens"] == 4
        assert [record["tokens"] for record in records[3:5]] == [3, 3]
        refusal = {"path": "/v1/completions", "status": 404, "param": "model"}
        assert records[5].items() >= {**refusal, "code": "model_not_found"}.items()
        assert "secret" not in output
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_what_cannot_be_served_is_a_one_line_error(endless: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "Address already in use" in refused("--model", endless, "--port", port).stderr
    assert "give a key" in refused("--model", endless, "--host", "0.0.0.0").stderr
    keys = tmp_path / "keys"
    keys.write_text("\n \n")
    assert "has no key" in refused("--model", endless, "--api-key-file", keys).stderr
    missing = tmp_path / "nothing"
    assert str(missing) in refused("--model", endless, "--api-key-file", missing).stderr
    for size in ("5Q", "much"):
        assert "is not a size" in refused("--memory-limit", size).stderr
    assert "allow at least" in refused("--model", endless, "--memory-limit", "100K").stderr
    assert "--quiet and --log-json" in refused("--quiet", "--log-json").stderr
    none = ("--models", endless, "--head", "a")
    assert "apply only to MODEL, which is missing" in refused(*none).stderr
    assert "no such directory" in refused("--models", missing).stderr
    assert "is not a time" in refused("--keep-alive", "soon").stderr
    for value in ("*", "null", "", "app://", "localhost", "http://a/b", "http://a:b", "a b://c"):
        result = refused("--allow-origin", value)
        assert f"{value!r} is not an origin: write it as app://obsidian.md" in result.stderr
    assert _origin("File://") == "file://"  # of pages that a desktop program loads from disk


def test_an_allowed_host_is_known_in_any_spelling() -> None:
    assert _hosts("127.0.0.1", (), []) == {"localhost", "127.0.0.1", "[::1]"}
    assert _hosts("127.0.0.1", ("Mac.local:8080",), []) >= {"localhost", "mac.local"}
    for address in ("fd00::5", "[fd00::5]", "[FD00::5]:8080"):
        assert "[fd00::5]" in (_hosts("127.0.0.1", (address,), []) or ())
    assert _hosts("127.0.0.2", (), []) == {"localhost", "127.0.0.1", "[::1]", "127.0.0.2"}
    assert "[0:0:0:0:0:0:0:1]" in (_hosts("0:0:0:0:0:0:0:1", (), []) or ())
    for host in ("128.0.0.1", "127.0.0.1.example.com", "127.1", "::", "::ffff:1"):
        with pytest.raises(OptionError, match="can be reached from other machines"):
            _hosts(host, (), [])
    assert _hosts("0.0.0.0", ("mac.local",), ["key"]) == {"0.0.0.0", "mac.local"}
    assert _hosts("0.0.0.0", (), ["key"]) is None


def test_prefixes_are_kept_only_where_no_one_else_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others, link = tmp_path / "ours", tmp_path / "others", tmp_path / "link"
    others.mkdir()
    others.chmod(0o770)
    link.symlink_to(others)
    for directory in (others, link):
        with pytest.raises(OptionError, match=rf"{directory}: others may write .*chmod go-w"):
            _locked(directory)
    others.chmod(0o755)
    for directory in (ours, others):
        os.close(_locked(directory))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OptionError, match="others may write to it"):
        _locked(ours)


def test_a_chat_says_what_is_wrong_with_the_server(endless: Path) -> None:
    def said(*arguments: object) -> str:
        result = CliRunner().invoke(chat_command, list(map(str, arguments)), input="a\n")
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        return result.stderr

    nobody = "http://127.0.0.1:1"
    assert "Connection refused" in said("--server", nobody)
    assert "leave them out" in said("--server", nobody, "--kv-bits", 8)


def test_what_the_template_gets_by_default_and_what_a_request_says(
    endless: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(endless, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ mood }} {{ messages[0]['content'] }}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = ("--chat-template-config", '{"mood": "a b c"}')
    with serving("--model", model, *PLAIN, *config, "--log-json") as server:

        def count(**kwargs: str) -> int:
            body = {"messages": [{"role": "user", "content": "d"}], "chat_template_kwargs": kwargs}
            return len(server.ask("/v1/tokenize", **body)["tokens"])

        assert count() == 4
        assert count(other="e") == 4
        assert count(mood="a") == 2
        # A chat takes the options of a request.
        chat = ("--server", server.address, "--max-tokens", "3", "--chat-template-config")
        answered = CliRunner().invoke(chat_command, [*chat, '{"mood": "one two"}'], input="d\n")
        assert answered.exit_code == 0, answered.stderr
        output, _ = server.end()
        assert json.loads(output.splitlines()[-1])["prompt_tokens"] == 3


@pytest.mark.nightly
def test_a_model_is_served_with_its_adapters(tmp_path: Path) -> None:
    adapters = write_adapters(tmp_path / "adapters")
    decoder = PromptLookupDecoder(*load("demo", adapter_path=adapters))
    expected = "".join(response.text for response in decoder.stream([1, 5, 6, 7], 12))
    with serving("--model", "demo", "--adapter-path", adapters, *PLAIN) as server:
        answer = server.ask("/v1/completions", prompt=[1, 5, 6, 7], max_tokens=12)
        assert answer["choices"][0]["text"] == expected


def test_a_model_is_served_with_its_head(headed: Path) -> None:
    with serving("--model", headed) as server:
        assert re.search(r"head +DSpark", server.panel)
        answer = server.ask("/v1/completions", prompt="x y", max_tokens=9)
        assert answer["choices"][0]["text"] == LINE


@pytest.mark.nightly
def test_a_head_is_left_out_if_asked(headed: Path) -> None:
    with serving("--model", headed, "--no-head") as server:
        assert "DSpark" not in server.panel


def test_a_folder_is_served_under_its_own_name_and_its_path(endless: Path, tmp_path: Path) -> None:
    first = shutil.copytree(endless, tmp_path / "first")
    same = [shutil.copytree(endless, tmp_path / one / "same") for one in ("here", "there")]
    named = [argument for path in (first, *same) for argument in ("--model", path)]
    with serving(*named, *PLAIN) as server:
        with urllib.request.urlopen(server.address + "/v1/models") as listed:
            names = [model["id"] for model in json.load(listed)["data"]]
        assert names == ["first", *map(str, same)]
        for model, name in (("first", "first"), (first, "first"), (same[1], str(same[1]))):
            answer = server.ask("/v1/completions", prompt="a", model=str(model), max_tokens=2)
            assert answer["model"] == name
        with pytest.raises(urllib.error.HTTPError):
            server.ask("/v1/completions", prompt="a", model="same", max_tokens=2)
        result = CliRunner().invoke(
            chat_command, ["--server", server.address, "--model", str(first)], input="a\n"
        )
        assert result.exit_code == 0, result.stderr


def test_models_of_a_folder_are_loaded_and_unloaded(endless: Path, tmp_path: Path) -> None:
    for place in ("one", "publisher/two", "other/two"):
        shutil.copytree(endless, tmp_path / "models" / place)
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{}")
    options = ("--keep-alive", 0, "--cache-dir", tmp_path / "kept", "--log-json", *PLAIN)
    prompt = [1, *[7] * 40]
    with serving("--models", tmp_path / "models", *options) as server:
        assert re.search(r"on demand +3 models, which", server.panel)
        assert "models/broken is skipped: " in server.panel
        asked = {"prompt": prompt, "max_tokens": 4, "model": "one"}
        first = server.ask("/v1/completions", **asked)
        assert first["choices"][0]["text"].split() == LINE.split()
        until_unloaded(server, "one")
        again = server.ask("/v1/completions", **asked)
        assert again["choices"] == first["choices"]
        details = again["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == len(prompt) - 1  # saved on unloading
        with pytest.raises(urllib.error.HTTPError) as several:
            server.ask("/v1/completions", prompt="a", model="two")
        assert "other/two or publisher/two" in several.value.read().decode()
        until_unloaded(server, "one")
        output, _ = server.end()
    assert server.process.returncode == 0
    records = [json.loads(line) for line in output.splitlines()]
    outcomes = [record["outcome"] for record in records]
    once = ["loading", "loaded", "length", "unloaded"]
    assert [one for one in outcomes if one != "refused"] == once * 2
    assert {one["model"] for one in records if one["outcome"] in once} == {"one"}


def test_a_model_that_has_left_the_disk_is_not_looked_for_on_the_hub(
    endless: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(endless, tmp_path / "models" / "one")
    monkeypatch.chdir(tmp_path)
    options = ServeOptions(available=("models",))
    named = GenerationSettings(None, 1, DraftingOptions(), SamplingParams(), CacheOptions())
    loader = _Loader((), named, options, {}, [], None)
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{}")
    for _ in range(2):
        (found,) = loader.find()
    assert capsys.readouterr().err.count("models/broken is skipped: ") == 1
    assert found.path == str(tmp_path / "models" / "one")  # "models/one" may be a repository
    assert {"one", "models/one"} <= {found.name, *found.others}


def test_sizes_and_times_are_read_as_they_are_written() -> None:
    sizes = {"512M": 512 << 20, "8G": 8 << 30, "1.5 GiB": 3 << 29, "100kb": 102_400, "7": 7}
    assert {text: _size(text) for text in sizes} == sizes
    times = {"30s": 30, "10m": 600, "2h": 7200, "1d": 86400, "0": 0, "-1": math.inf}
    assert {text: _duration(text) for text in times} == times


def test_a_named_model_is_unloaded_only_with_keep_alive(endless: Path) -> None:
    with serving(endless, "--keep-alive", 0, *PLAIN) as server:
        asked = {"prompt": "a", "model": "any", "max_tokens": 4}
        first = server.ask("/v1/completions", **asked)
        until_unloaded(server, endless.name)
        with urllib.request.urlopen(server.address + "/status") as answer:
            status = json.load(answer)
        weights = sum(file.stat().st_size for file in endless.glob("*.safetensors"))
        assert status["memory"]["active"] < weights / 2
        assert server.ask("/v1/completions", **asked)["choices"] == first["choices"]


def until_unloaded(server: Server, name: str) -> None:
    def states() -> dict[str, str]:
        with urllib.request.urlopen(server.address + "/v1/models") as listed:
            return {model["id"]: model["state"] for model in json.load(listed)["data"]}

    wait_until(lambda: states()[name] == "not-loaded")
