"""The choice of the width, and the guard, against exhaustive reckoning."""

import itertools
import random

import pytest

from mlxspec.plan.policy import (
    Guard,
    expected_shortfall,
    expected_tokens,
    price_of_time,
    widths_by_worth,
)


def test_expected_tokens_add_up_the_reach() -> None:
    assert expected_tokens([0.5, 0.25]) == [1, 1.5, 1.75]


def test_nothing_is_worth_drafting_where_rows_cost_as_much_as_steps() -> None:
    expected = expected_tokens([0.99, 0.97, 0.9])
    costs = [0.0, 1, 2, 3, 4]
    assert widths_by_worth(expected, costs, price_of_time(expected, costs, rate=1.0)) == []


def test_a_width_behind_a_stair_is_found() -> None:
    expected = expected_tokens([0.9] * 6)
    costs = [0.0, 1, 3, 3, 3, 3, 3, 3]
    worths = widths_by_worth(expected, costs, price=1.0)
    assert worths[0] == (pytest.approx(6 * 0.9 - 2), 6)


def test_a_higher_rate_makes_time_dearer_and_drafts_shorter() -> None:
    expected = expected_tokens([0.9, 0.7, 0.55, 0.45, 0.35, 0.3])
    costs = [0.0, 1, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8]
    slow, fast = (
        widths_by_worth(expected, costs, price_of_time(expected, costs, rate))[0][1]
        for rate in (1.0, 4.0)
    )
    assert slow > fast


def test_the_expected_shortfall_is_the_mean_over_all_outcomes() -> None:
    source = random.Random(3)
    for _ in range(50):
        hazards = [source.random() for _ in range(4)]
        cost = source.uniform(1, 7)
        mean = 0.0
        for hits in itertools.product((True, False), repeat=4):
            probability = 1.0
            for hit, hazard in zip(hits, hazards, strict=True):
                probability *= hazard if hit else 1 - hazard
            emitted = 1 + (hits.index(False) if False in hits else 4)
            mean += probability * max(0.0, cost - emitted)
        reached = list(itertools.accumulate(hazards, lambda a, b: a * b))
        assert expected_shortfall(cost, reached) == pytest.approx(mean)


def test_the_guard_lets_sure_drafts_pass_and_stops_bold_ones() -> None:
    guard = Guard()
    assert guard.allows(expected_shortfall(1.75, [0.99]))
    assert not guard.allows(expected_shortfall(1.75, [0.7]))


def test_the_guard_allows_nothing_after_a_loss_until_it_is_earned_back() -> None:
    guard = Guard()
    guard.settle(emitted=1, cost=3.0)
    assert not guard.allows(0.001)
    for _ in range(100):
        guard.settle(emitted=1, cost=1.0)
    assert guard.allows(0.001)
    guard.begin()
    assert guard.bank == Guard().bank
