"""Measurements on a simulated machine whose clock only advances with steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import StepTime
from mlxspec.drafting.measurement import (
    CAREFUL,
    MeasurementPlan,
    cost_errors,
    measure,
    noise,
)
from mlxspec.drafting.time_filter import TimeFilter

SHORT = replace(CAREFUL, rows=CAREFUL.rows[:9], seconds=1.8, least_uncertainty=0.08)

APPLE = ("M2 Pro", "M4 Pro", "M3 Max", "M5 Max", "M3 Ultra")


class Machine:
    """Takes a curve's times; the first step of each width takes half as long again."""

    def __init__(self, curve: CostCurve, plain_seconds: float) -> None:
        self.now = 100.0
        self.speed: Callable[[], float] = lambda: 1.0
        self.widths: list[int] = []
        self._curve = curve
        self._plain_seconds = plain_seconds

    def plain(self, tokens: int) -> list[float]:
        self._step(1)  # fills the pipeline
        return [self._step(1) for _ in range(tokens)]

    def drafted(self, rows: int) -> float:
        return self._step(rows)

    def _step(self, rows: int) -> float:
        warm = 1 if rows in self.widths else 1.5
        self.widths.append(rows)
        seconds = self._plain_seconds * self._curve(rows) * self.speed() * warm
        self.now += seconds
        return seconds

    def clock(self) -> float:
        return self.now


def run(machine: Machine, plan=SHORT, max_rows: int = 64, prefill: float = 0.25):
    started = machine.now
    machine.now += prefill
    return measure(machine.plain, machine.drafted, plan, max_rows, started, machine.clock)


@pytest.mark.parametrize("chip", APPLE)
@pytest.mark.parametrize("plain_seconds", [0.010, 0.025, 0.040])
def test_on_a_mac_a_quick_measurement_ends_within_3_seconds(chip: str, plain_seconds: float):
    machine = Machine(known_chip(chip).curve, plain_seconds)
    times = run(machine)
    assert machine.now - 100 < 3
    assert {1, 2, 4, 8} <= {time.rows for time in times}


@pytest.mark.parametrize("chip", APPLE)
def test_a_quick_measurement_of_25_ms_steps_gives_the_chip_s_curve(chip: str):
    truth = known_chip(chip).curve
    times = run(Machine(truth, 0.025))
    live = TimeFilter({64: times})
    rows = {time.rows for time in times}
    assert {1, 2, 4, 8, 16} <= rows
    assert {5, 6} <= rows or chip == "M2 Pro"  # with the slowest rows
    for width in range(1, 17):
        assert live.curve(64)(width) == pytest.approx(truth(width), rel=0.2)


def test_the_first_step_of_each_width_warms_up_and_does_not_count():
    times = run(Machine(known_chip("M4 Pro").curve, 0.004))
    assert {time.rows: time.seconds for time in times}[8] == pytest.approx(0.004 * 2.69)
    assert min(time.steps for time in times) >= 10
    assert all(time.uncertainty == SHORT.least_uncertainty for time in times)


def test_a_machine_that_heats_up_meanwhile_still_gives_the_curve():
    machine = Machine(known_chip("M4 Pro").curve, 0.01)
    machine.speed = lambda: 1 + (machine.now - 100) / 40
    times = {time.rows: time.seconds for time in run(machine, CAREFUL)}
    for rows in (2, 8, 32):
        assert times[rows] / times[1] == pytest.approx(known_chip("M4 Pro").curve(rows), rel=0.05)


def test_a_busy_machine_gives_the_curve():
    truth = known_chip("M4 Pro").curve
    for seed in range(20):
        machine = Machine(truth, 0.001)
        disturbed = np.random.default_rng(seed).random(20_000) < 0.35
        steps = iter(disturbed)
        machine.speed = lambda: 2.0 if next(steps) else 1.0  # noqa: B023
        times = {time.rows: time for time in run(machine)}
        assert machine.now - 100 < 3
        for rows in (2, 4, 8, 16):
            assert times[rows].steps == SHORT.rounds
            assert times[rows].seconds / times[1].seconds == pytest.approx(truth(rows), rel=0.15)


def test_a_machine_too_slow_for_the_budget_measures_a_plain_step_and_what_else_fits():
    slow = Machine(known_chip("linear").curve, 0.5)
    assert [time.rows for time in run(slow)] == [1]
    assert slow.now - 100 < 10
    assert [time.rows for time in run(Machine(known_chip("linear").curve, 5.0), prefill=20.0)] == [
        1
    ]


def test_no_step_is_wider_than_the_model_allows():
    machine = Machine(known_chip("M4 Pro").curve, 0.01)
    assert [time.rows for time in run(machine, max_rows=7)] == [1, 2, 4, 5, 6]
    assert max(machine.widths) == 6
    assert [time.rows for time in run(Machine(known_chip("linear").curve, 0.01), max_rows=1)] == [1]


def test_progress_rises_to_the_whole():
    machine = Machine(known_chip("M4 Pro").curve, 0.025)
    shares: list[float] = []
    measure(machine.plain, machine.drafted, SHORT, 64, machine.now, machine.clock, shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
    assert shares[-1] == 1


@pytest.mark.parametrize("plan", [SHORT, CAREFUL])
def test_the_last_rows_before_a_stair_are_measured_before_those_behind_it(plan: MeasurementPlan):
    for before, behind in ((5, 6), (10, 12)):
        assert plan.rows.index(before) < plan.rows.index(behind)
    assert 13 in CAREFUL.rows


class Scattered:
    """A machine with steps of 10 ms that other programs lengthen at random."""

    def __init__(self, seed: int, lengthened: Callable[[np.random.Generator], float]) -> None:
        self._random = np.random.default_rng(seed)
        self._lengthened = lengthened

    def plain(self, tokens: int) -> list[float]:
        return [0.01 * self._lengthened(self._random) for _ in range(tokens)]

    def drafted(self, rows: int) -> float:
        return 0.01 * self._lengthened(self._random)

    def measured(self) -> list[StepTime]:
        return measure(self.plain, self.drafted, CAREFUL, 64, 0.0, lambda: 0.0)


def normal(random: np.random.Generator) -> float:
    return 1 + 0.1 * random.standard_normal()


def doubled(share: float) -> Callable[[np.random.Generator], float]:
    return lambda random: (1 + 0.02 * random.random()) * (2 if random.random() < share else 1)


def test_the_true_quartile_is_within_the_error_19_times_of_20():
    quartile = 0.01 * (1 - 0.6745 * 0.1)
    times = [time for seed in range(50) for time in Scattered(seed, normal).measured()]
    within = [
        abs(time.seconds - quartile) <= 1.96 * time.uncertainty * time.seconds for time in times
    ]
    assert 0.93 <= np.mean(within) <= 1
    # The interval is not much wider than necessary: a quartile of n values has 1.36 σ / √n.
    needed = [1.96 * 1.36 * 0.1 / np.sqrt(time.steps) for time in times]
    assert 1.96 * np.mean([time.uncertainty for time in times]) < 1.7 * np.mean(needed)


def test_a_time_of_few_steps_is_uncertain_and_none_is_certain():
    slow = Machine(known_chip("linear").curve, 5.0)
    assert run(slow, prefill=20.0)[0].uncertainty > 0.1


def test_the_error_of_a_cost_is_that_of_a_quotient():
    random = np.random.default_rng(2)
    quotients = random.normal(1, 0.06, 200_000) / random.normal(1, 0.04, 200_000)
    plain, drafted = cost_errors([StepTime(1, 0.01, 0.04), StepTime(8, 0.02, 0.06)])
    assert plain == 0
    low, high = np.quantile(quotients, [0.025, 0.975])
    assert drafted == pytest.approx((high - low) / 2, rel=0.03)


@pytest.mark.parametrize("lengthened", [normal, doubled(0.0), doubled(0.2), doubled(0.4)])
def test_a_slightly_busy_machine_is_no_noise(lengthened: Callable[[np.random.Generator], float]):
    assert [noise(Scattered(seed, lengthened).measured()) for seed in range(20)] == [None] * 20


def test_times_that_scatter_all_over_are_noise():
    for seed in range(20):
        reason = noise(Scattered(seed, lambda random: random.lognormal(0, 1)).measured())
        assert reason is not None
        assert "half of the costs T(M)/T(1) are known only to ±" in reason


def test_times_that_fall_by_half_are_noise_and_a_small_fall_is_a_kernel_s():
    def of(wide: float) -> str | None:
        return noise(
            [
                StepTime(1, 0.01, 0.0, 1),
                StepTime(8, 0.05, 0.0, 1),
                StepTime(9, wide, 0.0, 1),
            ]
        )

    assert of(0.03) is None
    assert of(0.02) == ("the times contradict each other: 8 rows took 50 ms, and 9 rows 20 ms")


def test_a_row_that_costs_many_plain_steps_is_noise():
    def of(two: float) -> str | None:
        return noise([StepTime(1, 0.01, 0.0, 10), StepTime(2, two, 0.0, 10)])

    assert of(0.04) is None
    assert of(0.327) == ("the times contradict each other: 1 rows took 10 ms, and 2 rows 327 ms")


def test_single_steps_are_noise_where_plain_ones_scatter():
    """On a busy or slow machine, there is time for only one step of each width."""

    def once(*speeds: float) -> list[StepTime]:
        machine = Machine(known_chip("M4 Pro").curve, 0.01)
        machine.speed = itertools.chain(speeds, itertools.repeat(1.0)).__next__
        return run(machine, replace(SHORT, rounds=1))

    busy, slow = once(1.0, 1.0, 1.8, 1.0, 2.5, 1.2), once()
    assert {time.steps for time in (*busy[1:], *slow[1:])} == {1}
    assert "the times scatter too much" in noise(busy)
    assert noise(slow) is None
    assert min(time.uncertainty for time in busy[1:]) > 0.5


def test_few_steps_on_a_slow_machine_are_no_noise():
    slow = Machine(known_chip("linear").curve, 0.2)
    times = run(slow, CAREFUL)
    assert min(time.steps for time in times) < 3
    assert noise(times) is None


@pytest.mark.parametrize("ticks", [0.0, 0.01])
def test_a_clock_that_is_too_coarse_for_a_step_gives_a_time(ticks: float):
    """By this clock, most steps take no time and some take one tick."""
    machine = Machine(known_chip("linear").curve, 0.001)
    machine.speed = iter([0.0, ticks, 0.0, 0.0] * 1000).__next__
    times = run(machine)
    assert all(time.seconds > 0 and math.isfinite(time.uncertainty) for time in times)
