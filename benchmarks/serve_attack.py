"""Attack `mlxspec serve` with thousands of mutated requests, none of which may do harm.

    python benchmarks/serve_attack.py [--bodies N] [--seed SEED]
    python benchmarks/serve_attack.py --only SEED [SEED ...]

The server has the demo model, in float32, since a CPU emulates half precision slowly, and a copy
with tools. Each request is made from its own seed (`attacks.py`): valid bodies of all endpoints
with fields of other types, hostile values, schemas and grammars; invalid JSON and HTTP; large
bodies; clients that disconnect. Meanwhile, one process keeps a core busy, and another one requests
/health every 50 ms.

Exits with 1 if a request got a 5xx, no answer or a wrong one; if the server crashed or wrote a
traceback; if /health took longer than 250 ms; or if the server's memory grew by more than 150 MiB.
After a crash, the seeds in progress are printed, and the rest go to a new server. `--only` sends
some seeds again, one after the other, and shows requests and answers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import httpx
from attacks import RESPONSES, Attack, Kept, attack, right_bodies
from servers import MLXSPEC, Server, copy_with_tools, float32_copy, server

from mlxspec.models.model_files import DEMO_DIRECTORY

_CLIENTS = 6
_ANSWER_SECONDS = 60.0  # the longest wait for an answer
_PATIENCE = 1.0  # seconds to wait for an answer to an invalid request
_REST_SECONDS = 30.0  # to wait for memory to be freed
_MOST_HEALTH = 0.25  # seconds
_MOST_GROWTH = 150.0  # MiB
_LONGEST_ERROR = 4000  # bytes
_SHOWN = 200  # bytes of a request and of its answer
_SHOWN_OF_A_KIND = 5  # faults that differ only in figures
_LONGEST_LINE = 4000  # characters of the server's log

_PROBE = """
import asyncio, sys, time
async def ask(planned):
    late = time.monotonic() - planned
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
        writer.write(b"GET /health HTTP/1.0\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
        status = (await reader.read())[9:12].decode() or "no answer"
        writer.close()
    except OSError as error:
        status = type(error).__name__
    print(planned, late, time.monotonic() - planned - late, status.replace(" ", "-"), flush=True)
async def main():
    planned, asking = time.monotonic(), set()
    while True:
        task = asyncio.create_task(ask(planned))
        asking.add(task)
        task.add_done_callback(asking.discard)
        planned += 0.05
        await asyncio.sleep(max(0, planned - time.monotonic()))
asyncio.run(main())
"""
"""Requests /health every 50 ms, whether the last answer has arrived or not."""

_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


_CUT = "cut"  # the connection was closed


class Reply(NamedTuple):
    """A client's result; without an answer the status is 0, and the type may be _CUT."""

    status: int
    type: str
    body: bytes


class Done(NamedTuple):
    """A finished request."""

    seed: int
    kind: str
    path: str
    size: int
    status: int
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    def __str__(self) -> str:
        where = self.path[:40] or "no path"
        return f"seed {self.seed} ({self.kind}, {where}, {self.size:,} bytes, {self.seconds:.1f} s)"


class Look(NamedTuple):
    """An answer of /health."""

    began: float
    late: float
    seconds: float
    status: str


@dataclass
class Siege:
    """The attack, over one server or several.

    Attributes:
        seeds: the remaining seeds.
        tells: whether to show requests and answers.
        done: the finished requests.
        faults: the faults and how often they occurred; figures are replaced by N.
        looks: the answers of /health.
        memory: per server, MiB at the start, at most, and at the end.
    """

    seeds: queue.SimpleQueue[int]
    tells: bool = False
    done: list[Done] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    looks: list[Look] = field(default_factory=list)
    memory: list[tuple[float, float, float]] = field(default_factory=list)

    def fail(self, what: str, where: str = "", shown: str = "") -> None:
        """Count a fault and print it, unless enough of its kind have been printed."""
        self.faults[kind := re.sub(r"\d[\d,.]*", "N", what)] += 1
        if self.faults[kind] <= _SHOWN_OF_A_KIND or self.tells:
            print(f"  WRONG: {where}{what}{shown}", flush=True)

    def of(self, running: Server, clients: int, busy: int) -> None:
        """Attack a server until all seeds are used or it has crashed."""
        kept = warmed_up(running)
        start = most = running.resident
        flying: dict[int, Attack] = {}
        threads = [
            threading.Thread(target=self._client, args=(running, kept, flying, number))
            for number in range(clients)
        ]
        with beside(running, busy) as looks:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                most = max(most, running.resident)
                threads[0].join(0.5)
            if crashed := running.process.poll() is not None:
                seeds = " ".join(str(one.seed) for one in flying.values())
                status = running.process.returncode
                self.fail(
                    f"the server crashed with status {status}",
                    f"at one of the seeds {seeds}: ",
                    f"; it had written:\n{running.log[-_SHOWN:]}",
                )
            else:
                self._rest(running, start, most)
        self.looks += [look for look in looks() if not crashed or look.status == "200"]
        self._read_log(running.log)

    def _client(self, running: Server, kept: Kept, flying: dict[int, Attack], number: int) -> None:
        with suppress(queue.Empty):
            while running.process.poll() is None:
                one = flying[number] = attack(self.seeds.get_nowait(), kept)
                began = time.monotonic()
                reply = exchange(running, one)
                seconds = time.monotonic() - began
                if reply.type == _CUT and _has_ended(running):
                    return
                size = len(one.data)
                done = Done(one.seed, one.kind, one.path, size, reply.status, began, seconds)
                self.done.append(done)
                shown = f"{_short(one.data)}\n    {reply.status} {_short(reply.body)}"
                if self.tells:
                    print(f"{done}\n    {shown}", flush=True)
                for wrong in faults_of(one, reply):
                    self.fail(wrong, f"{done}: ", f"\n    {shown}")
                del flying[number]

    def _rest(self, running: Server, start: float, most: float) -> None:
        """Wait until the server is idle and has freed its memory."""
        deadline = time.monotonic() + _REST_SECONDS
        while time.monotonic() < deadline:
            left = httpx.get(f"{running.address}/status", timeout=_ANSWER_SECONDS).json()
            end = running.resident
            if not left["requests"] and end <= start + _MOST_GROWTH:
                break
            time.sleep(1)
        self.memory.append((start, most, end))
        if left["requests"]:
            self.fail(f"{len(left['requests'])} requests are left though no client is")
        if end > start + _MOST_GROWTH:
            self.fail(f"the server's memory was {start:.0f} MiB, and is {end:.0f} in the end")

    def _read_log(self, log: str) -> None:
        """Look for tracebacks, panics, and lines that clients have made long."""
        ends = re.findall(r"^Traceback.*\n(?:[ \t].*\n|\n)*(.*)|^(.*panicked at.*)", log, re.M)
        for end, count in Counter(filter(None, (one or other for one, other in ends))).items():
            self.fail(f"{count} times in the server's log: {end[:_SHOWN]}")
        longest = max(map(len, log.splitlines()), default=0)
        if longest > _LONGEST_LINE:
            self.fail(f"the server's log has a line of {longest:,} characters")

    def tell(self) -> None:
        """Print the results and judge /health."""
        print("kind            sent     2xx     4xx   5xx   none   longest")
        for kind, count in Counter(one.kind for one in self.done).most_common():
            ours = [one for one in self.done if one.kind == kind]
            classes = Counter(one.status // 100 for one in ours)
            print(
                f"{kind:12} {count:7} {classes[2]:7} {classes[4]:7} {classes[5]:5} {classes[0]:6} "
                f"{max(one.seconds for one in ours):7.1f} s"
            )
        for start, most, end in self.memory:
            print(f"memory: {start:.0f} MiB at the start, {most:.0f} at most, {end:.0f} in the end")
        self._tell_of_health()
        print(*(f"{count:7} times: {kind}" for kind, count in self.faults.most_common()), sep="\n")
        print(f"{self.faults.total()} faults")

    def _tell_of_health(self) -> None:
        looks = [look for look in self.looks if look.status == "200"]
        if others := [look for look in self.looks if look.status != "200"]:
            self.fail(f"/health {len(others)} times: {Counter(look.status for look in others)}")
        if not looks:
            return
        seconds = sorted(look.seconds for look in looks)
        print(
            f"/health: {len(looks)} looks, 99 % within "
            f"{seconds[math.ceil(len(seconds) * 0.99) - 1] * 1000:.0f} ms, the slowest in "
            f"{seconds[-1] * 1000:.0f} ms (whoever looked was late by "
            f"{max(look.late for look in looks) * 1000:.0f} ms at most)"
        )
        for began, ended, most in sorted(waits(looks), key=lambda wait: -wait[2]):
            beside = [one for one in self.done if one.began < ended and one.ended > began]
            largest = sorted(beside, key=lambda one: -one.size)[:3]
            told = "; ".join(map(str, largest)) or "nothing"
            self.fail(f"/health took {most:.2f} s", shown=f", beside {told}")


def waits(looks: Sequence[Look]) -> Iterator[tuple[float, float, float]]:
    """The periods in which /health was too slow: beginning, end, and longest answer."""
    slow = sorted(look for look in looks if look.seconds > _MOST_HEALTH)
    while slow:
        began, ended, most = slow[0].began, slow[0].began + slow[0].seconds, slow[0].seconds
        while slow and slow[0].began <= ended:
            most = max(most, slow[0].seconds)
            ended = max(ended, slow[0].began + slow.pop(0).seconds)
        yield began, ended, most


# --- one request ---


def exchange(running: Server, one: Attack) -> Reply:
    """Send a request on a connection of its own; return the result."""
    patience = _ANSWER_SECONDS if one.sound or one.leaves is not None else _PATIENCE
    method = one.data.partition(b" ")[0].decode("latin-1")
    try:
        with socket.create_connection(running.place, timeout=patience) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered already
                connection.sendall(one.data)
            if one.leaves is not None:
                return Reply(0, "", connection.recv(one.leaves) if one.leaves else b"")
            with http.client.HTTPResponse(connection, method=method) as response:
                response.begin()
                kind = response.headers.get("Content-Type", "")
                return Reply(response.status, kind, response.read())
    except TimeoutError:
        return Reply(0, "", b"none in time")
    except (OSError, http.client.HTTPException) as error:
        return Reply(0, _CUT, f"{type(error).__name__}: {error}".encode())


def faults_of(one: Attack, reply: Reply) -> Iterator[str]:
    """What is wrong with an answer."""
    if reply.status == 0:
        if one.sound:
            yield "no answer"
        return
    if reply.status >= 500:
        yield f"status {reply.status}"
    elif re.search(rb'"type": ?"(server|api)_error"', reply.body):
        yield "an error of the server in an answer"
    if reply.status >= 400 and len(reply.body) > _LONGEST_ERROR:
        yield f"an error of {len(reply.body):,} bytes"
    if reply.type.startswith("application/json"):
        texts = [reply.body] if reply.body else []
    else:
        texts = re.findall(rb"^data: ([^\[].*)", reply.body, re.M) if "event" in reply.type else []
    for text in texts:
        try:
            json.loads(text, parse_constant=_no_json)
        except ValueError as error:
            yield f"an answer that is not JSON: {error}"


def _no_json(name: str) -> None:
    raise ValueError(f"it has {name}")


def _short(data: bytes) -> str:
    """The beginning and the end of bytes, to print."""
    if len(data) <= 2 * _SHOWN:
        return ascii(data)[2:-1]
    left_out = f" … {len(data) - 2 * _SHOWN:,} bytes … "
    return ascii(data[:_SHOWN])[2:-1] + left_out + ascii(data[-_SHOWN:])[2:-1]


def _has_ended(running: Server) -> bool:
    """Whether a server has ended, or ends within a moment."""
    with suppress(subprocess.TimeoutExpired):
        running.process.wait(0.5)
    return running.process.poll() is not None


# --- servers ---


@contextmanager
def serving() -> Iterator[Server]:
    """A server of both models in the current directory."""
    limits = ["--max-tokens", "12", "--cache-bytes", str(16 << 20)]
    models = ["--model", "float32", "--model", "tools"]
    with server(MLXSPEC, "serve", *models, *limits) as running:
        yield running


def warmed_up(running: Server) -> Kept:
    """Check that a server answers all valid bodies."""
    with httpx.Client(base_url=running.address, timeout=_ANSWER_SECONDS) as client:
        kept = client.post(RESPONSES, json={"input": "Hello", "max_output_tokens": 6}).json()
        ids = Kept(kept["id"], kept["output"][0]["id"])
        for path, body in right_bodies(ids) * 2:
            for streamed in (False, True):
                answer = client.post(path, json={**body, "stream": streamed})
                if answer.status_code != 200:
                    raise SystemExit(f"{path} says {answer.status_code}: {answer.text}")
    return ids


@contextmanager
def beside(running: Server, busy: int) -> Iterator[Any]:
    """Run the other processes; yield a function that returns /health's answers after the end."""
    with tempfile.TemporaryFile("w+") as told:
        commands: list[tuple[list[str], IO[str] | None]] = [
            ([sys.executable, "-c", _PROBE, str(running.place[1])], told),
            *[([sys.executable, "-c", _BUSY], None)] * busy,
        ]
        processes = [subprocess.Popen(command, stdout=out) for command, out in commands]
        found: list[Look] = []
        try:
            yield lambda: found
        finally:
            for process in processes:
                process.kill()
                process.wait()
            told.seek(0)
            for line in told:
                began, late, seconds, status = line.split()
                found.append(Look(float(began), float(late), float(seconds), status))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--clients", type=int, default=_CLIENTS)
    parser.add_argument("--busy", type=int, default=1, help="cores of other load")
    asked = parser.parse_args()
    seeds = asked.only or range(asked.seed, asked.seed + asked.bodies)
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    siege = Siege(queue.SimpleQueue(), tells=bool(asked.only))
    for seed in seeds:
        siege.seeds.put(seed)
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        float32 = float32_copy(DEMO_DIRECTORY, Path(directory) / "float32")
        copy_with_tools(float32, Path(directory) / "tools")
        os.environ |= {f"MLXSPEC_{kind}_DIR": directory for kind in ("CACHE", "DATA", "CONFIG")}
        while not siege.seeds.empty():
            with serving() as running:
                siege.of(running, 1 if asked.only else asked.clients, asked.busy)
    siege.tell()
    sys.exit(bool(siege.faults))


if __name__ == "__main__":
    main()
