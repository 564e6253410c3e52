"""Servers in separate processes, for the benchmarks of servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

_START_SECONDS = 600  # to wait for a server's first answer
_END_SECONDS = 60
_LOG_LINES = 30  # to show of a failed server

MLXSPEC = "from mlxspec.__main__ import main; main()"
"""The code that runs the ``mlxspec`` command."""


@dataclass
class Server:
    """A running server.

    Attributes:
        address: of its root, without a slash at the end.
        process: the server.
    """

    address: str
    process: subprocess.Popen[bytes]
    _log: IO[bytes]

    @property
    def place(self) -> tuple[str, int]:
        """The server's host and port."""
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def log(self) -> str:
        """The server's log so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    @property
    def resident(self) -> float:
        """The memory of its process and of the processes that it has started, in MiB."""
        command = ["ps", "-A", "-o", "pid=,ppid=,rss="]
        lines = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
        rows = [(int(pid), int(parent), int(rss)) for pid, parent, rss in map(bytes.split, lines)]
        family: set[int] = set()
        found = {self.process.pid}
        while found:
            family |= found
            found = {pid for pid, parent, _ in rows if parent in found}
        return sum(rss for pid, _, rss in rows if pid in family) / 1024


@contextmanager
def server(code: str, *arguments: str, openblas: bool = True) -> Iterator[Server]:
    """A server at a free port of this machine, until the end of the block.

    Args:
        code: Python code that runs a command line.
        arguments: the arguments of the command line; the port is appended.
        openblas: whether MLX's CPU back end uses OpenBLAS instead of the BLAS of its wheel.
    """
    port = free_port()
    environment = {**os.environ, "MLXSPEC_OPENBLAS": str(int(openblas))}
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-c", code, *arguments, "--port", str(port)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        running = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            _wait_until_it_answers(running)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def _wait_until_it_answers(running: Server) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and running.process.poll() is None:
        try:
            httpx.get(f"{running.address}/health", timeout=5).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    log = "\n".join(running.log.splitlines()[-_LOG_LINES:])
    raise SystemExit(f"the server does not answer; it has written:\n{log}")


def event_in(line: bytes) -> Any:
    """The object in a line of server-sent events, or None."""
    content = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or content == b"[DONE]":
        return None
    return json.loads(content)


def copy_with_tools(model: Path, directory: Path) -> Path:
    """Copy a model and give it a chat template with tools and all roles of a chat."""
    import shutil

    sys.path.append(str(Path(__file__).parents[1]))  # where the tests are
    from tests.support.chat_tokenizer import CHATML

    shutil.copytree(model, directory)
    path = directory / "tokenizer_config.json"
    # mlx-lm recognises the format of tool calls by the name in the comment.
    template = "{#- tool_call.name -#}\n" + CHATML
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return directory


def float32_copy(model: Path, directory: Path) -> Path:
    """Write a model with float32 weights, since a CPU emulates half precision slowly."""
    import shutil

    import mlx.core as mx

    shutil.copytree(model, directory)
    for path in directory.glob("*.safetensors"):
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        weights = {name: w.astype(mx.float32) for name, w in loaded.items()}
        mx.eval(weights)
        mx.save_safetensors(str(path), weights, {"format": "mlx"})
    return directory
