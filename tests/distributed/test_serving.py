"""A server whose model is split over two or three ranks answers as one process does."""

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
LONG_ONLY = pytest.mark.skipif(not LONG, reason="three ranks serve in the long form")

REQUESTS = 200 if LONG else 60
REGEX = "[a-z]{2,9}( [a-z]{2,9}){0,3}"


class Serving:
    """A server of some ranks.

    Attributes:
        launcher: its ``mlx.launch``.
        address: where it answers.
        lines: what the ranks have written to standard error.
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

    def post(self, **body: Any) -> httpx.Response:
        """The answer to a request for a completion."""
        return httpx.post(f"{self.address}/v1/completions", json=body, timeout=SECONDS)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(int((self._folder / f"rank {rank}").read_text()), number)

    def errors(self) -> str:
        """What the ranks have written, once all have ended."""
        self.launcher.wait(SECONDS)
        self._reading.join(SECONDS)
        return "".join(self.lines)


@contextmanager
def serving(model: Path, folder: Path, n: int) -> Iterator[Serving]:
    """A server of ``n`` ranks that answers, for up to 200 requests at once."""
    command = ("serve", "--model", str(model), "--port", "0", "--no-memory", "--queue", "200")
    script = ("-m", "tests.support.command", str(folder))
    with launched(*script, *command, folder=folder, n=n) as launcher:
        try:
            yield Serving(launcher, folder)
        finally:  # mlx.launch does not end them if it is killed
            for rank in folder.glob("rank *"):
                with suppress(ProcessLookupError):
                    os.kill(int(rank.read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def decoder(small_model: Path) -> Decoder:
    """Decodes in this process."""
    return Decoder(small_model)


def asked(number: int) -> dict[str, Any]:
    """A random request, some of which begin alike."""
    pick = random.Random(number)
    prompt = [1, *range(300, 300 + pick.choice([6, 60, 60])), *range(300, 300 + pick.randint(1, 9))]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": pick.randint(1, 24), "temperature": 0}
    if pick.random() < 0.3:
        body |= {"temperature": 0.3, "top_p": 0.9, "seed": number}
    if pick.random() < 0.2:
        body["guided_regex"] = REGEX
    return body


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=LONG_ONLY)])
def test_requests_at_once_get_what_one_process_generates(
    n: int, small_model: Path, decoder: Decoder, tmp_path: Path
) -> None:
    bodies = [asked(number) for number in range(REQUESTS)]
    with serving(small_model, tmp_path, n) as server, ThreadPoolExecutor(REQUESTS) as clients:
        found = [*clients.map(lambda body: server.post(**body), bodies)]
    texts = [response.json()["choices"][0]["text"] for response in found]
    differing = [
        (body, text, one_process)
        for body, text in zip(bodies, texts, strict=True)
        if text != (one_process := alone(decoder, **body))
    ]
    print(*differing, sep="\n")
    assert len(differing) <= 1  # at a near tie, since the ranks' sums have other rounding


def alone(decoder: Decoder, prompt: list[int], max_tokens: int, **fields: Any) -> str:
    """What plain decoding writes."""
    sampling: dict[str, Any] = {"temp": fields.pop("temperature")}
    if "guided_regex" in fields:
        sampling["constraint"] = Constraint.regex(fields.pop("guided_regex"))
    return "".join(one.text for one in decoder.stream(prompt, max_tokens, **sampling, **fields))


@pytest.mark.parametrize(
    ("n", "rank", "end", "what"),
    [
        (2, 1, signal.SIGKILL, "is gone"),
        (3, 2, signal.SIGKILL, "is gone"),
        (2, 1, signal.SIGSTOP, "has been silent for 5 seconds"),
    ],
)
def test_requests_get_an_error_if_a_rank_dies_or_hangs(
    n: int,
    rank: int,
    end: signal.Signals,
    what: str,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_SECONDS_SILENT", "5")
    endless = {"prompt": [1, *range(300, 310)], "max_tokens": 4000, "temperature": 0}
    with serving(small_model, tmp_path, n) as server, ThreadPoolExecutor(4) as clients:
        running = [clients.submit(server.post, **endless) for _ in range(4)]
        assert server.post(**{**endless, "max_tokens": 2}).status_code == 200
        server.signal(rank, end)
        line = f"rank {rank} {what}, so rank 0 ends, too"
        for response in running:
            assert response.result(SECONDS).status_code == 503
            assert line in response.result().json()["error"]["message"]
        if end is signal.SIGSTOP:
            server.signal(rank, signal.SIGKILL)  # or mlx.launch would wait for it
        assert server.errors().count(f"Error: {line}") == 1


def test_a_server_without_its_first_rank_ends(small_model: Path, tmp_path: Path) -> None:
    with serving(small_model, tmp_path, 2) as server:
        server.signal(0, signal.SIGKILL)
        assert server.errors().count("Error: rank 0 is gone, so rank 1 ends, too") == 1


def test_a_server_that_is_asked_to_ends_with_all_its_ranks(
    small_model: Path, tmp_path: Path
) -> None:
    with serving(small_model, tmp_path, 2) as server:
        server.signal(0, signal.SIGTERM)
        assert "Error" not in server.errors()
