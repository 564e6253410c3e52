"""Eight clients, good and bad, use `mlxspec serve` for a while; nothing may go wrong.

    python benchmarks/serve_soak.py [MINUTES] [--model MODEL] [--memory-limit SIZE] [--seed SEED]

First the server is killed a few times, while it works and while it writes its files, and must start
again without reading a broken file. Then, for MINUTES (20 by default), clients with several keys
send random requests: streamed or not, several choices, sampled with seeds, long prompts,
constraints, tools, conversations of several turns. They disconnect, read slowly, send invalid
requests, and one is a process that gets killed. At the end Ctrl-C ends the server, and another one
continues from its files.

It checks that valid requests succeed, that complete answers equal those of generations alone, that
the server is always healthy, and that it is idle at the end. Each minute it prints the server's
memory by kind. In runs of 10 minutes or more, none may grow from the third quarter of the time to
the last, and the resident memory not from the second.

The server has the bound --memory-limit, and MLX may never take more. The default leaves the demo
model little room for prefixes, so that some are evicted; another model needs another bound. With
--model wide, the model is a random one whose caches are large, so that requests wait for memory.

Exits with 1 if a check failed. Runs with the BLAS of MLX's wheel, where a joint forward gives each
sequence exactly the numbers that it gets alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ["MLXSPEC_OPENBLAS"] = "0"
import httpx
from servers import MLXSPEC, Server, copy_with_tools, event_in, server

import mlxspec
from mlxspec.bench.prompts import bundled_prompts
from mlxspec.engine.grammar import Grammar, Vocabulary
from mlxspec.generation.response import GenerationResult
from mlxspec.models.model_files import DEMO_DIRECTORY
from mlxspec.server.body import parse
from mlxspec.server.openai import ChatBody, CompletionBody
from mlxspec.server.prompts import (
    chat_prompt,
    completion_prompts,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CLIENTS = 8
_CONCURRENCY = 6  # fewer than clients, to make some wait
_MEMORY = "130M"  # little beside the weights of the demo model and of the one with tools
_WIDE = 40  # heads of the random model: 41 kB of caches per token in its four layers
_REQUEST_SECONDS = 300  # the longest wait for an answer
_LONGEST_PROMPT = 1500  # characters; leaves room in the context for an answer
_KILLS = 3
_KEYS = ("one", "two", "three")  # each client has one
_TOOLS = "tools"  # the name of the model with tools
_SAMPLE_SECONDS = 1.0  # between two samples of memory and health
_PRINT_SECONDS = 60.0  # between two lines about memory
_LEAST_MINUTES = 10  # the caches of the server are full after half of it
_MOST_GROWTH = 1.05, 5  # of memory, from the third quarter to the last: a factor, and MiB more
_COMPARING = 0.5  # the time to generate answers again alone, as a share of the time before
_LOG_END = 6000  # characters of a server's log to show
_SHOWN = 20  # failures to show

_WORDS = (
    *("river", "table", "Paris", "Oslo", "Grace", "Henry", "42", "json", "list", "of", "the"),
    *("a", "is", "in", "total", "rows", "city"),
)

# Streams answers and never ends by itself.
_VICTIM = """
import itertools, json, sys, threading, urllib.request
def ask(number):
    for turn in itertools.count():
        text = f"Victim {number}, turn {turn}: repeat this."
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "stream": True}
        headers = {"Content-Type": "application/json", "Authorization": sys.argv[2]}
        data = json.dumps(body).encode()
        request = urllib.request.Request(sys.argv[1], data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                pass
for number in range(3):
    threading.Thread(target=ask, args=[number]).start()
"""

# Invalid bodies, and the allowed answers.
_BAD_BODIES: Sequence[tuple[str, bytes, Sequence[int]]] = [
    (path, body, (400,))
    for path in (CHAT, COMPLETIONS)
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"a": ' * 20_000,
        b'{"messages": [], "prompt": []}',
        b'{"messages": [{"role": "user"}], "prompt": {}}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "stop": 5}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "n": 0}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "max_tokens": 1e99}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", "seed": "x"}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": [1, 99999999]}'
        if path == COMPLETIONS
        else b'{"messages": [{"role": "god", "content": "a"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "prompt": "a", '
        b'"logit_bias": {"99999999": 1}}',
        json.dumps({"messages": [{"role": "user", "content": "a " * 99_999}]}).encode()
        if path == CHAT
        else json.dumps({"prompt": "a " * 99_999}).encode(),
    )
] + [
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "model": "other"}', (404,)),
    ("/v1/nothing", b"{}", (404,)),
    ("/v1/models", b"{}", (405,)),
]


class Choice(NamedTuple):
    """One choice as a client received it."""

    text: str
    finish_reason: str | None


class Body(NamedTuple):
    """A client's record of a request."""

    path: str
    json: str

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.json)


class Memory(NamedTuple):
    """The server's memory by kind, in MiB.

    Attributes:
        resident: of its processes, as the system counts it.
        MLX: MLX's active memory.
        kept: MLX's cache of freed buffers.
        prefixes: the caches of earlier prompts, a part of the active memory.
        rest: resident memory that is not MLX's.
    """

    resident: float
    MLX: float
    kept: float
    prefixes: float
    rest: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {size:.0f}" for name, size in self._asdict().items())


class Soak:
    """The clients and their results.

    Attributes:
        counts: the number of events, by kind.
        failures: messages of failed checks.
        answers: per request, all complete answers that it got.
        memory: the samples of the server's memory, in order.
        most: the most bytes that MLX has taken.
        limit: the server's bound then.
        waiting: the samples in which requests waited though fewer ran than may.
    """

    def __init__(self, running: Server, until: float, seed: int) -> None:
        self._server = running
        self._until = until
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.answers: dict[Body, set[tuple[tuple[Choice, ...], int]]] = defaultdict(set)
        self.memory: list[Memory] = []
        self.most = self.limit = self.waiting = 0
        self.slowest_health = 0.0

    async def run(self) -> None:
        """Run all clients until the time is over."""
        clients = [self._client() for _ in range(_CLIENTS)]
        await asyncio.gather(*clients, self._victim(), self._watch())
        await self._check_idle()

    def fail(self, what: str) -> None:
        self.failures.append(what)
        if len(self.failures) <= _SHOWN:
            print(f"  WRONG: {what}", flush=True)

    def _goes_on(self) -> bool:
        return time.monotonic() < self._until

    async def _client(self) -> None:
        acts: dict[Callable[[httpx.AsyncClient], Awaitable[None]], int] = {
            self._ask: 50,
            self._converse: 10,
            self._call_tools: 10,
            self._leave: 20,
            self._read_slowly: 5,
            self._send_nonsense: 15,
            self._break_off: 3,
            self._look: 5,
        }
        while self._goes_on():
            # A client that disconnects opens a new connection each time.
            limits = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
            transport = httpx.AsyncHTTPTransport(verify=False, socket_options=limits)
            address = self._server.address
            async with httpx.AsyncClient(
                transport=transport,
                base_url=address,
                timeout=_REQUEST_SECONDS,
                headers=with_key(self._random.choice(_KEYS)),
            ) as client:
                for _ in range(self._random.randint(1, 10)):
                    (act,) = self._random.choices([*acts], [*acts.values()])
                    try:
                        await asyncio.wait_for(act(client), _REQUEST_SECONDS)
                    except TimeoutError:
                        self.fail(f"{act.__name__}: no end after {_REQUEST_SECONDS} s")
                    except Exception as error:
                        self.fail(f"{act.__name__}: {type(error).__name__}: {error}")
                    if not self._goes_on():
                        return

    # --- what clients do ---

    async def _ask(self, client: httpx.AsyncClient) -> None:
        """Read one answer to its end."""
        await self._complete(client, random_body(self._random))

    async def _converse(self, client: httpx.AsyncClient) -> None:
        """Run some turns of a conversation."""
        messages: list[dict[str, str]] = []
        for _ in range(self._random.randint(2, 4)):
            messages.append({"role": "user", "content": random_text(self._random)[:150]})
            options = {"messages": messages, "max_tokens": self._random.randint(1, 48)}
            choices = await self._complete(client, Body(CHAT, json.dumps(options)))
            messages.append({"role": "assistant", "content": choices[0].text or "-"})

    async def _call_tools(self, client: httpx.AsyncClient) -> None:
        """Have a model with tools call some, or choose."""
        self.counts["with tools"] += 1
        names = self._random.sample(_WORDS[:6], self._random.randint(1, 3))
        strict = self._random.random() < 0.7
        tools = [
            {
                "type": "function",
                "function": {"name": name, "parameters": random_schema(self._random)}
                | ({"strict": True} if strict else {}),
            }
            for name in names
        ]
        one = {"type": "function", "function": {"name": names[0]}}
        content = {
            "model": _TOOLS,
            "messages": [{"role": "user", "content": random_text(self._random)[:300]}],
            "max_tokens": self._random.randint(1, 60),
            "tools": tools,
            "tool_choice": self._random.choice(["auto", "required", one]),
            "parallel_tool_calls": self._random.random() < 0.5,
        }
        await self._complete(client, Body(CHAT, json.dumps(content)))

    async def _complete(self, client: httpx.AsyncClient, body: Body) -> list[Choice]:
        content = body.content
        streamed = self._random.random() < 0.6
        self.counts["streamed" if streamed else "whole"] += 1
        if streamed:
            events = [event async for event in self._stream(client, body.path, content)]
        else:
            response = await client.post(body.path, json=content)
            if response.status_code != 200:
                self.counts[f"status {response.status_code}"] += 1
                raise RuntimeError(f"{response.status_code} for {body.json[:300]}: {response.text}")
            events = [response.json()]
        return self._note(body, events)

    def _note(self, body: Body, events: list[Any]) -> list[Choice]:
        """Keep a complete answer, to compare it later."""
        choices = choices_of(events)
        usage = next((event["usage"] for event in events if event.get("usage")), None)
        if usage is None or not all(choice.finish_reason for choice in choices):
            raise RuntimeError(f"the answer to {body.json[:300]} has no end")
        if "tools" not in body.content:
            self.answers[body].add((tuple(choices), usage["completion_tokens"]))
        self.counts["tokens"] += usage["completion_tokens"]
        return choices

    async def _stream(
        self, client: httpx.AsyncClient, path: str, content: dict[str, Any], pause: float = 0
    ) -> Any:
        """The events of a streamed answer."""
        asked = {**content, "stream": True, "stream_options": {"include_usage": True}}
        ended = False
        async with client.stream("POST", path, json=asked) as response:
            if response.status_code != 200:
                self.counts[f"status {response.status_code}"] += 1
                text = (await response.aread()).decode()
                raise RuntimeError(f"{response.status_code} for {asked}: {text}")
            async for line in response.aiter_lines():
                ended = ended or line == "data: [DONE]"
                event = event_in(line.encode())
                if event and "error" in event:
                    raise RuntimeError(f"{event} in the answer to {asked}")
                if event:
                    yield event
                if pause and self._random.random() < 0.1:
                    await asyncio.sleep(pause)
        if not ended:
            raise RuntimeError(f"the answer to {asked} has no [DONE]")

    async def _leave(self, client: httpx.AsyncClient) -> None:
        """Disconnect before the answer has ended."""
        self.counts["left"] += 1
        body = random_body(self._random, longest=400)
        streamed = self._random.random() < 0.6
        leaving = self._random.choice([0.0, 0.01, 0.1, 1.0]) * self._random.random()
        with suppress(asyncio.TimeoutError):
            if streamed:
                await asyncio.wait_for(self._all_of(client, body), leaving)
            else:
                await asyncio.wait_for(client.post(body.path, json=body.content), leaving)

    async def _all_of(self, client: httpx.AsyncClient, body: Body) -> None:
        async for _ in self._stream(client, body.path, body.content):
            pass

    async def _read_slowly(self, client: httpx.AsyncClient) -> None:
        """Read a long answer slowly."""
        self.counts["read slowly"] += 1
        messages = [{"role": "user", "content": random_text(self._random)}]
        content = {"messages": messages, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
        pause = self._random.choice([0.05, 0.5])
        events = [event async for event in self._stream(client, CHAT, content, pause)]
        self._note(Body(CHAT, json.dumps(content)), events)

    async def _send_nonsense(self, client: httpx.AsyncClient) -> None:
        """Send an invalid request, which must get an error in OpenAI's form."""
        self.counts["nonsense"] += 1
        path, body, statuses = self._random.choice(_BAD_BODIES)
        response = await client.post(path, content=body)
        if response.status_code not in statuses:
            self.counts[f"status {response.status_code}"] += 1
            self.fail(f"{response.status_code} for {body[:80]!r} at {path}: {response.text[:300]}")
        elif not response.json()["error"]["message"]:
            self.fail(f"no message for {body[:80]!r}")

    async def _break_off(self, client: httpx.AsyncClient) -> None:
        """Send less than the header promises, or invalid HTTP."""
        self.counts["broken off"] += 1
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        key = with_key(_KEYS[0])["Authorization"]
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {key}\r\n"
        long = f"{head}Content-Length: 1000\r\n\r\n"
        chunked = f"{head}Transfer-Encoding: chunked\r\n\r\nzz"
        sent = self._random.choice([long, long + '{"messages":', chunked, "\x16\x03\x01\0", ""])
        writer.write(sent.encode())
        await writer.drain()
        await asyncio.sleep(self._random.random() * 0.2)
        if self._random.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def _look(self, client: httpx.AsyncClient) -> None:
        """Read the server's status endpoints."""
        self.counts["looked"] += 1
        path = self._random.choice(["/", "/status", "/metrics", "/v1/models", "/ready"])
        (await client.get(path)).raise_for_status()
        tokens = await client.post("/v1/tokenize", json={"prompt": random_text(self._random)})
        tokens.raise_for_status()
        ids = tokens.json()["tokens"]
        (await client.post("/v1/detokenize", json={"tokens": ids})).raise_for_status()

    async def _victim(self) -> None:
        """Kill a process with several requests at a random time."""
        while self._goes_on():
            self.counts["killed clients"] += 1
            key = with_key(_KEYS[0])["Authorization"]
            command = [sys.executable, "-c", _VICTIM, self._server.address + CHAT, key]
            process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
            await asyncio.sleep(0.5 + 3 * self._random.random())
            process.kill()
            await process.wait()
            await asyncio.sleep(5 * self._random.random())

    # --- monitoring ---

    async def _watch(self) -> None:
        """Sample health and memory."""
        started = printed = time.monotonic()
        async with self._watcher() as client:
            while self._goes_on():
                looked = time.monotonic()
                try:
                    health = await client.get("/health")
                    status = (await client.get("/status")).json()
                except httpx.HTTPError as error:
                    self.fail(f"health: {type(error).__name__}: {error}")
                    return
                self.slowest_health = max(self.slowest_health, time.monotonic() - looked)
                if health.status_code != 200:
                    self.fail(f"health: {health.status_code} {health.text}")
                self.memory.append(memory_of(self._server, status))
                self.most = max(self.most, status["memory"]["peak"])
                self.limit = status["memory"]["limit"]
                states = Counter(one["state"] for one in status["requests"])
                running = states.total() - states["queued"]
                self.waiting += bool(states["queued"] and running < _CONCURRENCY)
                if looked - printed >= _PRINT_SECONDS or len(self.memory) == 1:
                    printed = looked
                    minutes = (looked - started) / 60
                    print(f"  {minutes:3.0f} min, MiB: {self.memory[-1]}", flush=True)
                await asyncio.sleep(_SAMPLE_SECONDS)

    def _watcher(self) -> httpx.AsyncClient:
        """A client for the monitoring."""
        return httpx.AsyncClient(
            base_url=self._server.address, timeout=30, headers=with_key(_KEYS[0]), verify=False
        )

    async def _check_idle(self) -> None:
        """Check that the server is idle after all clients have disconnected."""
        async with self._watcher() as client:
            for _ in range(50):
                left = (await client.get("/status")).json()["requests"]
                if not left:
                    return
                await asyncio.sleep(0.1)
        self.fail(f"requests are left though no client is: {left}")

    def check_memory(self, judged: bool) -> str:
        """Describe the memory in each quarter; if judged, the last may not exceed the third."""
        quarter = max(1, len(self.memory) // 4)
        lines = []
        for name in Memory._fields:
            values = [getattr(sample, name) for sample in self.memory]
            parts = [values[quarter * number : quarter * (number + 1)] for number in range(4)]
            medians = [median(part or [0]) for part in parts]
            times, more = _MOST_GROWTH
            if judged and medians[3] > medians[2] * times + more:
                self.fail(f"memory, {name}, grows from {medians[2]:.0f} to {medians[3]:.0f} MiB")
            if judged and name == "resident" and medians[3] > medians[1] * times:
                self.fail(f"resident memory grows from {medians[1]:.0f} to {medians[3]:.0f} MiB")
            lines.append(f"{name} {' '.join(f'{one:.0f}' for one in medians)}")
        return "; ".join(lines)


def memory_of(running: Server, status: dict[str, Any]) -> Memory:
    """A server's memory, from its own figures and the system's."""
    used, kept = status["memory"]["active"], status["memory"]["cache"]
    prefixes = sum(model["cache"]["bytes"] for model in status["models"])
    resident = running.resident
    mlx, kept, prefixes = (number / 2**20 for number in (used, kept, prefixes))
    return Memory(resident, mlx, kept, prefixes, resident - mlx - kept)


def with_key(key: str) -> dict[str, str]:
    """The headers of a client with a key."""
    return {"Authorization": f"Bearer {key}"}


# --- requests ---


def random_text(rng: random.Random) -> str:
    """A bundled task, marked or shortened, or many of them, or random words."""
    kind = rng.random()
    task = rng.choice(bundled_prompts()).messages[0]["content"]
    if kind < 0.5:
        return f"[{rng.randint(0, 9)}] {task}"
    if kind < 0.7:
        return task[: rng.randint(5, len(task))]
    if kind < 0.8:  # hundreds of tokens
        tasks = rng.choices(bundled_prompts(), k=12)
        return " ".join(one.messages[0]["content"] for one in tasks)[:_LONGEST_PROMPT]
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, 80)))


def random_schema(rng: random.Random) -> dict[str, Any]:
    """A schema out of more than a server keeps compiled."""
    kinds = [{"type": "integer"}, {"type": "string"}, {"enum": ["red", "green"]}]
    names = rng.sample(_WORDS, rng.randint(1, 3))
    properties = {name: rng.choice(kinds) for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    return {**schema, "additionalProperties": False}


def random_constraint(rng: random.Random) -> dict[str, Any]:
    """A constraint on an answer."""
    pattern = rng.choice(["[a-z ]{5,40}", "(yes|no)", r"\d+(\.\d+)?"])
    schemas = [
        random_schema(rng),
        {"type": "object"},
        {"type": "string", "pattern": f"^{pattern}$"},
        {"enum": rng.sample(_WORDS, 3)},
    ]
    format = {"name": "answer", "schema": rng.choice(schemas)}
    return {"response_format": {"type": "json_schema", "json_schema": format}}


def random_body(rng: random.Random, longest: int = 80) -> Body:
    """A valid request."""
    body: dict[str, Any] = {"max_tokens": rng.randint(1, longest)}
    path = rng.choice([CHAT, CHAT, COMPLETIONS])
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": random_text(rng)}]
        if rng.random() < 0.2:
            body["messages"].insert(0, {"role": "system", "content": "You repeat what you read."})
    else:
        texts = [random_text(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
        body["prompt"] = texts if len(texts) > 1 else texts[0]
    if rng.random() < 0.4:
        body.update(temperature=rng.choice([0.3, 0.8, 1.3]), seed=rng.randint(0, 5))
        samplings: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}]
        body.update(rng.choice(samplings))
    if rng.random() < 0.2:
        name = rng.choice(["presence_penalty", "frequency_penalty", "repetition_penalty"])
        body[name] = rng.choice([0.5, 1.2])
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        body["stop"] = rng.choice([["\n"], [" the", "river"], "."])
    if rng.random() < 0.15:
        body.update(random_constraint(rng))
    if rng.random() < 0.1:
        body["prediction"] = {"type": "content", "content": random_text(rng)}
    if rng.random() < 0.1:
        body["logprobs"] = True if path == CHAT else 2
    return Body(path, json.dumps(body))


def choices_of(events: list[Any]) -> list[Choice]:
    """The choices of an answer, streamed or whole, in their order."""
    texts: dict[int, list[str]] = defaultdict(list)
    reasons: dict[int, str] = {}
    for choice in itertools.chain(*(event["choices"] for event in events)):
        index = choice["index"]
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        texts[index].append(part.get("content") or "")
        if choice["finish_reason"]:
            if index in reasons:
                raise RuntimeError(f"choice {index} has ended twice")
            reasons[index] = choice["finish_reason"]
    return [Choice("".join(texts[index]), reasons.get(index)) for index in sorted(texts)]


# --- generations alone ---


def alone(decoder: mlxspec.Decoder, body: Body) -> tuple[tuple[Choice, ...], int]:
    """The choices of a request and their tokens, generated one after the other."""
    tokenizer, vocab_size = decoder.tokenizer, decoder.loaded.vocab_size
    if body.path == CHAT:
        request: Any = parse(ChatBody, body.content)
        prompts: Any = [chat_prompt(request, tokenizer)]
    else:
        request = parse(CompletionBody, body.content)
        prompts = completion_prompts(request, tokenizer)
    grammar = None
    if prompts[0].constraint:
        grammar = Grammar(prompts[0].constraint, Vocabulary.of(tokenizer, vocab_size))
    results = [
        _generated(
            decoder,
            prompt.tokens,
            request.max_tokens,
            sampling=request.sampling(index),
            constraint=grammar,
            stop=request.stop,
            stop_tokens=(*request.stop_token_ids, *prompt.stop_tokens),
        )
        for prompt in prompts
        for index in range(request.n)
    ]
    trims = body.path == CHAT and prompts[0].format.trims_space
    return tuple(
        Choice(result.text.removeprefix(" ") if trims else result.text, result.finish_reason)
        for result in results
    ), sum(len(result.tokens) for result in results)


def _generated(
    decoder: mlxspec.Decoder, prompt: list[int], max_tokens: int, **options: Any
) -> GenerationResult:
    result = GenerationResult()
    for response in decoder.stream(prompt, max_tokens, **options):
        result.add(response)
    return result


def compare(soak: Soak, model: str, seconds: float) -> int:
    """Compare answers with those of generations alone, for some time; return their number."""
    decoder = mlxspec.Decoder(model)
    until, compared = time.monotonic() + seconds, 0
    bodies = [*soak.answers]
    random.shuffle(bodies)
    for body in bodies:
        if time.monotonic() > until:
            break
        expected = alone(decoder, body)
        for answer in soak.answers[body] - {expected}:
            soak.fail(f"{body.json} is answered with {answer}, alone with {expected}")
        compared += 1
    return compared


# --- kills and ends ---


def write_wide_model(directory: Path) -> str:
    """Write a random model with large caches, and the bundled tokenizer; return its path."""
    sys.path.append(str(Path(__file__).parents[1]))  # where the tests are
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from tests.support.llamas import repetitive_llama

    names = "hidden_size", "num_attention_heads", "num_key_value_heads"
    sizes = {**dict.fromkeys(names, _WIDE), "num_hidden_layers": 4}
    model = repetitive_llama(**sizes, max_position_embeddings=1024)
    weights = dict(tree_flatten(model.parameters()))
    shutil.copytree(DEMO_DIRECTORY, directory, ignore=shutil.ignore_patterns("model*"))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    (directory / "config.json").write_text(json.dumps(vars(model.args)))
    return str(directory)


def serve(model: str, directory: Path, memory: str) -> Any:
    """Our server of a model and of the model with tools, which keeps prefixes in a directory.

    The keys and the model with tools are in the current directory.
    """
    limits = ["--concurrency", str(_CONCURRENCY), "--memory-limit", memory]
    files = ["--cache-dir", str(directory), "--api-key-file", "keys"]
    models = ["--model", model, "--model", _TOOLS]
    return server(MLXSPEC, "serve", "-q", *models, *limits, *files, openblas=False)


def problems_of(directory: Path, log: str, killed: bool = False) -> Iterator[str]:
    """What is wrong with a server's files after a start, or with its log.

    Once a server was killed, a part of a file may stay until another one ends.
    """
    for path in filter(Path.is_file, directory.rglob("*")):
        if killed and path.suffix == ".partial":
            continue
        if path.suffix != ".safetensors" or path.name == "new.safetensors":
            yield f"{path.name} is left in the directory"
    if re.search(r"ignored|Traceback|has failed|cannot be", log):
        yield f"the server has written: {log[-_LOG_END:]}"


def kill_again_and_again(model: str, directory: Path, memory: str, rng: random.Random) -> list[str]:
    """Kill servers while they work and while they write files; return what was wrong."""
    found: list[str] = []
    for turn in range(_KILLS + 1):
        with serve(model, directory, memory) as running:
            found += problems_of(directory, running.log, killed=True)
            if turn == _KILLS:
                return found
            work(running.address, rng)
            if turn:  # at a random moment while it writes
                running.process.send_signal(signal.SIGINT)
                _wait_for_a_file(directory)
                time.sleep(rng.random() * 0.02)
            running.process.kill()
            running.process.wait()
    return found


def _wait_for_a_file(directory: Path) -> None:
    before = {*directory.rglob("*")}
    deadline = time.monotonic() + 10
    while {*directory.rglob("*")} <= before and time.monotonic() < deadline:
        time.sleep(0.001)


def work(address: str, rng: random.Random) -> None:
    """Send some requests at once; some have not ended when this returns."""

    async def ask() -> None:
        async with httpx.AsyncClient(
            base_url=address, timeout=_REQUEST_SECONDS, headers=with_key(_KEYS[0]), verify=False
        ) as client:
            for size in (4, 12):  # the first are answered before the others are sent
                bodies = [random_body(rng) for _ in range(size)]
                asking = [
                    asyncio.create_task(client.post(body.path, json=body.content))
                    for body in bodies
                ]
                await asyncio.wait(asking, timeout=None if size == 4 else 1)
                for task in asking:
                    task.cancel()

    asyncio.run(ask())


def end(running: Server) -> Iterator[str]:
    """Press Ctrl-C; return what was wrong with the end."""
    running.process.send_signal(signal.SIGINT)
    try:
        status = running.process.wait(60)
    except subprocess.TimeoutExpired:
        yield "Ctrl-C does not end the server within 60 s"
        return
    if status:
        yield f"after Ctrl-C the server ends with status {status}"


def goes_on(address: str, body: Body) -> bool:
    """Whether a server finds a prompt that another one has answered in its files."""
    answer = httpx.post(
        address + body.path,
        json=body.content,
        timeout=_REQUEST_SECONDS,
        headers=with_key(_KEYS[0]),
    )
    answer.raise_for_status()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", nargs="?", type=float, default=20.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--memory-limit", default=_MEMORY)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    memory = asked.memory_limit
    model = str(Path(asked.model).resolve()) if Path(asked.model).exists() else asked.model
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        copy_with_tools(DEMO_DIRECTORY, Path(_TOOLS))
        if model == "wide":
            model = write_wide_model(Path(temporary) / "wide")
        Path("keys").write_text("\n".join(_KEYS))
        directory = Path(temporary) / "cache"
        directory.mkdir()
        found = kill_again_and_again(model, directory, memory, random.Random(asked.seed))
        print(f"killed {_KILLS} times: {len(found)} problems", *found, sep="\n  ", flush=True)
        last = Body(CHAT, json.dumps({"messages": [{"role": "user", "content": "The last. " * 9}]}))
        with serve(model, directory, memory) as running:
            soak = Soak(running, time.monotonic() + asked.minutes * 60, asked.seed)
            asyncio.run(soak.run())
            goes_on(running.address, last)
            for problem in [*end(running), *problems_of(directory, running.log)]:
                soak.fail(problem)
        with serve(model, directory, memory) as running:
            for problem in problems_of(directory, running.log):
                soak.fail(problem)
            if not goes_on(running.address, last):
                soak.fail("a new server finds nothing in the files of the one before")
        compared = compare(soak, model, asked.minutes * 60 * _COMPARING)
    print(*(f"{count:8} {what}" for what, count in soak.counts.most_common()), sep="\n")
    print(f"MiB in the quarters of the time: {soak.check_memory(asked.minutes >= _LEAST_MINUTES)}")
    print(
        f"most of MLX: {soak.most >> 20} of {soak.limit >> 20} MiB; requests waited for memory in"
    )
    print(f"{soak.waiting} of {len(soak.memory)} looks")
    if soak.most > soak.limit:
        soak.fail("MLX has taken more than the bound")
    print(f"slowest look at health and metrics: {soak.slowest_health:.2f} s", flush=True)
    answers = sum(map(len, soak.answers.values()))
    print(f"{compared} of {len(soak.answers)} requests generated again ({answers} answers kept)")
    failures = [*found, *soak.failures]
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
