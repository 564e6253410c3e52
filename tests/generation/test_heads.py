"""With a trained head the output stays that of plain decoding, however good its drafts are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import mlx.nn as nn
import pytest

import mlxspec
from mlxspec.drafting.heads import HeadTimes
from mlxspec.engine.heads import Member, TrainedHead
from mlxspec.engine.sampling import SamplingParams
from mlxspec.generation.drafting import Auto
from mlxspec.generation.engine import Engine
from tests.support import heads
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT, endless_tokenizer, given_costs
from tests.support.engines import submit
from tests.support.examples import LONG
from tests.support.harness import assert_same_output

TOKENS = 40
TEMPERATURES = (0.0, 0.7, 1.3)
RIGHT = {"random": None, "trained": 0.8, "lying": 0.0}
"""How often each token of a draft is right if those before are; None leaves the head alone."""


# Per kind, its target and what makes a random head for it.
KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "EAGLE-3": ("llama3", heads.eagle3),
    "MTP": ("qwen3_5", heads.qwen_mtp),
    "MTP of experts": ("qwen3_next", heads.qwen_mtp),
    "Gemma's assistant": ("gemma4", heads.gemma4_assistant),
    "DFlash": ("qwen3", heads.dflash),
    "DSpark": ("qwen3", heads.dspark),
}


@cache
def target(kind: str) -> nn.Module:
    return ARCHITECTURES[KINDS[kind][0]].model()


class Instructed(TrainedHead):
    """A head that runs as any other, but drafts what it is told.

    Args:
        kind: of the head.
        right: as in ``RIGHT``.
    """

    def __init__(self, kind: str, right: float | None) -> None:
        _, head = KINDS[kind][1](target(kind))
        super().__init__(head, target(kind))
        self.right, self.random = right, random.Random(4)
        self.contexts: list[list[int]] = []
        self.drafted = 0
        self.times = HeadTimes(1e-6, 1e-6)  # so that it runs even if it is hardly ever right

    def draft(self, members: Sequence[Member], depth: int) -> list[tuple[list[int], list[float]]]:
        drafts = super().draft(members, depth)
        self.drafted += len(drafts)
        if self.right is None:
            return [(tokens, [0.9] * depth) for tokens, _ in drafts]
        return [(self.told(member, depth), [0.9] * depth) for member in members]

    def told(self, member: Member, depth: int) -> list[int]:
        start = member.target.length + 1
        known = (own for own in self.contexts if own[start - 1 : start] == [member.last])
        true = next(known, [])[start : start + depth]
        true += [0] * (depth - len(true))
        assert self.right is not None
        return [t if self.random.random() < self.right else (t + 1) % 64 for t in true]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


def prompts(count: int, length: int = 12) -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(64) for _ in range(length + n)] for n in range(count)]


def decoder_of(trained: TrainedHead) -> mlxspec.Decoder:
    decoder = mlxspec.Decoder(trained.model, endless_tokenizer(), Auto())
    decoder.costs = given_costs(FLAT)
    return decoder


def assert_same(kind: str, right: float | None, temp: float, count: int, texts: bool) -> None:
    trained = Instructed(kind, right)
    plain = mlxspec.Decoder(target(kind), endless_tokenizer())
    options = {"temp": temp, "seed": 7}
    own = [prompt * 3 if texts else prompt for prompt in prompts(count)]
    expected = [[r.token for r in plain.stream(prompt, TOKENS, **options)] for prompt in own]
    trained.contexts = [a + b for a, b in zip(own, expected, strict=True)]
    engine = Engine(decoder_of(trained), stall=float("inf"))
    found: list[list[mlxspec.GenerationResponse]] = [[] for _ in own]
    for prompt, responses in zip(own, found, strict=True):
        submit(engine, prompt, responses.append, TOKENS, **options)
    engine.run()
    for prompt, before, responses in zip(own, expected, found, strict=True):
        tokens = [response.token for response in responses]
        params = SamplingParams(temp=temp, seed=7)
        assert_same_output(target(kind), prompt, before, tokens, params)
    assert trained.drafted > 0
    if right:
        accepted = sum(responses[-1].stats.accepted for responses in found)
        assert accepted > TOKENS * count / 4


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("right", RIGHT)
def test_one_sequence(kind: str, right: str, temp: float) -> None:
    assert_same(kind, RIGHT[right], temp, 1, texts=False)


@pytest.mark.parametrize("count", [2, 3, 8] if LONG else [3])
@pytest.mark.parametrize("right", RIGHT)
def test_joint_steps_with_text(kind: str, right: str, count: int) -> None:
    for temp in TEMPERATURES:
        assert_same(kind, RIGHT[right], temp, count, texts=True)


@pytest.mark.parametrize("number", range(500 if LONG else 12))
def test_schedules(number: int) -> None:
    """Requests that join, pause and leave at any time, each with its own sampling."""
    pick = random.Random(number)
    kind = pick.choice([*KINDS])
    trained = Instructed(kind, pick.choice([*RIGHT.values()]))
    plain = mlxspec.Decoder(target(kind), endless_tokenizer())
    engine = Engine(decoder_of(trained), stall=float("inf"))
    runs = []
    for _ in range(pick.randint(1, 8)):
        prompt = [pick.randrange(64) for _ in range(pick.randint(1, 30))] * pick.randint(1, 3)
        options = {"temp": pick.choice(TEMPERATURES), "seed": pick.randrange(99)}
        options |= pick.choice([{}, {"top_p": 0.8}, {"top_k": 9}, {"repetition_penalty": 1.2}])
        count = pick.randint(1, TOKENS)
        expected = [r.token for r in plain.stream(prompt, count, **options)]
        trained.contexts.append(prompt + expected)
        runs.append((prompt, options, expected, count, list[mlxspec.GenerationResponse]()))
    waiting, running = list(runs), []
    while waiting or running:
        if waiting and pick.random() < 0.4:
            prompt, options, _, count, responses = waiting.pop()
            running.append(submit(engine, prompt, responses.append, count, **options))
        for request in running:
            if pick.random() < 0.02:
                engine.cancel(request)
        if not engine.turn():
            running = [request for request in running if not request.done]
    for prompt, options, expected, _, responses in runs:
        tokens = [response.token for response in responses]
        params = SamplingParams(**options)
        assert_same_output(target(kind), prompt, expected[: len(tokens)], tokens, params)
