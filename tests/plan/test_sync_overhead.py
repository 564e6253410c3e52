"""The cost of waiting, on simulated runs of plain steps."""

from __future__ import annotations

import random

import pytest

from mlxspec.plan.live_costs import USUAL_SYNC_OVERHEAD, SyncOverhead


def learned(truth: float, noise: float, runs: int, seed: int = 0) -> list[float]:
    """The cost after each run of plain steps, whose times scatter by ``noise``."""
    generator = random.Random(seed)
    cost, values = SyncOverhead(), []
    for _ in range(runs):
        first, last, plain = (generator.lognormvariate(0, noise) for _ in range(3))
        cost.learn((1.8 + truth) * first + 0.2 * last - 2 * plain, noise)
        values.append(cost.value)
    return values


def test_until_a_step_has_waited_it_is_the_usual_one() -> None:
    assert SyncOverhead().value == USUAL_SYNC_OVERHEAD


def test_on_a_quiet_machine_a_few_runs_tell() -> None:
    assert learned(0.2, 0.02, 5)[-1] == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("truth", [0.0, 0.15])
def test_on_a_noisy_machine_it_stays_near_the_truth(truth: float) -> None:
    for seed in range(20):
        values = learned(truth, 0.15, 300, seed)
        assert max(values[:10]) < 0.25
        assert all(abs(value - truth) < 0.15 for value in values[50:])


def test_a_change_is_followed() -> None:
    generator = random.Random(1)
    cost = SyncOverhead()
    for truth in (0.05, 0.3):
        for _ in range(60):
            cost.learn(truth + generator.gauss(0, 0.05), 0.02)
        assert cost.value == pytest.approx(truth, abs=0.05)


def test_one_step_that_takes_an_age_changes_little() -> None:
    cost = SyncOverhead()
    for _ in range(20):
        cost.learn(0.1, 0.02)
    cost.learn(100.0, 0.02)
    assert cost.value < 0.15


def test_it_is_neither_negative_nor_above_half_a_step() -> None:
    for surplus, value in ((-1.0, 0.0), (3.0, 0.5)):
        cost = SyncOverhead()
        for _ in range(100):
            cost.learn(surplus, 0.02)
        assert cost.value == value
