"""The number of draft tokens, the guard and the probe, compared with exhaustive search."""

from __future__ import annotations

import itertools
import random

import pytest

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.planner import (
    Policy,
    allowed_shortfall,
    best_draft,
    expected_shortfall,
    expected_tokens,
    price_of_time,
    trees_pay,
)
from mlxspec.drafting.tree import DraftTree

PLAIN = VerifiedStep(DraftTree.chain(1), (2,), (2,), (), (2,))
DRAFTED = VerifiedStep(DraftTree.chain(1, [2, 3]), (2, 3, 4), (2, 3, 4), (1, 2), (2, 3, 4))


def account_for(policy: Policy, step: VerifiedStep, cost: float, *, gain: float = 0.8) -> None:
    policy.account_for(step, cost, gain=gain, probing=False)


def best(p_accept: list[float], costs: list[float], rate: float) -> tuple[float, int]:
    """Return the best chain length without a guard."""
    p_reached = list(itertools.accumulate(p_accept, lambda a, b: a * b))
    return best_draft(expected_tokens(p_reached), costs, rate)


def test_expected_tokens_add_up_the_probabilities() -> None:
    assert expected_tokens([0.5, 0.25]) == [1, 1.5, 1.75]


def test_nothing_is_worth_drafting_where_rows_cost_as_much_as_steps() -> None:
    assert best([0.99, 0.98, 0.97], [0.0, 1, 2, 3, 4], rate=1.0) == (0.0, 0)


def test_a_number_of_rows_behind_a_stair_is_found() -> None:
    gain, n_draft = best([0.99] * 6, [0.0, 1, 3, 3, 3, 3, 3, 3], rate=1.0)
    assert n_draft == 6
    assert gain > 0


def test_a_higher_rate_makes_time_expensive_and_drafts_shorter() -> None:
    costs = [0.0, 1, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8]
    p_accept = [0.9, 0.8, 0.8, 0.8, 0.8, 0.85]
    assert best(p_accept, costs, rate=1.0)[1] > best(p_accept, costs, rate=4.0)[1]


def test_the_choice_is_the_best_of_all_numbers() -> None:
    source = random.Random(4)
    for _ in range(100):
        p_reached = sorted((source.random() for _ in range(8)), reverse=True)
        costs = [0.0, 1.0, *sorted(source.uniform(1, 4) for _ in range(8))]
        expected = expected_tokens(p_reached)
        gain, n_draft = best_draft(expected, costs, 1.2)
        best = max(tokens / costs[rows] for rows, tokens in enumerate(expected, start=1))
        price = price_of_time(best, 1.2)
        gains = [expected[n] - price * costs[n + 1] for n in range(9)]
        assert gains[n_draft] == max(gains)
        assert gain == pytest.approx(max(gains) - gains[0])


def test_the_expected_shortfall_is_the_mean_over_all_outcomes() -> None:
    source = random.Random(3)
    for _ in range(50):
        p_accept = [source.random() for _ in range(4)]
        cost = source.uniform(1, 7)
        mean = 0.0
        for hits in itertools.product((True, False), repeat=4):
            probability = 1.0
            for hit, p in zip(hits, p_accept, strict=True):
                probability *= p if hit else 1 - p
            emitted = 1 + (hits.index(False) if False in hits else 4)
            mean += probability * max(0.0, cost - emitted)
        p_by_depth = list(itertools.accumulate(p_accept, lambda a, b: a * b))
        assert expected_shortfall(cost, p_by_depth) == pytest.approx(mean)


def test_the_guard_lets_sure_drafts_pass_and_stops_bold_ones() -> None:
    allowed = allowed_shortfall([Policy().bank], gain=0.1)
    assert expected_shortfall(1.75, [0.99]) <= allowed < expected_shortfall(1.75, [0.7])


def test_a_draft_may_risk_more_the_more_it_gains_and_the_more_there_is_to_lose() -> None:
    by_gain = [allowed_shortfall([0.35], gain) for gain in (0.0, 0.01, 0.1, 1.0, 10.0)]
    by_bank = [allowed_shortfall([bank], 2.0) for bank in (-1.0, 0.0, 0.35, 1.0, 5.0)]
    for allowed in by_gain, by_bank:
        assert allowed == sorted(allowed)
        assert allowed[0] == 0
    # Sequences that share a step pool their banks.
    assert allowed_shortfall([0.35] * 4, 0.1) == pytest.approx(2 * allowed_shortfall([0.35], 0.1))


def test_the_guard_allows_nothing_after_a_loss_until_it_is_earned_back() -> None:
    policy = Policy()
    account_for(policy, PLAIN, cost=5.0)
    assert allowed_shortfall([policy.bank], gain=1.0) < 0.001
    for _ in range(100):
        account_for(policy, PLAIN, cost=1.0)
    assert allowed_shortfall([policy.bank], gain=1.0) >= 0.001


def test_rate_and_gain_approach_those_of_the_steps() -> None:
    policy = Policy()
    first = policy.rate
    for _ in range(20):
        account_for(policy, DRAFTED, cost=1.5)  # three tokens at a cost of 1.5
    assert policy.rate == pytest.approx(2.0 - (2.0 - first) * 0.9**20)
    assert policy.gain == pytest.approx(0.8 - 0.8 * 0.9**20)


def test_short_outputs_count_as_one_long_one_for_probes() -> None:
    long, probe_step = Policy(), 0
    expected, probes = [], []
    for _ in range(18):
        short = Policy()
        short.probe_step = probe_step
        for _ in range(5):
            expected.append(long.probes)
            probes.append(short.probes)
            for policy in (short, long):
                policy.account_for(PLAIN, 1.0, gain=0.0, probing=True)
        probe_step = short.probe_step
    assert probes == expected
    assert any(probes)


def test_drafts_that_gain_much_are_not_interrupted_for_a_measurement() -> None:
    policy = Policy()
    for _ in range(120):
        assert not policy.probes
        policy.account_for(DRAFTED, 1.5, gain=0.8, probing=True)


def test_while_plain_steps_are_wanted_some_consecutive_steps_have_no_draft() -> None:
    policy = Policy()
    probes = []
    for _ in range(120):
        probes.append(policy.probes)
        policy.account_for(DRAFTED, 1.5, gain=0.2, probing=True)
    runs = [len(list(run)) for probing, run in itertools.groupby(probes) if probing]
    assert len(runs) > 1
    assert all(length > 3 for length in runs)  # a run's first and last steps give no time
    assert sum(runs) < 40
    policy.account_for(DRAFTED, 1.5, gain=0.2, probing=False)
    assert not policy.probes


@pytest.mark.parametrize(
    ("chip", "pay"),
    [("H200-like", True), ("CPU fp32 OpenBLAS", True), ("M4 Pro", False), ("linear", False)],
)
def test_trees_pay_where_rows_are_nearly_free(chip: str, pay: bool) -> None:
    assert trees_pay(known_chip(chip).curve) is pay


def test_a_model_that_verifies_no_drafts_gets_no_trees() -> None:
    assert not trees_pay(CostCurve([(1, 1)]))
