"""How long a start takes until its first token, beside mlx-lm's.

python benchmarks/first_token.py [MODEL] [--times 5] [--server] [--parts]

Each start is a process of its own, in turns: ``mlx_lm generate``, ``mlxspec generate`` with an
empty cache directory, and again with what that start has kept. With ``--server``, the time is that
from the start of the server to its first answer. With ``--parts``, the parts of one start are
timed instead. MODEL is a directory; by default, that in ``MLXSPEC_REAL_MODEL``. On Linux, mlx-lm
gets the BLAS that mlxspec loads by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PROMPT = "Write a Python function that adds two numbers."


def blas() -> dict[str, str]:
    """The environment in which mlx-lm has mlxspec's BLAS."""
    package = find_spec("scipy_openblas32")
    if sys.platform != "linux" or package is None or package.origin is None:
        return {}
    library = Path(package.origin).parent / "lib" / "libopenblas_python.so"
    return {"LD_PRELOAD": str(library), "OPENBLAS_THREAD_TIMEOUT": "16"}


def generated(command: list[str], environment: dict[str, str]) -> float:
    """The seconds of a command."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return time.perf_counter() - started


def served(command: list[str], environment: dict[str, str], model: str) -> float:
    """The seconds from a server's start to its first answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", *command, "--port", str(port)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    request = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1})
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port)
                header = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", request, header)
                response = connection.getresponse()
                response.read()
                if response.status == 200:
                    return time.perf_counter() - started
            time.sleep(0.02)
        raise SystemExit(f"{command} ended with the exit status {server.returncode}")
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def directories() -> Iterator[dict[str, str]]:
    """Empty directories for all that mlxspec keeps."""
    with tempfile.TemporaryDirectory() as directory:
        yield {f"MLXSPEC_{kind}_DIR": f"{directory}/{kind}" for kind in ("CACHE", "DATA", "CONFIG")}


def starts(model: str, times: int, server: bool) -> None:
    """Print the times of each kind of start, and how far they are from mlx-lm's."""
    theirs, ours = (
        (["mlx_lm", "server", "--model", model], ["mlxspec", "serve", model])
        if server
        else (
            ["mlx_lm", "generate", "--model", model, "--max-tokens", "1", "--prompt", PROMPT],
            ["mlxspec", "generate", "-m", model, "--max-tokens", "1", PROMPT],
        )
    )

    def run(command: list[str], environment: dict[str, str]) -> float:
        return served(command, environment, model) if server else generated(command, environment)

    found: dict[str, list[float]] = {"mlx-lm": [], "first": [], "second": []}
    run(theirs, blas())  # so that all starts find the files in memory
    for _ in range(times):
        found["mlx-lm"].append(run(theirs, blas()))
        with directories() as kept:
            found["first"].append(run(ours, kept))
            found["second"].append(run(ours, kept))
    usual = statistics.median(found["mlx-lm"])
    for kind, seconds in found.items():
        middle = statistics.median(seconds)
        every = " ".join(f"{one:.2f}" for one in sorted(seconds))
        print(f"{kind:8} {middle:6.2f} s  {middle - usual:+6.2f} s   ({every})")


_PARTS = """
import sys, time

parts, began = {}, time.perf_counter()

def part(name):
    global began
    parts[name], began = time.perf_counter() - began, time.perf_counter()

import mlxspec
from mlxspec.generation.decoder import AutoDecoder
part("import")
model, tokenizer = mlxspec.load(sys.argv[1])
part("load")
decoder = AutoDecoder(model, tokenizer)
decoder.loaded.chain_capability, decoder.loaded.capability
part("capability")
decoder.loaded.joint_mode
part("joint mode")
decoder.costs
part("costs")
decoder.token_classes
part("token classes")
for _ in decoder.stream(sys.argv[2], 1):
    pass
part("first token")
for _ in decoder.stream(sys.argv[2], 9):
    pass
part("9 tokens more, prompt included")
for name, seconds in parts.items():
    print(f"  {name:32} {seconds:6.2f} s")
"""


def parts(model: str) -> None:
    """Print the parts of a first start and of the next one."""
    with directories() as kept:
        for kind in ("first", "second"):
            print(kind, flush=True)
            command = [sys.executable, "-c", _PARTS, model, PROMPT]
            subprocess.run(command, env={**os.environ, **kept}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=os.environ.get("MLXSPEC_REAL_MODEL"))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--parts", action="store_true")
    asked = parser.parse_args()
    if asked.model is None:
        parser.error("name a model's directory, or set MLXSPEC_REAL_MODEL")
    if asked.parts:
        parts(asked.model)
    else:
        starts(asked.model, asked.times, asked.server)


if __name__ == "__main__":
    main()
