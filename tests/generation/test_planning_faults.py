"""A fault in planning only costs speed: the output is complete, and the log reports it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import mlxspec
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.planner import JointPlan, Planner, Policy
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import step
from mlxspec.generation.request import Request
from mlxspec.generation.scheduler import Scheduler
from tests.support.demo import FLAT, GivenCosts, given_costs, stand_in_decoder
from tests.support.schedulers import submit

pytestmark = pytest.mark.slow

PROMPTS = [
    "one two three four one two three four one two",
    '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]',
    "The history of the",
]
TOKENS = 24
LINE = re.compile(
    r"planning drafts has failed \(ValueError: math domain error, in test_planning_faults\.py:\d+\)"
    r": steps run without drafts"
)
OF_ONE = [
    (GivenCosts, "move_to"),
    (SuffixSource, "begin"),
    (SuffixSource, "search"),
    (Planner, "_gain_of_chain"),
    (JointPlan, "is_pipelined"),
    (Policy, "account_for"),
    (SuffixSource, "observe"),
    (GivenCosts, "record"),
    (GivenCosts, "end"),
    (SuffixSource, "end"),
]
OF_SEVERAL = [
    *OF_ONE,
    (step, "plan_drafts"),
    (GivenCosts, "for_sequences"),
]


def named(place: Any) -> str:
    return getattr(place, "__name__", str(place))


def breaks(patch: pytest.MonkeyPatch, place: Any, name: str, after: int) -> None:
    """Let a function fail after a number of calls."""
    usual: Callable[..., Any] = getattr(place, name)
    calls = 0

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise ValueError("math domain error")
        return usual(*args, **options)

    patch.setattr(place, name, broken)


def new_decoder() -> mlxspec.AutoDecoder:
    decoder = stand_in_decoder(mlxspec.AutoDecoder)
    decoder.costs = given_costs(FLAT)
    return decoder


@cache
def expected(prompt: str) -> list[int]:
    plain = stand_in_decoder(mlxspec.Decoder)
    return [response.token for response in plain.stream(prompt, TOKENS)]


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize(("place", "name"), OF_ONE, ids=named)
def test_a_generation_goes_on_alone(
    place: Any, name: str, after: int, monkeypatch: pytest.MonkeyPatch, planning_faults: list[str]
) -> None:
    decoder = new_decoder()
    breaks(monkeypatch, place, name, after)
    output = [response.token for response in decoder.stream(PROMPTS[0], TOKENS)]
    assert output == expected(PROMPTS[0])
    assert len(planning_faults) == 1 or (after and not planning_faults)
    assert all(map(LINE.fullmatch, planning_faults))
    planning_faults.clear()
    monkeypatch.undo()
    *_, last = decoder.stream(PROMPTS[0], TOKENS)  # the next generation drafts again
    assert last.stats.accepted > 0


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize(("place", "name"), OF_SEVERAL, ids=named)
def test_generations_go_on_together(
    place: Any, name: str, after: int, monkeypatch: pytest.MonkeyPatch, planning_faults: list[str]
) -> None:
    scheduler = Scheduler(new_decoder())
    breaks(monkeypatch, place, name, after)
    found: list[list[int]] = [[] for _ in PROMPTS]

    def submitted(prompt: str, tokens: list[int]) -> Request:
        return submit(scheduler, prompt, lambda response: tokens.append(response.token), TOKENS)

    requests = [submitted(*one) for one in zip(PROMPTS, found, strict=True)]
    scheduler.run()
    assert [request.error for request in requests] == [None] * 3
    assert found == [expected(prompt) for prompt in PROMPTS]
    assert len(planning_faults) <= len(requests) + 1  # a shared fault is logged once
    assert planning_faults or after
    assert all(map(LINE.fullmatch, planning_faults))
    planning_faults.clear()


def test_a_coroutine_goes_on(monkeypatch: pytest.MonkeyPatch, planning_faults: list[str]) -> None:
    breaks(monkeypatch, GivenCosts, "for_sequences", 0)
    decoder = new_decoder()

    async def output(prompt: str) -> list[int]:
        return [response.token async for response in decoder.astream(prompt, TOKENS)]

    async def outputs() -> list[list[int]]:
        return await asyncio.gather(*map(output, PROMPTS))

    assert asyncio.run(outputs()) == [expected(prompt) for prompt in PROMPTS]
    assert len(planning_faults) == 1
    planning_faults.clear()


class Failing(Drafter):
    """A custom drafter with a fault."""

    def __init__(self, place: str) -> None:
        self._place = place

    def _reach(self, place: str) -> None:
        if place == self._place:
            raise KeyError("a user's fault")

    def begin(self, prompt: Any) -> None:
        self._last = prompt[-1]
        self._reach("begin")

    def propose(self, max_depth: int) -> DraftTree:
        self._reach("propose")
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]
        self._reach("observe")

    def end(self) -> None:
        self._reach("end")


@pytest.mark.parametrize("place", ["begin", "propose", "observe", "end"])
def test_a_drafter_of_the_user_s_own_still_ends_the_generation(place: str) -> None:
    decoder = stand_in_decoder(mlxspec.AutoDecoder, extra_drafter=lambda: Failing(place))
    decoder.costs = given_costs(FLAT)
    with pytest.raises(KeyError, match="a user's fault"):
        list(decoder.stream(PROMPTS[0], TOKENS))
