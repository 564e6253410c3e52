"""Load on `mlxspec serve` and on mlx-lm's server: tokens per second, and time to first token.

    python benchmarks/serve_load.py [REPEATS]

Both serve the demo model, ours with drafts, in processes with the same BLAS (OpenBLAS on Linux)
and from the same files: a float32 copy, since a CPU emulates half precision. Clients stream greedy
answers; each client sends the bundled prompts of a kind one after the other. Every prompt begins
with a different number, so neither server's cache of prompts helps. In the conversations the caches
do help, since each question follows the earlier answers. Our memory of earlier outputs is off,
since the same answers recur.

In each repeat both servers take turns, in random order. A turn's speed is the tokens of all clients
divided by the time until the last one is done. The table shows the median ratio over the repeats,
the share of answers that are the same from both servers, and the median and the longest time to
the first token.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlxspec  # before mlx, for OpenBLAS

# isort: split
import httpx
from servers import MLXSPEC, event_in, float32_copy, server

from mlxspec.bench.prompts import BenchPrompt, bundled_prompts
from mlxspec.models.model_files import DEMO_DIRECTORY

_TOKENS = 160
_COUNTS = (1, 2, 4, 8)
_GROUNDED = ("repeat", "rename", "edit JSON", "quote")
_KINDS = {
    "grounded": _GROUNDED,
    "free": ("free code", "free text"),
    "conversation": _GROUNDED[1:],  # as much as the demo model's context holds
}
_OURS, _THEIRS = "mlxspec serve", "mlx_lm.server"
_WITHOUT_MEMORY = (
    "import mlxspec, mlxspec.corpus.answer_index; "
    f"mlxspec.corpus.answer_index.AnswerIndex = lambda *args, **options: None; {MLXSPEC}"
)
_MLX_LM = "import mlxspec; from mlx_lm.server import main; main()"  # mlxspec loads OpenBLAS


@dataclass
class Asked:
    """An answer: its text, its tokens, and the seconds to the first token."""

    text: str
    tokens: int
    first_token: float


@dataclass
class Turn:
    """One server's results for all clients."""

    seconds: float
    answers: list[Asked]

    @property
    def speed(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


@dataclass
class Figures:
    """The turns of both servers, with the same prompts in each repeat."""

    turns: dict[str, list[Turn]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ratio(self) -> float:
        pairs = zip(self.turns[_OURS], self.turns[_THEIRS], strict=True)
        return median(ours.speed / theirs.speed for ours, theirs in pairs)

    @property
    def same(self) -> float:
        """The share of answers that are the same, except for a leading space."""
        ours, theirs = ([a.text.strip() for a in self._answers(name)] for name in (_OURS, _THEIRS))
        return sum(map(str.__eq__, ours, theirs)) / len(ours)

    def speed(self, name: str) -> float:
        return median(turn.speed for turn in self.turns[name])

    def first_tokens(self, name: str) -> list[float]:
        return [answer.first_token for answer in self._answers(name)]

    def _answers(self, name: str) -> list[Asked]:
        return [answer for turn in self.turns[name] for answer in turn.answers]


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Asked:
    """Stream an answer; JSON is parsed after its end, to keep this process fast."""
    sent = time.perf_counter()
    first: float | None = None
    lines: list[bytes] = []
    rest = b""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    common = {"max_tokens": _TOKENS, "temperature": 0, **options}
    async with client.stream("POST", path, json={**body, **common}) as response:
        response.raise_for_status()
        async for part in response.aiter_raw():
            *whole, rest = (rest + part).split(b"\n")
            if first is None and any(_text(event_in(line)) for line in whole):
                first = time.perf_counter() - sent
            lines += whole
    events = [event for line in [*lines, rest] if (event := event_in(line))]
    tokens = next(event["usage"]["completion_tokens"] for event in events if event.get("usage"))
    return Asked("".join(map(_text, events)), tokens, first or time.perf_counter() - sent)


def _text(event: Any) -> str:
    choices = event.get("choices") if event else None
    if not choices:
        return ""
    delta = choices[0].get("delta")
    return (choices[0].get("text") if delta is None else delta.get("content")) or ""


async def ask_all(
    client: httpx.AsyncClient, prompts: Sequence[BenchPrompt], number: int, conversation: bool
) -> list[Asked]:
    """One client's requests."""
    answers: list[Asked] = []
    messages: list[dict[str, str]] = []
    for index, prompt in enumerate(prompts):
        mark = f"[{number}{index}] "
        question = prompt.messages[0]["content"]
        if prompt.raw:
            answers.append(await ask(client, "/v1/completions", {"prompt": mark + question}))
            continue
        if not conversation:
            messages = []
        messages.append({"role": "user", "content": question if messages else mark + question})
        answers.append(await ask(client, "/v1/chat/completions", {"messages": messages}))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def take_turn(address: str, kind: str, clients: int, first_number: int) -> Turn:
    """Run several clients at once, each starting with a different prompt."""
    found = [prompt for prompt in bundled_prompts() if prompt.category in _KINDS[kind]]
    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=address, timeout=300, verify=False) as client:
        asking = [
            ask_all(
                client,
                [*found[number % len(found) :], *found[: number % len(found)]],
                first_number + number,
                kind == "conversation",
            )
            for number in range(clients)
        ]
        answers = await asyncio.gather(*asking)
    return Turn(time.perf_counter() - started, [*itertools.chain(*answers)])


def measure(addresses: dict[str, str], repeats: int) -> None:
    numbers = itertools.count(100, 10)
    for name in addresses:  # warms up
        asyncio.run(take_turn(addresses[name], "grounded", 2, next(numbers)))
    print(
        f"{'':12} {'':>7} {'tokens per second':>25} {'same':>8} {'first token, ms: median':>26} "
        f"{'longest':>17}"
    )
    print(
        f"{'kind':12} {'clients':>7} {'ours':>8} {'theirs':>8} {'ratio':>7} {'answers':>8}"
        f" {'ours':>17} {'theirs':>8} {'ours':>8} {'theirs':>8}"
    )
    for kind, count in itertools.product(_KINDS, _COUNTS):
        figures = Figures()
        for _ in range(repeats):
            number = next(numbers)
            for name in random.sample([*addresses], len(addresses)):
                figures.turns[name].append(
                    asyncio.run(take_turn(addresses[name], kind, count, number))
                )
        ours, theirs = (figures.first_tokens(name) for name in (_OURS, _THEIRS))
        print(
            f"{kind:12} {count:7} {figures.speed(_OURS):8.0f} {figures.speed(_THEIRS):8.0f} "
            f"{figures.ratio:7.2f} {figures.same:8.0%} {median(ours) * 1000:17.0f} "
            f"{median(theirs) * 1000:8.0f} {max(ours) * 1000:8.0f} {max(theirs) * 1000:8.0f}",
            flush=True,
        )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as directory:
        model = str(float32_copy(DEMO_DIRECTORY, Path(directory) / "demo"))
        with (
            server(_WITHOUT_MEMORY, "serve", "--model", model) as ours,
            server(_MLX_LM, "--model", model) as theirs,
        ):
            print(f"mlxspec {mlxspec.__version__}, mlx-lm {_mlx_lm_version()}\n")
            measure({_OURS: ours.address, _THEIRS: theirs.address}, repeats)


def _mlx_lm_version() -> str:
    from importlib.metadata import version

    return version("mlx-lm")


if __name__ == "__main__":
    main()
