"""``mlxspec serve`` as a process: how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue

import httpx
import pytest

from mlxspec.cli.serve import _listening
from tests.support import command_line
from tests.support.brake import wait_until
from tests.support.scripted_model import write_scripted_model

pytestmark = pytest.mark.slow

ROUND = ("one", " two", " three", " four", "\n")
SECONDS = 60  # seconds to start or end, on a busy machine


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats the line "one two three four" without end."""
    return write_scripted_model(tmp_path_factory.mktemp("serve") / "endless", ROUND)


class Process:
    """A server process.

    Attributes:
        address: its URL.
        at: its host and port, for sockets.
        lines: its standard error since it was ready.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: Queue[str] = Queue()
        self._found = threading.Event()
        self.address = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        assert self._found.wait(SECONDS)
        self.at = "127.0.0.1", int(self.address.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            if address := re.search(r"address +(http://\S+)", line):
                self.address = address[1]
                self._found.set()
            self.lines.put(line)

    def wait_for_line(self, text: str) -> None:
        while text not in self.lines.get(timeout=SECONDS):
            pass

    def rest(self) -> list[str]:
        """Wait for the end of the process; return the unread lines."""
        self._reading.join(SECONDS)
        return [self.lines.get() for _ in range(self.lines.qsize())]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process; return its exit status."""
        return self.process.wait(SECONDS)


@contextmanager
def serving(model: Path, *arguments: str, grace: float = 10.0) -> Iterator[Process]:
    """Run a server; at the end of the block, kill it if it still runs.

    Args:
        model: the model to serve.
        arguments: further arguments.
        grace: seconds for running requests to end.
    """
    command = f"from mlxspec.cli import serve; serve._GRACE = {grace}"
    command += "; from mlxspec.__main__ import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", "--model", str(model), "--port", "0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
        text=True,
    )
    try:
        yield Process(process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def stream_of(server: Process, max_tokens: int) -> Iterator[Iterator[str]]:
    """Start a streamed answer; return its lines after the first has arrived."""
    body = {"prompt": "one", "max_tokens": max_tokens, "stream": True}
    url = f"{server.address}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=SECONDS) as answer:
        lines = answer.iter_lines()
        assert "text" in next(lines)
        yield lines


def test_what_is_sent_does_not_wait_for_more() -> None:
    with (
        _listening("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def listens(server: Process) -> bool:
    try:
        httpx.get(f"{server.address}/health")
    except httpx.ConnectError:
        return False
    except httpx.TransportError:
        pass  # it was about to exit
    return True


def test_ctrl_c_lets_running_requests_end(endless: Path) -> None:
    with serving(endless, grace=600) as server:
        with stream_of(server, 600) as lines:
            server.signal(signal.SIGINT)
            server.wait_for_line("600 s for running requests to end")
            wait_until(lambda: not listens(server))
            rest = [line for line in lines if line]
        assert '"finish_reason": "length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_them(endless: Path, number: int) -> None:
    with serving(endless, grace=600) as server, stream_of(server, 900_000) as lines:
        server.signal(number)
        server.wait_for_line("Ctrl-C again")
        assert "text" in "".join(next(lines) for _ in range(3))
        server.signal(number)
        assert server.wait() == 0
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)


def test_after_the_grace_a_stream_ends_with_an_error(endless: Path) -> None:
    with serving(endless, grace=0.2) as server, stream_of(server, 900_000) as lines:
        server.signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert '"the server is shutting down"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0


BODY = json.dumps({"prompt": "one", "max_tokens": 900_000, "stream": True})
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(BODY)}\r\n\r\n"


HOLDING_UP = {
    "silent": "",
    "half a head": HEAD[:40],
    "no body": HEAD,
    "half a body": HEAD + BODY[:20],
    "never reads": HEAD + BODY,
}
"""What clients send that could hold up the end. The last one is answered."""


def test_no_client_delays_the_end_and_prefixes_are_kept(endless: Path, tmp_path: Path) -> None:
    """systemd and Docker end servers like this. The next server reads the prefixes."""
    known, count = terminated(endless, tmp_path / "kept", [*HOLDING_UP.values()])
    assert known == 0
    known, _ = terminated(endless, tmp_path / "kept", [])
    assert known == count - 1


def terminated(model: Path, kept: Path, clients: list[str]) -> tuple[int, int]:
    """Terminate a server with these clients.

    Returns:
        how many tokens of a first prompt the server knew, and how many there are.
    """
    body = {"prompt": "one two three four\n" * 20, "max_tokens": 4}
    with serving(model, "--cache-dir", str(kept), grace=0.5) as server, ExitStack() as held:
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=SECONDS)
        usage = answer.json()["usage"]
        for sent in clients:
            client = held.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(server.at)
            client.sendall(sent.encode())
        wait_until(lambda: running(server) == bool(clients))
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not any("Traceback" in line for line in server.rest())
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def running(server: Process) -> int:
    """Return the number of running generations."""
    return len(httpx.get(f"{server.address}/status", timeout=SECONDS).json()["requests"])


SLOWLY = """
import time
from mlxspec.cli import serve

def load(*_):
    print("loads", flush=True)
    time.sleep(600)

serve._Loader.load = load
"""
"""Code that makes a load take ten minutes and that no signal interrupts."""


@contextmanager
def loading(model: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A server that has started to load its model, which takes ten minutes."""
    command = f"{SLOWLY}\nfrom mlxspec.__main__ import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, "serve", str(model), "--port", str(port), "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "loads\n"
            yield process
        finally:
            process.kill()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_loads_ends_the_server_at_once(endless: Path, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with loading(endless, port) as process:
        address = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{address}/health").json() == {"status": "loading"}
        with httpx.Client() as client, ThreadPoolExecutor() as threads:
            body = {"prompt": "one", "stream": True}
            waiting = threads.submit(client.post, f"{address}/v1/completions", json=body)
            process.send_signal(number)
            assert process.wait(SECONDS) == 130
            with pytest.raises(httpx.TransportError):
                waiting.result(SECONDS)


def test_a_load_that_fails_ends_the_server_with_one_line(endless: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(endless, broken)
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    done = command_line.run("serve", broken, "--port", 0, "-q")
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(
        rf"Error: {re.escape(str(broken))}[^\n]* truncated or damaged.*\n", done.stderr
    )
