"""Sharing a joint step's rows, on texts whose drafts are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.accept import VerifiedStep, accept
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import StepTime
from mlxspec.drafting.costs import Costs, FixedCosts
from mlxspec.drafting.planner import Planner, Policy, plan_drafts
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.drafting.tree import DraftTree
from tests.drafting.test_live_costs import ANY_TIME
from tests.support.costs import live_costs
from tests.support.planners import suffix_planner

# A few rows are nearly free; the others cost more than they can gain.
FOUR_FREE = CostCurve([(1, 1), (5, 1.01), (6, 20), (64, 80)])
# A draft of eight tokens makes a step half as long again.
DEAR = CostCurve([(1, 1), (2, 1.5), (9, 1.5), (10, 20), (64, 80)])
TEXT = list(range(100, 130)) * 2 + list(range(100, 110))


def trees(planners: Sequence[Planner], costs: Costs, **options: Any) -> list[DraftTree]:
    """Return the drafts that are planned together."""
    plans = plan_drafts(dict.fromkeys(planners, 64), costs, **options)
    for planner, plan in zip(planners, plans, strict=True):
        planner.shared_plan = plan
    return [planner.propose(64) for planner in planners]


def drafts(*planners: Planner) -> list[int]:
    """Return each sequence's number of draft nodes, all after the same text."""
    costs = FixedCosts(FOUR_FREE, sync_overhead=0.0)
    return [len(tree) - 1 for tree in trees(planners, costs, sequences=len(planners))]


def copying(rate: float) -> Planner:
    """Return a planner in the middle of a copy, whose sequence has had this rate."""
    planner = suffix_planner(FOUR_FREE)
    planner.begin(TEXT)
    planner.policy.rate = rate
    return planner


def test_equal_sequences_share_equally() -> None:
    assert drafts(copying(1.2), copying(1.2)) == [2, 2]


def test_rows_go_to_the_slower_of_equal_drafts() -> None:
    assert drafts(copying(4.0), copying(1.0)) == [0, 4]
    assert drafts(copying(1.0), copying(4.0)) == [4, 0]


@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_one_sequence_drafts_whatever_its_rate(rate: float) -> None:
    assert drafts(copying(rate)) == [4]


def test_an_empty_bank_allows_nothing_and_the_banks_of_all_count() -> None:
    poor, rich, richer = (copying(1.2) for _ in range(3))
    for planner, bank in ((poor, 0.0), (rich, 9.0), (richer, 9.0)):
        planner.policy.bank = bank
    assert drafts(poor) == [0]
    assert drafts(rich) == [4]
    assert drafts(rich, richer) == [2, 2]
    assert drafts(poor, rich) == [2, 2]


def test_a_forward_that_is_dispatched_is_interrupted_for_all_or_for_none() -> None:
    costs = FixedCosts(FOUR_FREE, sync_overhead=4.0)  # more than these drafts gain

    def drafted(ahead: bool) -> int:
        planners = [copying(1.2), copying(1.2)]
        planners[0].policy.ahead = ahead  # the other one has just joined
        return sum(len(tree) - 1 for tree in trees(planners, costs, sequences=2))

    assert drafted(ahead=False) == 4
    assert drafted(ahead=True) == 0


@pytest.mark.parametrize("patient", [False, True])
def test_no_sequence_waits_long_for_the_drafts_of_others(patient: bool) -> None:
    copies, waits = copying(1.2), suffix_planner(DEAR)
    waits.begin(range(200, 240))  # nothing repeats
    for planner in (copies, waits):
        planner.policy.bank = 100.0
    waits.policy.patience = 0.1  # has waited already
    costs = FixedCosts(DEAR, sync_overhead=0.0)
    waits.policy.patience = 0.3
    copied, _ = trees([copies, waits], costs, sequences=2, patient=patient)
    assert (len(copied) > 1) is patient
    waits.policy.patience = 4.0
    copied, _ = trees([copies, waits], costs, sequences=2, patient=patient)
    assert len(copied) > 1


def plain_step(seconds: float = 0.0) -> VerifiedStep:
    return VerifiedStep(DraftTree.chain(9), (9,), (9,), (), (9,), planning_seconds=seconds)


def test_planning_that_does_not_pay_takes_a_small_share_of_the_time() -> None:
    """Text that never repeats, in steps of a second, of which planning takes a tenth."""
    planner = suffix_planner(FOUR_FREE)
    searches = []

    def search(max_depth: int) -> list[Any]:
        searches.append(max_depth)
        return []

    planner._sources[0].search = search
    planner.begin(range(200, 240))
    planner.policy.gain = 0.0
    for _ in range(1000):
        before = len(searches)
        planner.propose(64)
        planner.observe(plain_step(0.1 * (len(searches) - before)))
    assert 0.018 < 0.1 * len(searches) / 1000 < 0.022
    assert planner.policy.bank > 1


def test_drafts_are_searched_for_again_though_every_step_takes_time_to_plan() -> None:
    policy, searches = Policy(), 0
    for _ in range(1000):
        searches += policy.budget >= 0
        policy.account_for(plain_step(), 1.0, gain=0.0, probing=False, planning_time=0.1)
    assert 150 < searches < 250


def test_while_drafts_pay_planning_is_never_skipped() -> None:
    policy = Policy()
    for _ in range(100):
        policy.account_for(plain_step(), 1.0, gain=0.3, probing=False, planning_time=0.3)
        assert policy.budget >= 0
    for _ in range(100):  # however long nothing pays, a few steps without planning suffice
        policy.account_for(plain_step(), 1.0, gain=0.0, probing=False, planning_time=0.3)
    for _ in range(26):
        policy.account_for(plain_step(), 1.0, gain=0.0, probing=False)
    assert policy.budget >= 0


def test_one_probe_serves_all_sequences_of_a_joint_step() -> None:
    costs = FixedCosts(FOUR_FREE, sync_overhead=0.0, wants_plain_steps=True)
    planners = [copying(1.2), copying(1.2)]
    drafted = []
    for costs.steps in range(360):
        for planner in planners:
            planner.policy.gain = 0.1
        drafted.append(any(len(tree) > 1 for tree in trees(planners, costs, sequences=2)))
    assert drafted.count(False) == 12
    planners[0].policy.gain = 0.3  # together more than the least gain
    costs.steps = drafted.index(False)
    assert all(len(tree) > 1 for tree in trees(planners, costs, sequences=2))


@given(
    plain=ANY_TIME,
    others=st.lists(ANY_TIME),
    seconds=st.lists(st.floats(), min_size=4, max_size=4),
    rows_taken=st.integers(0, 70),
)
def test_no_step_times_make_planning_fail(
    plain: StepTime,
    others: list[StepTime],
    seconds: list[float],
    rows_taken: int,
) -> None:
    costs = live_costs({1024: [*others, replace(plain, rows=1)]})
    together = costs.for_sequences(3)
    planners = [Planner(costs, [SuffixSource()]) for _ in range(2)]
    for planner in planners:
        planner.begin(TEXT)
    for number, taken in enumerate(seconds):
        alone = number % 2
        if alone:
            drafted = [planner.propose(64) for planner in planners]
        else:
            drafted = trees(planners, together, sequences=3, rows_taken=rows_taken)
        for planner, tree in zip(planners, drafted, strict=True):
            nodes, tokens = accept(tree, [TEXT[30 + number]] * len(tree))
            rows, sequences = (len(tree), 1) if alone else (len(tree) + 2, 3)
            step = VerifiedStep(
                *(tree, (), (), nodes, tokens),
                rows=rows,
                sequences=sequences,
                seconds=taken,
                context=80,
                pipelined=planner.pipelined,
            )
            planner.observe(step)
            together.record(rows, taken, planner.pipelined)
    for planner in planners:
        planner.end()
        assert not planner.failed
