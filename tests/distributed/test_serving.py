"""A server split over two or three ranks gives the answers of one process."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxspec import Constraint
from mlxspec.generation.decoder import Decoder
from tests.distributed.conftest import SECONDS, launched
from tests.support.examples import LONG

pytestmark = pytest.mark.slow

REQUESTS = 200 if LONG else 12
ENDLESS: dict[str, Any] = {"prompt": [1, *range(300, 310)], "max_tokens": 4000, "temperature": 0}
WORDS = {"type": "string", "pattern": "^[a-z]{2,9}( [a-z]{2,9}){0,3}$"}


class Serving:
    """A running server of several ranks.

    Attributes:
        launcher: its ``mlx.launch`` process.
        address: its URL.
        lines: the ranks' standard error.
    """

    def __init__(self, launcher: subprocess.Popen[str], folder: Path) -> None:
        self.launcher, self._folder = launcher, folder
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._ready.wait(SECONDS), self.lines

    def _read(self) -> None:
        assert self.launcher.stderr
        for line in self.launcher.stderr:
            self.lines.append(line)
            if address := re.search(r"address +(http://\S+)", line):
                self.address = address[1]
                self._ready.set()

    def post(self, path: str = "completions", **body: Any) -> httpx.Response:
        """Send a request; return the answer."""
        return httpx.post(f"{self.address}/v1/{path}", json=body, timeout=SECONDS)

    def cancel(self, path: str, **body: Any) -> int:
        """Disconnect when a streamed answer begins; return its status."""
        url, body = f"{self.address}/v1/{path}", {**body, "stream": True, "max_tokens": 500}
        with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
            next(answer.iter_bytes())
            return answer.status_code

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(int((self._folder / f"rank {rank}").read_text()), number)

    def errors(self) -> str:
        """Wait until all ranks have ended; return their standard error."""
        self.launcher.wait(SECONDS)
        self._reading.join(SECONDS)
        return "".join(self.lines)


@contextmanager
def serving(model: Path, folder: Path, n: int) -> Iterator[Serving]:
    """Run a server of ``n`` ranks."""
    command = ("serve", "--model", str(model), "--port", "0", "--no-saved-answers")
    script = ("-m", "tests.support.command", str(folder))
    try:
        with launched(*script, *command, n=n) as launcher:
            yield Serving(launcher, folder)
    finally:  # ranks survive a killed launcher
        for file in folder.glob("rank *"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def asked(number: int) -> dict[str, Any]:
    """Return a random request to one of the APIs; some share a prefix."""
    pick = random.Random(number)
    body: dict[str, Any] = {"max_tokens": pick.randint(1, 24), "temperature": 0}
    path = pick.choice(["completions", "completions", "chat/completions", "messages"])
    if path == "completions":
        start = range(300, 300 + pick.choice([6, 60, 60]))
        body["prompt"] = [1, *start, *range(300, 300 + pick.randint(1, 9))]
        if pick.random() < 0.4:
            body["response_format"] = {"type": "json_schema", "schema": WORDS}
    else:
        body["messages"] = [{"role": "user", "content": "a red fox " * pick.randint(1, 20)}]
    if path != "messages" and pick.random() < 0.3:  # Anthropic's API has no seed
        body |= {"temperature": 0.3, "top_p": 0.9, "seed": number}
    return {"path": path, **body}


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer of any of the APIs."""
    (said,) = answer.get("choices") or answer["content"]
    text: str = said["message"]["content"] if "message" in said else said["text"]
    return text


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("n", "kind"),
    [
        (2, "small_model"),
        (2, "small_hybrid"),
        *([(3, "small_model"), (3, "small_hybrid")] if LONG else []),
    ],
)
def test_requests_at_once_get_what_one_process_generates(
    n: int, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every fourth request is also cancelled at its first token. A hybrid model runs as a pipeline.

    Then the server is terminated, without an error of any rank.
    """
    model: Path = request.getfixturevalue(kind)
    bodies = [asked(number) for number in range(REQUESTS)]
    with serving(model, tmp_path, n) as server, ThreadPoolExecutor(100) as clients:
        cancelled = [clients.submit(server.cancel, **body) for body in bodies[::4]]
        found = [*clients.map(lambda body: server.post(**body), bodies)]
        assert all(future.result() == 200 for future in cancelled)
        server.signal(0, signal.SIGTERM)  # which ends all ranks
        assert "Error" not in server.errors()
    texts = [text_of(response.json()) for response in found]
    decoder = Decoder(model)
    differing = [
        (body, text, one_process)
        for body, text in zip(bodies, texts, strict=True)
        if text != (one_process := alone(decoder, **body))
    ]
    print(*differing, sep="\n")
    assert len(differing) <= 1  # at a near tie: the ranks' sums round differently


def alone(decoder: Decoder, path: str, max_tokens: int, **fields: Any) -> str:
    """Return plain decoding's output; a chat's answer has no leading space."""
    prompt = fields.pop("prompt", None) or fields.pop("messages")
    sampling: dict[str, Any] = {"temp": fields.pop("temperature")}
    if format := fields.pop("response_format", None):
        sampling["constraint"] = Constraint.json_schema(format["schema"])
    text = "".join(one.text for one in decoder.stream(prompt, max_tokens, **sampling, **fields))
    return text if path == "completions" else text.removeprefix(" ")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("n", "rank", "end", "kind"),
    [
        (2, 1, signal.SIGKILL, "small_model"),
        (2, 1, signal.SIGSTOP, "small_model"),
        *((3, rank, signal.SIGKILL, "small_model") for rank in (1, 2) if LONG),
        *((n, n - 1, signal.SIGKILL, "small_hybrid") for n in (2, 3) if LONG),
    ],
)
def test_requests_get_an_error_if_a_rank_dies_or_hangs(
    n: int,
    rank: int,
    end: signal.Signals,
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    what = "is gone" if end is signal.SIGKILL else "has been silent for 5 seconds"
    model: Path = request.getfixturevalue(kind)
    monkeypatch.setenv("TEST_SECONDS_SILENT", "5")
    with serving(model, tmp_path, n) as server, ThreadPoolExecutor(4) as clients:
        running = [clients.submit(server.post, **ENDLESS) for _ in range(4)]
        assert server.post(**{**ENDLESS, "max_tokens": 2}).status_code == 200
        server.signal(rank, end)
        line = f"rank {rank} {what}, so rank 0 ends, too"
        for response in running:
            assert response.result(SECONDS).status_code == 503
            assert line in response.result().json()["error"]["message"]
        if end is signal.SIGSTOP:
            server.signal(rank, signal.SIGKILL)  # otherwise mlx.launch would wait for it
        assert f"Error: {line}" in server.errors()
        assert server.errors().count("Error") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("n", [2, 3] if LONG else [2])
def test_a_server_without_its_first_rank_ends(n: int, small_model: Path, tmp_path: Path) -> None:
    with serving(small_model, tmp_path, n) as server, ThreadPoolExecutor(4) as clients:
        running = [clients.submit(server.post, **ENDLESS) for _ in range(4)]
        assert server.post(**{**ENDLESS, "max_tokens": 2}).status_code == 200
        server.signal(0, signal.SIGKILL)
        assert all(isinstance(one.exception(SECONDS), httpx.TransportError) for one in running)
        for rank in range(1, n):
            line = f"Error: rank 0 is gone, so rank {rank} ends, too"
            assert server.errors().count(line) == 1
