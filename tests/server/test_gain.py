"""The reported gain of drafts, on quiet and busy machines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.sources import DrafterSource
from mlxspec.generation import scheduler
from mlxspec.server import metrics
from mlxspec.server.metrics import Metrics
from mlxspec.server.served_model import ServedModel
from mlxspec.server.worker import ModelQueue, ServedRequest, Worker
from tests.support.demo import FLAT
from tests.support.serving import served

PROMPT = "one two three four one two three four one two"
STEADY = (0.02,)
# Steps delayed by another program, steps with a long context, and one that was nearly done.
DISTURBED = (0.02, 3.0, 40.0, 0.0001, 0.5)


def run_requests(
    model: ServedModel, seconds: Sequence[float], monkeypatch: pytest.MonkeyPatch, count: int = 1
) -> tuple[list[ServedRequest], Worker]:
    """Run requests one after the other, with given step times."""
    time = itertools.accumulate(itertools.cycle(seconds))
    clock = SimpleNamespace(perf_counter=lambda: next(time))
    monkeypatch.setattr(scheduler, "time", clock)
    worker = Worker()
    worker.memory.add(model)
    queue = ModelQueue(model, worker)
    prompt = tuple(model.decoder.tokenizer.encode(PROMPT))
    requests = [ServedRequest(model, prompt, 40, {}) for _ in range(count)]
    stream: Any = Mock(requests=requests, worker=worker)
    for index, request in enumerate(requests):
        request.stream, request.index = stream, index
    worker.requests += requests
    queue.add(*requests)
    while queue.turn():
        pass
    assert all(request.outcome == "length" for request in requests)
    return requests, worker


def summed(worker: Worker, name: str) -> float:
    return sum(sums[name] for _, sums in worker.metrics._sums)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [STEADY, DISTURBED])
@pytest.mark.parametrize("count", [1, 3])
def test_without_drafts_nothing_is_gained_or_lost(
    seconds: Sequence[float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served()
    costs = cast(Any, model.decoder).costs

    def make_drafter(*args: object) -> Any:
        return Planner(costs.for_generation(), [DrafterSource(NoDraft())])

    monkeypatch.setattr(model, "make_drafter", make_drafter)
    requests, worker = run_requests(model, seconds, monkeypatch, count)
    assert [request.figures()["gain"] for request in requests] == pytest.approx([1.0] * count)
    assert summed(worker, "plain_seconds") == pytest.approx(summed(worker, "seconds"))


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_not_blamed_for_what_else_slows_steps(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (STEADY, DISTURBED):
        requests, _ = run_requests(served(), seconds, monkeypatch, count)
        for request in requests:
            assert request.stats.emitted > 1.2 * request.stats.steps
            # A step costs at most 1.05 plain steps and yields at least one token.
            assert request.figures()["gain"]
            assert request.figures()["gain"] > 1 / FLAT[16]
            if seconds == STEADY:
                assert request.figures()["gain"] == pytest.approx(
                    request.stats.emitted / request.stats.steps, rel=0.05
                )


def test_the_history_has_the_seconds_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    counted = Metrics()
    assert counted.history["generated"] == []
    counted._sum(generated=3, steps=1)
    now = 1000.9
    counted._sum(generated=2, forwards=1)
    now = 1002.5
    counted._sum(generated=7)
    columns = counted.history
    assert (columns["end"], columns["generated"], columns["steps"]) == (1002, [5, 0], [1, 0])
    now = 1301.0
    assert counted.history["generated"] == [0, 7, *[0] * 298]
