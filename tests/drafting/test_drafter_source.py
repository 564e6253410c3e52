"""A custom drafter's drafts as candidates, whose estimates stay probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.candidates import Candidates
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.sources import DrafterSource
from mlxspec.drafting.tree import DraftTree


def found(source: DrafterSource, max_depth: int = 100) -> DraftTree:
    """What it proposes."""
    (root,) = source.search(max_depth)
    return Candidates(2, [root], branching=True, max_depth=max_depth).tree(12)


class Always(Drafter):
    """Always drafts the same tokens."""

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last, [1] * 20)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


@pytest.mark.parametrize(("token", "first"), [(1, 0.99), (2, 0.01)])
def test_no_draft_becomes_certain_or_impossible(token: int, first: float) -> None:
    source = DrafterSource(Always())
    source.begin([token])
    step = VerifiedStep(DraftTree.chain(token), (token,), (token,), (), (token,))
    for _ in range(400):
        proposed = found(source)
        source.observe(step)
    assert proposed.p_reached[0] == pytest.approx(first)


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_time_that_a_drafter_takes_is_no_cost_of_rows(
    pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(PromptLookupDrafter):
        def propose(self, max_depth: int) -> DraftTree:
            now[0] += 0.01
            return super().propose(max_depth)

    class Recorded(FixedCosts):
        def record(self, rows: int, seconds: float, pipelined: bool, head: float = 0.0) -> None:
            recorded.append(seconds)

    recorded: list[float] = []
    planner = Planner(Recorded(CostCurve([(1, 1.0), (32, 1.1)])), [DrafterSource(Slow())])
    planner.begin([1, 2, 3])
    for token in (4, 5, 6):
        planner.propose(5)
        tree, tokens = DraftTree.chain(token - 1), (token,)
        times = {"seconds": 0.05, "pipelined": pipelined}  # and a GPU ran the forward
        planner.observe(VerifiedStep(tree, tokens, tokens, (), tokens, **times))
    planner.end()
    assert recorded == pytest.approx([0.04] * 3)


def test_probabilities_that_a_drafter_knows_are_taken_and_a_limit_is_an_integer() -> None:
    class Knowing(Always):
        def propose(self, max_depth: int) -> DraftTree:
            depth = min(max_depth, 2)
            return DraftTree((self._last, *[1] * depth), range(-1, depth), (0.9, 0.3)[:depth])

    source = DrafterSource(Knowing())
    source.begin([2])
    step = VerifiedStep(DraftTree.chain(2), (2,), (2,), (), (2,))
    for _ in range(3):
        proposed = found(source)
        source.observe(step)
    assert proposed.p_reached == pytest.approx((0.9, 0.3))
    assert proposed.origins == ("Knowing",) * 2
    assert found(source, 1).p_reached == (0.9,)


def test_all_sources_end_even_if_a_user_s_drafter_raises() -> None:
    class Ending(Always):
        def __init__(self, name: str, fails: bool = False) -> None:
            self._name, self._fails = name, fails

        def end(self) -> None:
            ended.append(self._name)
            if self._fails:
                raise KeyError("a user's fault")

    ended: list[str] = []
    planner = Planner(
        FixedCosts(CostCurve([(1, 1.0), (32, 1.1)])),
        [DrafterSource(Ending("first", fails=True)), DrafterSource(Ending("second"))],
    )
    planner.begin([1, 2, 3])
    with pytest.raises(KeyError, match="a user's fault"):
        planner.end()
    assert ended == ["first", "second"]
