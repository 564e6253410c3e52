"""Drafts from a predicted output."""

from __future__ import annotations

import random

import pytest

from mlxspec.bench.replay import replay
from mlxspec.drafting.chips import known_chip
from tests.support.planners import suffix_planner

CURVE = known_chip("M4 Pro").curve


def noise(count: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(3000) for _ in range(count)]


@pytest.mark.parametrize("prompt", [[1], noise(100, seed=1)])
def test_an_output_that_follows_its_prediction_is_drafted_from_the_first_token(
    prompt: list[int],
) -> None:
    expected = noise(200, seed=2)
    drafter = suffix_planner(CURVE, prediction=expected)
    steps = replay(prompt, expected, drafter)
    assert steps.cost(CURVE) < 200 / 3
    assert len(steps.rows) < 200 / 8


def test_after_a_change_the_output_is_found_in_the_prediction_again() -> None:
    expected = noise(200, seed=3)
    output = [*expected[:50], *noise(5, seed=4), *expected[60:120], *expected[20:50]]
    drafter = suffix_planner(CURVE, prediction=expected)
    assert replay([1, 2], output, drafter).cost(CURVE) < len(output) / 2


def test_a_wrong_prediction_costs_next_to_nothing() -> None:
    drafter = suffix_planner(CURVE, prediction=noise(200, seed=5))
    assert replay([1, 2], noise(200, seed=6), drafter).cost(CURVE) < 203


def test_the_next_generation_has_its_own_prediction_and_counts_what_it_drafts() -> None:
    drafter = suffix_planner(CURVE, prediction=noise(100, seed=7))
    (source,) = drafter._sources
    for prompt in ([1, 2], [3]):
        replay(prompt, noise(100, seed=7), drafter)
        assert source.earned["prediction"] > 80
