"""A fault ends its request with the right error, and the server answers the next one."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import select
import socket
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

import mlxspec
from mlxspec.cli.serve import refusal_record, request_log
from mlxspec.drafting.costs import LiveCosts
from mlxspec.generation.request import State
from mlxspec.server import app
from mlxspec.server.body import MOST_BYTES, ApiError
from mlxspec.server.memory_budget import in_words
from mlxspec.server.openai import CompletionAnswer
from mlxspec.server.sending import _server_sent_events
from mlxspec.server.worker import ServedRequest
from tests.support.brake import Brake, braked, wait_until
from tests.support.demo import given_costs, stand_in_decoder
from tests.support.serving import Running, memory_with_room, running_server, served

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
ENDLESS = {"prompt": "Once upon", "max_tokens": 20_000}
LONG = [1, *(300 + at % 3000 for at in range(1000))]
HTTP = httpx.Client(timeout=30)


@pytest.fixture
def brake(server: Running) -> Iterator[Brake]:
    with braked(server.decoder.model) as brake:
        yield brake
    wait_until(lambda: not server.worker.requests)


def post(server: Running, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return HTTP.post(server.address + path, content=content, **options)


def alone(prompt: str | list[int], max_tokens: int) -> str:
    """Return plain decoding's output."""
    responses = stand_in_decoder(mlxspec.Decoder).stream(prompt, max_tokens)
    return "".join(response.text for response in responses)


@cache
def once_upon() -> str:
    return alone("Once upon", 4)


def check_goes_on(server: Running, **options: Any) -> None:
    """Assert that the next request gets the right answer."""
    answer = post(server, TEXT, {"prompt": "Once upon", "max_tokens": 4}, **options)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == once_upon()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return an answer's error; check that it has OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return dict(error)


class RawClient:
    """A client that sends a raw request and controls when it reads.

    Args:
        server: the server.
        path: the request's path.
        body: an object, or the body's bytes.
        headers: added to or replacing the default ones.
        receives: the receive buffer's size in bytes; None for the default.
    """

    def __init__(
        self,
        server: Running,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        receives: int | None = None,
    ) -> None:
        host, port = server.address.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if receives:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        self.socket.settimeout(30)
        self.socket.connect((host, int(port)))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Host": f"{host}:{port}", "Content-Length": str(len(content)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self.socket.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)

    def read_until(self, marker: bytes) -> bytes:
        """Read until a marker has arrived; return everything read."""
        read = b""
        while marker not in read:
            more = self.socket.recv(1 << 16)
            assert more, f"the connection has ended: {read[-200:]!r}"
            read += more
        return read

    def leave(self) -> None:
        self.socket.close()


# --- where mlx_lm.server fails ---


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


TANGLED = {
    "allOf": [
        {"anyOf": [{"properties": {f"{i}{j}": {"type": "integer"}}} for j in range(4)]}
        for i in range(12)
    ]
}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"stop": 5}, "stop"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": schema_of({"not": {}})}, "response_format"),
        (CHAT, {"response_format": schema_of(TANGLED)}, "response_format"),
        (TEXT, {"response_format": schema_of({"pattern": "(?=x)"})}, "response_format"),
        (
            TEXT,
            {"response_format": schema_of({"type": "integer", "multipleOf": 999999937})},
            "response_format",
        ),
        (TEXT, {"guided_regex": "a+"}, "guided_regex"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"logit_bias": {"99999999": 1}}, "logit_bias"),
        (CHAT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (CHAT, {"adapters": "/etc"}, "adapters"),
        (CHAT, {"draft_model": "mlx-community/x"}, "draft_model"),
        (CHAT, {"chat_template": "{{ 0 }}"}, "chat_template"),
        (
            CHAT,
            {"chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"prompt": [5, 10**6]}, "prompt"),
        (TEXT, {"prompt": [[5], ["a"]]}, "prompt[1][0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    answer = post(server, path, {"max_tokens": 4, **body, **fields})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    check_goes_on(server)


@pytest.mark.nightly(keep=12)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 10**6},
        {"top_k": 10**6, "temperature": 1},
        {"seed": -1},
        {"stream_options": {}},
        {"stream_options": None, "stop": None, "temperature": None, "n": None, "max_tokens": None},
        {"stop": []},
        {"temperature": 0.0, "top_p": 0},
        {"temperature": 100, "top_p": 1e-9, "min_p": 1, "xtc_probability": 1},
        {"temperature": 1e-29},
        {"logit_bias": {str(token): -100 for token in range(4096)}},
        {"frequency_penalty": 100, "presence_penalty": -100, "repetition_penalty": 100},
        {"user": "\ud800", "metadata": {"\udc00": "\ud800"}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_unusual_is_answered(server: Running, stream: bool, fields: dict[str, Any]) -> None:
    body = {"messages": HELLO, "stream": stream, "max_completion_tokens": 4, "logprobs": True}
    answer = post(server, CHAT, {**body, **fields})
    assert answer.status_code == 200
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
    else:
        assert answer.json()["usage"]["completion_tokens"] == 4
    check_goes_on(server)


def test_several_prompts_are_answered_in_their_order(server: Running) -> None:
    answer = post(server, TEXT, {"prompt": ["a", "b"], "max_tokens": 4}).json()
    assert [choice["text"] for choice in answer["choices"]] == [alone("a", 4), alone("b", 4)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b'{"prompt": "\xff"}',
        b"[1, 2]",
        b'"text"',
        b"null",
        b"NaN",
        b'{"prompt": ' + b"9" * 10_000 + b"}",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 201,
    ],
)
def test_an_invalid_body_is_a_400(server: Running, body: bytes) -> None:
    for path in (CHAT, TEXT, "/v1/tokenize", "/v1/detokenize"):
        answer = post(server, path, body)
        assert answer.status_code == 400
        error_of(answer)
    check_goes_on(server)


def test_nothing_in_a_request_is_opened(server: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
        answer = post(server, CHAT, {"messages": [{"role": "user", "content": parts}]})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "messages[0].content[1].type"
        for name in (url, "/etc/passwd", "..", "demo"):
            answer = post(server, CHAT, {"messages": HELLO, "model": name, "max_tokens": 1})
            assert (answer.status_code, answer.json()["model"]) == (200, "small")
        listener.settimeout(0.05)
        with pytest.raises(TimeoutError):
            listener.accept()


# --- bodies ---


def test_a_body_beyond_the_bound_is_refused_before_it_is_read(server: Running) -> None:
    client = RawClient(server, CHAT, b"", {"Content-Length": str(MOST_BYTES + 1)})
    assert client.read_until(b"}}").startswith(b"HTTP/1.1 413")
    client.leave()
    megabyte = b" " * (1 << 20)
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(MOST_BYTES // len(megabyte) + 4):
            sent += len(megabyte)
            yield megabyte

    answer = HTTP.post(server.address + CHAT, content=chunks())
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    assert sent > MOST_BYTES
    check_goes_on(server)


def encoded(data: bytes, encoding: str) -> bytes:
    compressor = zlib.compressobj(9, wbits={"gzip": 31, "deflate": 15, "bare": -15}[encoding])
    return compressor.compress(data) + compressor.flush()


ONCE = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()


@pytest.mark.parametrize("name", ["gzip", "x-gzip", "GZip", "deflate", "bare", "identity", ""])
def test_a_compressed_body_is_decoded(server: Running, name: str) -> None:
    expected = post(server, TEXT, ONCE).json()["choices"]
    kind = name.lower().removeprefix("x-")
    body = ONCE if kind in ("identity", "") else encoded(ONCE, kind)
    header = {"Content-Encoding": "deflate" if name == "bare" else name}
    answer = post(server, TEXT, body, headers=header)
    assert answer.status_code == 200
    assert answer.json()["choices"] == expected


@pytest.mark.parametrize("name", ["zstd", "br", "gzip, gzip", "compress", "é"])
def test_an_encoding_that_is_unknown_is_named(server: Running, name: str) -> None:
    answer = post(server, TEXT, ONCE, headers={"Content-Encoding": name.encode()})
    assert answer.status_code == 415
    assert "Content-Encoding" in error_of(answer)["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_a_body_that_is_not_in_its_encoding_is_a_400(server: Running, kind: str) -> None:
    whole = encoded(ONCE, kind)
    for body in (ONCE, b"", whole[:-5], whole + b"x", whole[:14] + b"\xff" + whole[15:]):
        answer = post(server, TEXT, body, headers={"Content-Encoding": kind})
        assert answer.status_code == 400
        assert "encode it again" in error_of(answer)["message"]


def test_a_body_that_grows_beyond_the_bound_is_refused(server: Running) -> None:
    """Compressed, it has a thousandth of its size."""
    compressor = zlib.compressobj(9, wbits=31)
    head, part = (
        compressor.compress(b" " * (1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
        for _ in range(2)
    )
    body = head + 1999 * part  # after a full flush, equal texts become equal bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = post(server, TEXT, body, headers={"Content-Encoding": "gzip"})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    assert grown < 200_000 * (1024 if sys.platform == "darwin" else 1)
    check_goes_on(server)


def test_slow_senders_give_way_to_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_ARRIVAL", 0.3)
    slow = [RawClient(server, TEXT, b"", {"Content-Length": "2000000"}) for _ in range(4)]
    for one in slow:
        one.socket.sendall(b"{")
    body = json.dumps({"prompt": "Once", "max_tokens": 2, "x": "y" * (2 << 20)}).encode()
    assert post(server, TEXT, body).status_code == 200
    refused, _, _ = select.select([one.socket for one in slow], (), (), 30)
    (refusal,) = [one.read_until(b"}}") for one in slow if one.socket in refused]
    assert refusal.startswith(b"HTTP/1.1 408")
    assert b"send it again" in refusal
    for one in slow:
        one.leave()
    check_goes_on(server)


def test_a_slow_sender_is_waited_for_while_there_are_places(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_ARRIVAL", 0.05)
    body = json.dumps({"prompt": "Once", "max_tokens": 2, "x": "y" * (2 << 20)}).encode()
    slow = RawClient(server, TEXT, b"", {"Content-Length": str(len(body))})
    time.sleep(0.3)
    slow.socket.sendall(body)
    assert slow.read_until(b"}}").startswith(b"HTTP/1.1 200")
    slow.leave()


@pytest.mark.parametrize(
    "path", ["/v1//chat/completions", "//v1/chat/completions", "/v1///chat//completions"]
)
def test_a_base_url_may_end_with_a_slash(server: Running, path: str) -> None:
    answer = post(server, path, {"messages": HELLO, "max_tokens": 1})
    assert answer.status_code == 200
    assert answer.json()["object"] == "chat.completion"
    refused = post(server, "/v1//messages", {"messages": [], "max_tokens": 1})
    assert refused.json()["type"] == "error"
    assert HTTP.get(f"{server.address}/v1//models").is_success


@pytest.fixture(scope="module")
def refusals() -> list[tuple[str, ApiError]]:
    """The requests that :func:`guarded` has refused."""
    return []


@pytest.fixture(scope="module")
def guarded(refusals: list[tuple[str, ApiError]]) -> Iterator[Running]:
    """A server that accepts some host names only."""

    def refused(path: str, error: ApiError) -> None:
        refusals.append((path, error))

    hosts = ["localhost", "127.0.0.1", "[::1]", "Box.example"]
    with running_server(hosts=hosts, on_refusal=refused, strict_model_names=True) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/LONG", None, {}),
        ("/v1/files/LONG", None, {}),
        ("/v1/models/LONG", None, {}),
        ("/v1/responses/LONG", None, {}),
        ("/v1/messages/LONG", None, {}),
        ("/health", None, {"Host": "LONG"}),
        ("/health", None, {"Origin": "LONG"}),
        (TEXT, {"prompt": "a", "model": "LONG"}, {}),
        (TEXT, {"prompt": "a", "logit_bias": {"LONG": 1}}, {}),
        (TEXT, {"prompt": "a", "response_format": schema_of({"LONG": 1, "type": "LONG"})}, {}),
        (TEXT, {"prompt": "a", "response_format": schema_of({"pattern": "(LONG"})}, {}),
        (TEXT, {"prompt": "a", "grammar": "start: LONG"}, {}),
        (CHAT, {"messages": HELLO, "tool_choice": "LONG"}, {}),
        (CHAT, {"messages": [{"role": "LONG", "content": "a"}]}, {}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "model": "LONG"}, {}),
        ("/v1/responses", {"input": "a", "previous_response_id": "LONG"}, {}),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "LONG"}}}, {}),
    ],
)
def test_an_error_does_not_repeat_a_long_text(
    guarded: Running,
    refusals: list[tuple[str, ApiError]],
    path: str,
    body: Any,
    headers: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither for the client nor in the log."""
    refusals.clear()
    method = "POST" if body else "GET"
    texts = [text.replace("LONG", "x" * 30_000) for text in (path, json.dumps([body, headers]))]
    body, headers = json.loads(texts[1])
    answer = HTTP.request(method, guarded.address + texts[0], json=body, headers=headers)
    assert 400 <= answer.status_code < 500
    assert len(answer.content) < 2000, answer.text
    (refusal,) = refusals
    for as_json in (False, True):
        with request_log(as_json) as log:
            log(refusal_record(*refusal))
        output = capsys.readouterr()
        assert 0 < len(output.out + output.err) < 500


# --- access ---


NAMES = ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]", "[::1]:8080", "box.EXAMPLE:8080"]
FOREIGN = [
    "",
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example:80",
    "[::1].evil.example",
    "[::1",
    "::1",
    "localhost:evil.example",
    "localhost:80:80",
    "user@localhost",
    "0.0.0.0",
]


def test_a_server_is_called_by_its_own_names_only(guarded: Running) -> None:
    """Otherwise a web page could reach it by DNS rebinding."""
    for path in ("/v1/models", "/status", "/health", "/"):
        for host in NAMES:
            answer = HTTP.get(guarded.address + path, headers={"Host": host})
            assert answer.status_code == 200, (path, host)
        for host in FOREIGN:
            answer = HTTP.get(guarded.address + path, headers={"Host": host})
            assert answer.status_code == 403, (path, host)
            assert error_of(answer)["code"] == "host_not_allowed"


def test_pages_of_other_servers_may_not_ask(guarded: Running) -> None:
    own = guarded.address.removeprefix("http://")
    for origin in (f"http://{own}", f"https://{own}", f"http://{own}".upper()):
        assert HTTP.get(f"{guarded.address}/status", headers={"Origin": origin}).is_success
    named = {"Host": "LocalHost:80", "Origin": "http://localhost:80"}
    assert HTTP.get(f"{guarded.address}/status", headers=named).is_success
    for origin in ("null", "", "http://evil.example", f"http://{own}1", f"http://x.{own}", own):
        answer = HTTP.get(f"{guarded.address}/status", headers={"Origin": origin})
        assert (answer.status_code, error_of(answer)["code"]) == (403, "origin_not_allowed")
    answer = HTTP.options(guarded.address + CHAT, headers={"Origin": "http://evil.example"})
    assert not answer.is_success
    assert not [name for name in answer.headers if name.startswith("access-control")]


ORIGINS = ["app://obsidian.md", "tauri://localhost", "chrome-extension://abc", "http://a.b:3000"]


def test_origins_that_the_operator_allows_may_ask() -> None:
    with running_server(origins=ORIGINS, keys=["secret"]) as server:
        key = {"Authorization": "Bearer secret"}
        for origin in ORIGINS:
            # The browser asks first, without the key.
            asked = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
                "Access-Control-Request-Private-Network": "true",
            }
            answer = HTTP.options(server.address + CHAT, headers=asked)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == origin
            assert "POST" in answer.headers["access-control-allow-methods"]
            allowed = answer.headers["access-control-allow-headers"]
            assert {"authorization", "x-stainless-os"} <= {*allowed.replace(" ", "").split(",")}
            assert answer.headers["access-control-allow-private-network"] == "true"
            for headers, status in (({**key, "Origin": origin}, 200), ({"Origin": origin}, 401)):
                body = {"messages": HELLO, "max_tokens": 1}
                answer = post(server, CHAT, body, headers=headers)
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] == origin
        for origin in (
            "app://other",
            "http://a.b",
            "https://a.b:3000",
            "null",
            "tauri://localhost.x",
        ):
            answer = HTTP.get(f"{server.address}/v1/models", headers={**key, "Origin": origin})
            assert (answer.status_code, error_of(answer)["code"]) == (403, "origin_not_allowed")
            assert "--allow-origin" in error_of(answer)["message"]
            assert "access-control-allow-origin" not in answer.headers
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answer = HTTP.options(server.address + CHAT, headers=asked)
            assert (answer.status_code, error_of(answer)["code"]) == (403, "origin_not_allowed")
            assert "access-control-allow-origin" not in answer.headers
        assert HTTP.get(f"{server.address}/v1/models", headers=key).is_success


# --- clients that leave ---


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """A server that runs one generation at a time, with short prompt chunks."""
    with running_server(served(prefill_step_size=64), {"active": 1}) as running:
        yield running


def only_request(server: Running) -> ServedRequest:
    (request,) = server.worker.requests
    return request


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_tokens_come_ends_the_generation(narrow: Running, stream: bool) -> None:
    with braked(narrow.decoder.model) as brake:
        brake.seconds = 0.01
        client = RawClient(narrow, TEXT, {**ENDLESS, "stream": stream})
        wait_until(lambda: narrow.worker.requests and only_request(narrow).stats.emitted > 4)
        client.leave()
        before = len(brake.rows)
        wait_until(lambda: not narrow.worker.requests)
        assert len(brake.rows) - before < 500  # of 20,000, for busy machines
    check_goes_on(narrow)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_the_prompt_runs_leaves_its_beginning(
    narrow: Running, stream: bool
) -> None:
    prompt = [1 + stream, *LONG[1:]]
    with braked(narrow.decoder.model) as brake:
        brake.seconds = 0.03
        client = RawClient(narrow, TEXT, {"prompt": prompt, "stream": stream})
        wait_until(lambda: narrow.worker.requests and only_request(narrow).prefilled > 200)
        client.leave()
        wait_until(lambda: not narrow.worker.requests)
        run = sum(brake.rows)
        assert 200 < run < len(prompt) - 200
        brake.seconds = 0
        answer = post(narrow, TEXT, {"prompt": prompt, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == run
        assert sum(brake.rows) in (len(prompt), len(prompt) + 1)  # the last step may run ahead
    assert answer["choices"][0]["text"] == alone(prompt, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_the_queue_is_not_generated_for(narrow: Running, stream: bool) -> None:
    with braked(narrow.decoder.model) as brake:
        brake.seconds = 0.01
        first = RawClient(narrow, TEXT, ENDLESS)
        wait_until(lambda: narrow.worker.requests and only_request(narrow).stats.emitted)
        running = only_request(narrow)
        second = RawClient(narrow, TEXT, {"prompt": LONG, "stream": stream})
        wait_until(lambda: len(narrow.worker.requests) == 2)
        waiting = narrow.worker.requests[1]
        second.leave()
        wait_until(lambda: narrow.worker.requests == [running])
        assert (waiting.prefilled, waiting.sequence, waiting.state) == (0, None, "ended")
        first.leave()
        wait_until(lambda: not narrow.worker.requests)
    check_goes_on(narrow)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_answer_begins_is_not_generated_for(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServedRequest] = []
    tokenizing, gone, plain = threading.Event(), threading.Event(), app.completion_prompts

    def slowly(*args: Any) -> Any:
        tokenizing.set()
        assert gone.wait(30)
        return plain(*args)

    monkeypatch.setattr(app, "completion_prompts", slowly)
    monkeypatch.setattr(server.worker, "on_end", seen.append)
    client = RawClient(server, TEXT, {**ENDLESS, "stream": stream})
    assert tokenizing.wait(30)
    client.leave()
    wait_until(lambda: HTTP.get(f"{server.address}/health").is_success)  # the loop has noticed
    gone.set()
    wait_until(lambda: seen)
    assert not server.worker.requests
    assert seen[0].stats.emitted < 1000


def test_who_has_left_when_the_answer_begins_is_not_generated_for(server: Running) -> None:
    """For ASGI servers that report it with an error, before anything is read."""
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "POST",
        "path": TEXT,
        "query_string": b"",
        "headers": [],
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise OSError

    async def ask() -> None:
        with pytest.raises(ClientDisconnect):
            await server.app(scope, receive, send)
        assert len(server.worker.requests) == 1

    with braked(server.decoder.model) as brake, brake.holding():
        asyncio.run(ask())
    wait_until(lambda: not server.worker.requests)


def test_who_leaves_while_sending_is_no_fault(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    length, chunks = {"Content-Length": "1000"}, {"Transfer-Encoding": "chunked"}
    for body, headers in ((b"", length), (b'{"prompt": ', length), (b'4\r\n{"pr\r\n', chunks)):
        with caplog.at_level(logging.WARNING):
            client = RawClient(server, TEXT, body, headers)
            HTTP.get(f"{server.address}/health")
            client.leave()
            for _ in range(5):
                HTTP.get(f"{server.address}/health")
        assert not server.worker.requests
    assert not caplog.records


# --- clients that are slow ---


def test_a_slow_reader_pauses_its_own_generation_only() -> None:
    body = {"prompt": "Once upon", "max_tokens": 400, "stream": True, "logprobs": 20}
    with running_server(send_buffer=1 << 14) as server:
        client = RawClient(server, TEXT, body, receives=1 << 12)

        def paused() -> bool:
            requests = server.worker.requests
            return bool(requests and requests[0].state is State.PAUSED)

        wait_until(paused)
        request = only_request(server)
        emitted = request.stats.emitted
        check_goes_on(server)
        assert paused()
        assert request.stats.emitted == emitted < 400
        answer = client.read_until(b"[DONE]").decode()
        client.leave()
    chunks = [line.removeprefix("data: ") for line in answer.splitlines() if '"choices"' in line]
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == alone("Once upon", 400)


def test_who_reads_nothing_at_all_makes_room_in_the_end() -> None:
    with running_server(limits={"active": 1}, send_buffer=1 << 14, patience=0.1) as server:
        body = {**ENDLESS, "stream": True, "logprobs": 20}
        client = RawClient(server, TEXT, body, receives=1 << 12)
        wait_until(lambda: server.worker.requests)
        check_goes_on(server, headers={"Connection": "close"})
        wait_until(lambda: not server.worker.requests)
        client.leave()


def test_silent_phases_have_keep_alives() -> None:
    with (
        running_server(limits={"active": 1}, keep_alive=0.02) as server,
        braked(server.decoder.model) as brake,
    ):
        body = {"prompt": "Once upon", "max_tokens": 4}
        with brake.holding():
            prefilling = RawClient(server, TEXT, {**body, "stream": True})
            wait_until(lambda: server.worker.requests)
            queued = RawClient(server, TEXT, {**body, "stream": True})
            wait_until(lambda: len(server.worker.requests) == 2)
            for client in (prefilling, queued):
                assert client.read_until(b": still working\n\n").startswith(b"HTTP/1.1 200 OK")
            assert server.worker.requests[1].state == "queued"
        for client in (prefilling, queued):
            assert b"[DONE]" in client.read_until(b"[DONE]")
            client.leave()


def test_a_stream_with_nothing_to_send_yet_has_keep_alives_while_tokens_arrive() -> None:
    class Stream:
        async def events(self, patience: float) -> AsyncIterator[list[str]]:
            for token in ("a", "call", "goes", "on", "b"):
                yield [token]

        def stop(self, finished: object) -> None: ...

    class Answer:
        end, finished = "end", None

        def begin(self) -> list[dict[str, str]]:
            return []

        keep_alive = begin

        def feed(self, events: list[str]) -> list[dict[str, str]]:
            return [{"text": text} for text in events if len(text) == 1]

    async def sent(keep_alive: float) -> list[str]:
        stream: Any = _server_sent_events(cast(Any, Stream()), cast(Any, Answer()), keep_alive)
        return [text async for text in stream]

    first, last = (f'data: {{"text": "{text}"}}\n\n' for text in "ab")
    assert asyncio.run(sent(0.0)) == ["", first, *3 * [": still working\n\n"], last, "end"]
    assert asyncio.run(sent(60.0)) == ["", first, last, "end"]


# --- faults of the server's own ---


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_a_forward_ends_its_requests_alone(
    server: Running, brake: Brake, stream: bool, rows: int
) -> None:
    """In the prompt's forward or a later one, when some layers' caches are already ahead."""
    prompt = [1, *range(400, 430)]
    client = server.client()

    def fail(count: int = 0) -> None:
        if len(brake.rows) == rows - 1:
            brake.fault = RuntimeError("out of order")

    brake.on_forward = fail
    fields: Any = {"model": "small", "prompt": prompt, "max_tokens": 40}
    with pytest.raises(openai.APIError, match="out of order") as caught:
        list(client.completions.create(**fields, stream=stream))
    if stream:
        assert caught.value.type == "server_error"  # the status was sent before
    else:
        assert isinstance(caught.value, openai.InternalServerError)
    brake.on_forward = lambda: None
    assert client.completions.create(**fields).choices[0].text == alone(prompt, 40)


def test_an_error_in_a_stream_is_its_last_event_but_one(server: Running, brake: Brake) -> None:
    brake.fault = RuntimeError("out of order")
    answer = post(server, CHAT, {"messages": HELLO, "stream": True, "n": 3})
    *_, error, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    event = json.loads(error.removeprefix("data: "))
    assert event["error"]["type"] == "server_error"
    check_goes_on(server)


def test_a_fault_in_one_request_leaves_the_others(
    server: Running, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mlxspec.GenerationResponse.token_logprobs

    def broken(response: Any, top: int) -> Any:
        if top == 7:
            raise RuntimeError("out of order")
        return plain(response, top)

    monkeypatch.setattr(mlxspec.GenerationResponse, "token_logprobs", broken)
    with ThreadPoolExecutor() as pool:
        with brake.holding():
            bodies = [
                {"prompt": prompt, "max_tokens": 30, "logprobs": top}
                for prompt, top in (("Once upon", 3), ("So", 7), ("Then", 2))
            ]
            answers = [pool.submit(post, server, TEXT, body) for body in bodies]
            wait_until(lambda: len(server.worker.requests) == 3)
        first, second, third = [answer.result() for answer in answers]
    assert second.status_code == 500
    assert "out of order" in error_of(second)["message"]
    assert first.json()["choices"][0]["text"] == alone("Once upon", 30)
    assert third.json()["choices"][0]["text"] == alone("Then", 30)


def test_a_fault_in_the_last_token_is_reported(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(mlxspec.GenerationResponse, "token_logprobs", broken)
    answer = post(server, TEXT, {"prompt": "Once upon", "max_tokens": 1, "logprobs": 2})
    assert answer.status_code == 500
    assert "out of order" in error_of(answer)["message"]


def check_answers_together(server: Running, brake: Brake) -> None:
    """Assert that three requests that share steps get the right answers."""
    prompts = ["Once upon", "So", "Then"]
    with ThreadPoolExecutor() as pool:
        with brake.holding():
            bodies = [{"prompt": prompt, "max_tokens": 30} for prompt in prompts]
            answers = [pool.submit(post, server, TEXT, body) for body in bodies]
            wait_until(lambda: len(server.worker.requests) == 3)
        results = [answer.result() for answer in answers]
    assert [answer.status_code for answer in results] == [200] * 3
    texts = [answer.json()["choices"][0]["text"] for answer in results]
    assert texts == [alone(prompt, 30) for prompt in prompts]


def test_step_times_that_make_no_sense_fail_no_request() -> None:
    model = served()
    model.decoder.costs = given_costs({1: 1.0, 8: 1.2, 16: 0.8})  # falling costs
    with running_server(model) as server, braked(server.decoder.model) as brake:
        check_answers_together(server, brake)


def test_a_fault_in_planning_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, planning_faults: list[str]
) -> None:
    def broken(*args: object) -> None:
        raise ValueError("math domain error")

    with running_server() as server, braked(server.decoder.model) as brake:
        monkeypatch.setattr(LiveCosts, "for_sequences", broken)  # after the server's first steps
        check_answers_together(server, brake)
    (line,) = planning_faults
    assert "planning drafts has failed (ValueError: math domain error, in " in line
    planning_faults.clear()


def test_a_fault_in_admission_ends_waiting_requests(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> bool:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(server.worker.models["small"].cache, "should_wait", broken)
        answer = post(server, TEXT, {"prompt": "Once"})
        assert (answer.status_code, error_of(answer)["type"]) == (500, "server_error")
    check_goes_on(server)


def test_a_fault_in_an_answer_is_reported_in_its_stream(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> Any:
        raise RuntimeError("a secret")

    with monkeypatch.context() as patch:
        patch.setattr(CompletionAnswer, "feed_choice", broken)
        streamed = post(server, TEXT, {"prompt": "Once", "stream": True})
        assert streamed.text.endswith("}\n\ndata: [DONE]\n\n")
        whole = post(server, TEXT, {"prompt": "Once"})
        assert whole.status_code == 500
        assert error_of(whole)["type"] == "server_error"
        assert whole.headers["Connection"] == "close"  # so the next request gets an answer
        assert "secret" not in streamed.text + whole.text
    wait_until(lambda: not server.worker.requests)
    check_goes_on(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_says_so_and_leaves_nothing(stream: bool) -> None:
    model, threads = served(), {*threading.enumerate()}
    with running_server(model) as server:
        prompt = [1, *range(500, 560)]
        with ThreadPoolExecutor() as pool:
            body = {"prompt": prompt, "max_tokens": 20_000, "stream": stream}
            running = pool.submit(post, server, TEXT, body)
            wait_until(lambda: server.worker.requests and only_request(server).stats.emitted)
            server.worker.stop()
            answer = running.result()
        if stream:
            *_, error, done, _ = answer.text.split("\n\n")
            assert "the server is shutting down" in error
            assert done == "data: [DONE]"
        else:
            assert answer.status_code == 503
        late = post(server, TEXT, {"prompt": "Once", "stream": stream})
        assert (late.status_code, error_of(late)["message"]) == (503, "the server is shutting down")
        assert HTTP.get(f"{server.address}/health").status_code == 503
    assert not server.worker.requests
    left = {*threading.enumerate()} - threads
    assert not [thread for thread in left if not thread.name.startswith("AnyIO")]  # it is idle
    assert model.cache.lend(prompt).length >= len(prompt)  # it was returned


def test_a_server_that_ends_does_not_process_a_long_prompt_to_its_end() -> None:
    with (
        running_server(served(prefill_step_size=64)) as server,
        braked(server.decoder.model) as brake,
        ThreadPoolExecutor() as pool,
    ):
        brake.seconds = 0.03
        asked = pool.submit(post, server, TEXT, {"prompt": LONG, "stream": True})
        wait_until(lambda: server.worker.requests and only_request(server).prefilled > 200)
        server.worker.stop()
        *_, error, done, _ = asked.result().text.split("\n\n")
        assert sum(brake.rows) < len(LONG) - 200
    assert "the server is shutting down" in error
    assert done == "data: [DONE]"


# --- too many requests ---


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    with (
        running_server(limits={"active": 1, "queued": 1}) as server,
        braked(server.decoder.model) as brake,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": "Once upon", "max_tokens": 4}
        with brake.holding():
            accepted = []
            for count in (1, 2):
                accepted.append(pool.submit(post, server, TEXT, body))
                wait_until(lambda count=count: len(server.worker.requests) == count)  # type: ignore[misc]
                wait_until(lambda: server.worker.requests[0].state != "queued")
            with pytest.raises(openai.RateLimitError) as refused:
                server.client().completions.create(model="small", **body)  # type: ignore[call-overload]
            assert refused.value.code == "queue_full"
            with pytest.raises(openai.BadRequestError, match="takes at most 2 at once"):
                server.client().completions.create(model="small", n=3, **body)  # type: ignore[call-overload]
            assert int(refused.value.response.headers["Retry-After"]) > 0
        for answer in accepted:
            assert answer.result().json()["choices"][0]["text"] == alone("Once upon", 4)
        check_goes_on(server)


def test_requests_wait_for_memory() -> None:
    model = served()
    prompts = ["a b", "c d", "e f", "g h", "i j"]
    (length,) = {len(model.decoder.tokenizer.encode(prompt)) for prompt in prompts}
    each = model.memory.needs(length + 16)
    memory = memory_with_room(model, int(2.5 * each.caches) + each.forward)
    with (
        running_server(model, memory=memory) as server,
        braked(model.decoder.model) as brake,
        ThreadPoolExecutor(8) as pool,
    ):
        at_once: set[int] = set()

        def look() -> None:
            running = [t for t in server.worker.requests if t.state != "queued"]
            at_once.add(len(running))

        brake.on_forward = look
        bodies = [{"prompt": prompt, "max_tokens": 16} for prompt in prompts]
        with brake.holding():
            answers = [pool.submit(post, server, TEXT, body) for body in bodies]
            wait_until(lambda: len(server.worker.requests) == len(bodies))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result().json()["choices"][0]["text"] == alone(prompt, 16)
        assert max(at_once) == 2
        cut = post(server, TEXT, {"prompt": "a b", "max_tokens": 30_000}).json()["choices"][0]
        assert cut["finish_reason"] == "length"
        assert cut["text"].startswith(alone("a b", 16))
        refused = post(server, TEXT, {"prompt": [5] * 30_000, "max_tokens": 30_000})
        assert (refused.status_code, error_of(refused)["code"]) == (413, "out_of_memory")
        assert "30000" in error_of(refused)["message"]
        assert in_words(memory.room) in error_of(refused)["message"]


# --- prefixes shared between requests ---


def cached_tokens(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_of_ten_turns_runs_each_token_once(server: Running, brake: Brake) -> None:
    """The model's forwards and ``cached_tokens`` both show it."""
    messages: list[Any] = []
    before = n_prompts = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"The tool returns {turn}: " + "x y z " * 20})
        brake.rows.clear()
        answer = post(server, CHAT, {"messages": messages, "max_tokens": 1})
        usage = answer.json()["usage"]
        ran = usage["prompt_tokens"] - cached_tokens(answer)
        assert sum(brake.rows) in (ran, ran + 1)  # the last step may run ahead
        assert cached_tokens(answer) >= before - 1
        before = usage["prompt_tokens"]
        n_prompts += ran
        text = answer.json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
    assert n_prompts <= before + 10


@pytest.mark.parametrize("at_once", [False, True])
def test_two_agents_share_their_system_prompt(server: Running, brake: Brake, at_once: bool) -> None:
    system = {"role": "system", "content": f"You are agent {at_once}. " + "Use the tools. " * 40}
    both = [[system, {"role": "user", "content": text}] for text in ("Write a test.", "Read it.")]
    tokenizer = server.decoder.tokenizer
    first, second = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True) for messages in both
    ]
    common = next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert common > 200
    bodies = [{"messages": messages, "max_tokens": 1} for messages in both]
    with ThreadPoolExecutor() as pool:
        if at_once:
            with brake.holding():
                waiting = [pool.submit(post, server, CHAT, body) for body in bodies]
                wait_until(lambda: len(server.worker.requests) == 2)
            answers = [answer.result() for answer in waiting]
        else:
            answers = [post(server, CHAT, body) for body in bodies]
    assert max(map(cached_tokens, answers)) == common
    ran = len(first) + len(second) - common
    assert ran <= sum(brake.rows) <= ran + 2
