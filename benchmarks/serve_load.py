"""Load on `mlxspec serve` and on mlx-lm's server: tokens per second, and time to first token.

    python benchmarks/serve_load.py [--models demo MODEL …] [--decoder plain] [--seconds 60] …

In each repeat both servers take turns, in random order, in processes with the same BLAS (OpenBLAS
on Linux) and from the same files: of the demo model a float32 copy, since a CPU emulates half
precision. A server starts anew for its turns, and has learned nothing before. Its first turn is
"cold", its second comes "after others". In a turn, each client streams greedy answers, one after
the other, until the time is up, so a queue that refills never shrinks to its slowest answer.
Every prompt begins with a different number, so neither server's cache of prompts helps. In the
conversations the caches do help, since each question follows the earlier answers. Our memory of
earlier outputs is empty, since the same answers recur; which drafts are right is learned.

A turn's speed is the number of tokens that arrived in its time, divided by that time. Of an answer
that is longer, the share that arrived counts, by its characters. The table shows the median speeds
over the repeats, the median ratio with the least and the greatest, the share of answers that are
the same from both servers, and the time to the first token at the median and at 99 %.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import mlxspec  # before mlx, for OpenBLAS

# isort: split
import httpx
from servers import MLXSPEC, event_in, float32_copy, server

from mlxspec.bench.prompts import BenchPrompt, bundled_prompts, read_prompts
from mlxspec.models.model_files import DEMO_DIRECTORY

_CHATS = Path(__file__).with_name("chats.jsonl")
_TOKENS = 160
_GROUNDED = ("repeat", "rename", "edit JSON", "quote")
_KINDS = {
    "grounded": _GROUNDED,
    "free": ("free code", "free text"),
    "conversation": _GROUNDED[1:],  # as much as the demo model's context holds
    "mixed": (),  # all of chats.jsonl, which the demo model has not learned to answer
}
_TURNS = "cold", "after others"
_OURS, _THEIRS = "mlxspec serve", "mlx_lm.server"
_CODE = {
    _OURS: "import mlxspec; from mlxspec.corpus import answer_index as index; "
    f"index.AnswerIndex = lambda *_, of=index.AnswerIndex, **__: of(0); {MLXSPEC}",
    _THEIRS: "import mlxspec; from mlx_lm.server import main; main()",  # mlxspec loads OpenBLAS
}


@dataclass
class Asked:
    """An answer: its text, its tokens, and when it was asked and its characters arrived."""

    text: str
    tokens: int
    sent: float
    arrived: list[tuple[float, int]]

    @property
    def first_token(self) -> float:
        """Seconds to the first text; to the end if there is no text."""
        return self.arrived[0][0] - self.sent

    def tokens_until(self, end: float) -> float:
        """How many of its tokens had arrived at a time, by its characters."""
        early = sum(count for at, count in self.arrived if at <= end)
        return self.tokens * early / max(1, sum(count for _, count in self.arrived))


@dataclass
class Turn:
    """One server's speed, in tokens per second, and its answers by client."""

    speed: float
    answers: list[list[Asked]]


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Asked:
    """Stream an answer; JSON is parsed after its end, to keep this process fast."""
    sent = time.perf_counter()
    parts: list[tuple[float, bytes]] = []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    common = {"max_tokens": _TOKENS, "temperature": 0, **options}
    async with client.stream("POST", path, json={**body, **common}) as response:
        response.raise_for_status()
        async for part in response.aiter_raw():
            parts.append((time.perf_counter(), part))
    text, tokens, rest = "", 0, b""
    arrived: list[tuple[float, int]] = []
    for at, part in parts:
        *whole, rest = (rest + part).split(b"\n")
        events = [event for line in whole if (event := event_in(line))]
        tokens = next((e["usage"]["completion_tokens"] for e in events if e.get("usage")), tokens)
        if new := "".join(map(_text, events)):
            text += new
            arrived.append((at, len(new)))
    return Asked(text, tokens, sent, arrived or [(time.perf_counter(), 0)])


def _text(event: Any) -> str:
    choices = event.get("choices")
    if not choices:
        return ""
    delta = choices[0].get("delta")
    return (choices[0].get("text") if delta is None else delta.get("content")) or ""


async def ask_until(
    client: httpx.AsyncClient, prompts: Sequence[BenchPrompt], mark: str, talks: bool, end: float
) -> list[Asked]:
    """One client's requests, in turns through the prompts until a time.

    Args:
        client: connected to the server.
        prompts: each is asked as it is, or if ``talks``, all in one conversation.
        mark: begins each prompt, with the number of the request.
        end: when no more is asked.
    """
    answers: list[Asked] = []
    messages: list[dict[str, str]] = []
    for index, prompt in enumerate(itertools.cycle(prompts)):
        if time.perf_counter() >= end:
            break
        own_mark = f"[{mark}{index}] "
        question = prompt.messages[0]["content"]
        if prompt.raw:
            answers.append(await ask(client, "/v1/completions", {"prompt": own_mark + question}))
            continue
        if not talks or index % len(prompts) == 0:
            messages = []
        messages.append({"role": "user", "content": question if messages else own_mark + question})
        answers.append(await ask(client, "/v1/chat/completions", {"messages": messages}))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def take_turn(address: str, kind: str, clients: int, seconds: float, number: int) -> Turn:
    """Run several clients at once, which start with different prompts, and in each turn with other
    ones.
    """
    if kind == "mixed":
        found = [prompt for prompt in read_prompts(_CHATS) if not prompt.raw]
        random.Random(0).shuffle(found)  # in the file, each kind stands together
    else:
        found = [prompt for prompt in bundled_prompts() if prompt.category in _KINDS[kind]]
    starts = [number // 100 + own * len(found) // clients for own in range(clients)]
    end = time.perf_counter() + seconds
    async with httpx.AsyncClient(base_url=address, timeout=300, verify=False) as client:
        asking = [
            ask_until(
                client,
                [found[(start + place) % len(found)] for place in range(len(found))],
                f"{number + own}-",
                kind == "conversation",
                end,
            )
            for own, start in enumerate(starts)
        ]
        answers = await asyncio.gather(*asking)
    tokens = sum(answer.tokens_until(end) for one in answers for answer in one)
    return Turn(tokens / seconds, answers)


@contextmanager
def fresh_server(name: str, model: str, decoder: str | None) -> Iterator[str]:
    """The address of a server that has learned nothing yet."""
    with ExitStack() as stack:
        os.environ["MLXSPEC_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        options = ["serve", "--model", model] if name == _OURS else ["--model", model]
        if decoder and name == _OURS:
            options += ["--decoder", decoder]
        running = stack.enter_context(server(_CODE[name], *options))
        # Models load with the first request.
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        url = f"{running.address}/v1/chat/completions"
        httpx.post(url, json=body, timeout=600).raise_for_status()
        yield running.address


def same_answers(ours: Turn, theirs: Turn) -> list[bool]:
    """For each prompt that both have answered: is the answer the same, but for leading spaces?"""
    return [
        own.text.strip() == other.text.strip()
        for client in zip(ours.answers, theirs.answers, strict=True)
        for own, other in zip(*client, strict=False)
    ]


def measure(model: str, title: str, kind: str, clients: int, asked: argparse.Namespace) -> None:
    """Print a line for the cold turns, and one for those after others."""
    found: dict[str, dict[str, list[Turn]]] = {turn: defaultdict(list) for turn in _TURNS}
    for repeat in range(asked.repeats):
        for name in random.sample([_OURS, _THEIRS], 2):
            with fresh_server(name, model, asked.decoder) as address:
                for place, turn in enumerate(_TURNS):
                    number = 100 * (2 * repeat + place + 1)
                    taken = take_turn(address, kind, clients, asked.seconds, number)
                    found[turn][name].append(asyncio.run(taken))
    for turn in _TURNS:
        ours, theirs = found[turn][_OURS], found[turn][_THEIRS]
        pairs = [*zip(ours, theirs, strict=True)]
        ratios = [own.speed / other.speed for own, other in pairs]
        same = [equal for pair in pairs for equal in same_answers(*pair)]
        speeds = "".join(f"{median(one.speed for one in turns):8.1f}" for turns in (ours, theirs))
        print(
            f"{title:12} {kind:12} {clients:7} {turn:12} {speeds} {median(ratios):7.2f} "
            f"{f'{min(ratios):.2f}–{max(ratios):.2f}':>12} {sum(same) / len(same):8.0%}"
            f"{_first_tokens(ours)}{_first_tokens(theirs)}",
            flush=True,
        )


def _first_tokens(turns: list[Turn]) -> str:
    """The milliseconds to the first token, at the median and at 99 %."""
    answers = itertools.chain.from_iterable(one for turn in turns for one in turn.answers)
    found = [answer.first_token * 1000 for answer in answers]
    last = quantiles(found, n=100, method="inclusive")[-1] if len(found) > 1 else found[0]
    return f"{median(found):9.0f} {last:8.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo"], metavar="MODEL")
    parser.add_argument("--kinds", nargs="+", default=[*_KINDS], choices=[*_KINDS])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8], metavar="N")
    parser.add_argument("--seconds", type=float, default=60, help="of a turn (default 60)")
    parser.add_argument("--repeats", type=int, default=5, help="(default 5)")
    parser.add_argument("--decoder", help="our server's decoder, such as plain")
    asked = parser.parse_args()
    print(f"mlxspec {mlxspec.__version__}, mlx-lm {version('mlx-lm')}\n")
    print(
        f"{'':46} {'tokens per second':>15} {'ratio':>20} {'same':>8}"
        f"{'first token, ms: ours':>18}{'theirs':>18}"
    )
    print(
        f"{'model':12} {'kind':12} {'clients':>7} {'turn':12} {'ours':>8}{'theirs':>8} "
        f"{'median':>7} {'from, to':>12} {'answers':>8}{'median':>9} {'99 %':>8}"
        f"{'median':>9} {'99 %':>8}"
    )
    with tempfile.TemporaryDirectory() as directory:
        for title in asked.models:
            model = title
            if title == "demo":
                model = str(float32_copy(DEMO_DIRECTORY, Path(directory) / "demo"))
            for kind, clients in itertools.product(asked.kinds, asked.clients):
                measure(model, Path(title).name, kind, clients, asked)


if __name__ == "__main__":
    main()
