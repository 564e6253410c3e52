"""Costs that follow the steps: ranges of context lengths, threads, and the sync overhead."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.costs import (
    FIRST_OVERHEAD,
    USUAL_SYNC_OVERHEAD,
    KnownTime,
    LiveCosts,
    context_range,
    next_overhead,
)
from tests.support.threads import at_once


def times(cost: float) -> list[KnownTime]:
    return [KnownTime(1, 0.02, 0.05), KnownTime(8, 0.02 * cost, 0.05)]


def plain(costs: LiveCosts, seconds: float) -> None:
    """A short pipeline: its time is conserved, and only that in its middle is a step's."""
    costs.record(1, 1.6 * seconds, False)
    costs.record(1, seconds, True)
    costs.record(1, seconds, True)
    costs.record(1, 0.3 * seconds, True)


@pytest.mark.parametrize(
    ("context", "end"),
    [(0, 1024), (1023, 1024), (1024, 4096), (4095, 4096), (16000, 16384), (100_000, 262_144)],
)
def test_ranges_end_at_powers_of_four(context: int, end: int):
    assert context_range(context) == end


def test_each_range_has_its_own_curve():
    costs = LiveCosts({1024: times(2.0), 16384: times(3.0)})
    assert costs.curve(8) == pytest.approx(2.0)
    costs.move_to(5000)
    assert costs.curve(8) == pytest.approx(3.0)
    assert costs.seconds(8) == pytest.approx(0.06)
    costs.move_to(1023)
    assert costs.curve(8) == costs.curve(8) == pytest.approx(2.0)


def test_each_generation_has_a_prediction_of_its_own():
    shared = LiveCosts({1024: times(2.0)})
    first, second = shared.for_generation(), shared.for_generation()
    first.record(8, 0.04, False)
    first.record(1, 0.02, False)
    first.record(1, 0.02, True)
    second.record(8, 0.04, False)
    assert first.predicted == pytest.approx(2.0 + 1.0 + 1.0, rel=0.001)
    assert second.predicted == pytest.approx(2.0, rel=0.01)


def test_an_unmeasured_range_starts_from_the_nearest_and_learns_for_itself():
    costs = LiveCosts({1024: times(2.0), 65536: times(4.0)})
    costs.move_to(3000)
    assert costs.curve(8) == pytest.approx(2.0)
    for _ in range(30):
        plain(costs, 0.03)
        costs.record(8, 0.09, False)
    assert costs.curve(8) == pytest.approx(3.0, rel=0.05)
    costs.move_to(0)
    assert costs.curve(8) == pytest.approx(2.0)


def test_a_range_that_was_left_expects_the_machine_to_have_changed():
    costs = LiveCosts({1024: times(2.0), 4096: times(2.0)})
    for _ in range(50):
        plain(costs, 0.02)
    costs.move_to(2000)
    costs.move_to(0)
    plain(costs, 0.03)
    assert costs.slowdown > 1.4


def test_changes_are_the_ranges_in_which_steps_ran():
    costs = LiveCosts({1024: times(2.0), 4096: times(2.0), 16384: times(2.0)})
    assert costs.changes() == {}
    costs.move_to(2000)
    costs.record(8, 0.05, False)
    assert costs.unsaved_steps == 1
    assert list(costs.changes()) == [4096]
    assert costs.unsaved_steps == 0
    assert costs.changes() == {}


def test_only_the_middle_of_a_pipeline_teaches_the_time_of_a_plain_step():
    costs = LiveCosts({1024: times(2.0)})
    for _ in range(30):
        plain(costs, 0.02)
        costs.record(8, 0.04, False)
    assert costs.seconds(1) == pytest.approx(0.02)
    assert costs.curve(8) == pytest.approx(2.0)
    for _ in range(30):
        costs.record(1, 0.05, False)
        costs.record(1, 0.001, True)
        costs.record(8, 0.04, False)
    assert costs.seconds(1) == pytest.approx(0.02)
    assert costs.curve(8) == pytest.approx(2.0)


def test_the_cost_of_waiting_is_that_of_plain_steps_outside_the_pipeline() -> None:
    costs = LiveCosts({1024: [KnownTime(1, 0.010, 0.01), KnownTime(8, 0.020, 0.01)]})
    for _ in range(30):
        costs.record(1, 0.012, False)
        costs.record(8, 0.020, False)
    assert costs.sync_overhead == pytest.approx(0.2, abs=0.02)
    for _ in range(20):
        costs.record(1, 0.018, False)  # the first of a pipeline dispatches two forwards
        costs.record(1, 0.010, True)
        costs.record(1, 0.010, True)
        costs.record(1, 0.003, True)  # and the last one finds its own nearly done
        costs.record(8, 0.020, False)
    assert costs.sync_overhead == pytest.approx(0.1, abs=0.02)


def test_plain_steps_are_wanted_until_they_have_run_among_drafted_ones_and_again_later() -> None:
    costs = LiveCosts({1024: [KnownTime(1, 0.010, 0.01), KnownTime(8, 0.020, 0.01)]})
    for _ in range(50):
        costs.record(1, 0.010, True)
    assert costs.wants_plain_steps  # of drafted ones nothing is known yet
    for _ in range(10):
        costs.record(8, 0.020, False)
        plain(costs, 0.010)
    assert not costs.wants_plain_steps
    for _ in range(1000):
        costs.record(8, 0.020, False)
    assert costs.wants_plain_steps


@pytest.mark.parametrize("wrong", [0.6, 1.0, 1.6])
def test_costs_are_learned_where_plain_steps_run_only_when_they_are_wanted(wrong: float) -> None:
    true = {1: 0.0045, 4: 0.0073, 8: 0.0091, 16: 0.0106}
    costs = LiveCosts(
        {1024: [KnownTime(r, s * (wrong if r == 1 else 1), 0.1) for r, s in true.items()]}
    )
    generator = random.Random(3)
    sought = 0
    for _ in range(200):
        sought = sought + 1 if costs.wants_plain_steps else 0
        rows = 1 if sought % 30 >= 24 else generator.choice((4, 8, 16))  # six in a row
        costs.record(rows, true[rows] * generator.lognormvariate(0, 0.05), rows == 1)
    for rows in (4, 8, 16):
        assert costs.curve(rows) == pytest.approx(true[rows] / true[1], rel=0.06)


def test_a_plain_step_that_was_measured_too_slow_is_corrected_by_the_few_that_run() -> None:
    true = {1: 0.0045, 4: 0.0073, 8: 0.0091, 16: 0.0106}
    costs = LiveCosts(
        {1024: [KnownTime(r, s * (1.5 if r == 1 else 1), 0.05) for r, s in true.items()]}
    )
    for round_ in range(40):
        if costs.wants_plain_steps or round_ % 10 == 0:
            for _ in range(4):
                costs.record(1, true[1], True)
        for rows in (4, 8, 16):
            costs.record(rows, true[rows], False)
    for rows in (4, 8, 16):
        assert costs.curve(rows) == pytest.approx(true[rows] / true[1], rel=0.1)


def test_generations_beside_each_other_learn_what_each_alone_would():
    """Of their own context's range, and from their own runs of plain steps."""
    short = [(1, 0.012, False), *[(1, 0.010, True)] * 20, *[(8, 0.021, False)] * 30]
    long = [(1, 0.022, False), *[(1, 0.020, True)] * 20, *[(8, 0.061, False)] * 30]
    lessons = [(500, short), (2000, long)]

    def known() -> LiveCosts:
        return LiveCosts({1024: times(2.0), 4096: times(2.0)})

    alone = []
    for context, steps in lessons:
        costs = known().for_generation()
        costs.move_to(context)
        for step in steps:
            costs.record(*step)
        alone.append(costs.curve(8))

    shared = known()
    beside = [shared.for_generation() for _ in lessons]
    for costs, (context, _) in zip(beside, lessons, strict=True):
        costs.move_to(context)
    for pair in zip(short, long, strict=True):
        for costs, step in zip(beside, pair, strict=True):
            costs.record(*step)
    assert [costs.curve(8) for costs in beside] == alone
    assert alone[0] < alone[1]
    assert shared.unsaved_steps == sum(costs.unsaved_steps for costs in beside) / 2 > 60
    assert set(shared.changes()) == {1024, 4096}


def test_threads_may_record_and_read_at_once():
    costs = LiveCosts({1024: times(2.0)})

    def generate(seed: int) -> None:
        own = costs.for_generation()
        chance = random.Random(seed)
        for context in range(0, 40_000, 100):
            own.move_to(context)
            rows = chance.choice((1, 1, 2, 3, 5, 9, 17))
            own.record(rows, 0.01 * (1 + rows / 8) * chance.uniform(0.5, 2), rows == 1)
            assert own.curve(64) >= own.curve(2) > 0
            own.changes()

    at_once(*[lambda seed=seed: generate(seed) for seed in range(4)])


def learned(truth: float, noise: float, runs: int, seed: int = 0) -> list[float]:
    """The cost after each run of plain steps, whose times scatter by ``noise``."""
    generator = random.Random(seed)
    cost, values = FIRST_OVERHEAD, []
    for _ in range(runs):
        first, last, plain = (generator.lognormvariate(0, noise) for _ in range(3))
        cost = next_overhead(cost, (1.8 + truth) * first + 0.2 * last - 2 * plain, noise)
        values.append(cost[0])
    return values


def test_until_a_step_has_waited_it_is_the_usual_one() -> None:
    assert LiveCosts({1024: times(2.0)}).sync_overhead == USUAL_SYNC_OVERHEAD


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
    cost = FIRST_OVERHEAD
    for truth in (0.05, 0.3):
        for _ in range(60):
            cost = next_overhead(cost, truth + generator.gauss(0, 0.05), 0.02)
        assert cost[0] == pytest.approx(truth, abs=0.05)


def test_one_step_that_takes_an_age_changes_little() -> None:
    cost = FIRST_OVERHEAD
    for _ in range(20):
        cost = next_overhead(cost, 0.1, 0.02)
    assert next_overhead(cost, 100.0, 0.02)[0] < 0.15


def test_it_is_neither_negative_nor_above_half_a_step() -> None:
    for waits, value in ((0.001, 0.0), (0.08, 0.5)):
        costs = LiveCosts({1024: times(2.0)})
        for _ in range(100):
            costs.record(1, waits, False)
            costs.record(8, 0.04, False)
        assert costs.sync_overhead == value


FALLING = [KnownTime(1, 0.010, 0.05), KnownTime(8, 0.012, 0.05), KnownTime(16, 0.008, 0.05)]
ANY_TIME = st.builds(
    KnownTime,
    rows=st.integers(1, 200),
    seconds=st.floats(allow_nan=False, allow_infinity=False),
    uncertainty=st.floats(allow_nan=False, allow_infinity=False),
)
ANY_STEP = st.tuples(st.integers(1, 200), st.floats(), st.booleans())


def check_makes_sense(costs: LiveCosts) -> None:
    """All that a planner and a scheduler read is finite, and more rows never cost less."""
    table = costs.curve.table
    assert table[:2] == [0, 1]
    assert table == sorted(table)
    assert all(map(math.isfinite, table))
    assert all(cost >= 0 for cost in costs.curve.cheapest_rows)
    assert 0 < costs.seconds(1) <= costs.seconds(64) < math.inf
    assert 0 < costs.slowdown < math.inf
    assert 0 <= costs.sync_overhead <= 0.5
    assert 0 <= costs.predicted < math.inf
    assert costs.wants_plain_steps in (True, False)


def test_times_that_fall_with_the_rows_make_costs_of_several_sequences():
    for count in range(2, 65):
        check_makes_sense(LiveCosts({1024: FALLING}).for_sequences(count))


@given(
    plain=ANY_TIME,
    others=st.lists(ANY_TIME),
    steps=st.lists(ANY_STEP, max_size=30),
    counts=st.lists(st.integers(2, 80), max_size=3),
    context=st.integers(0, 1 << 40),
    random=st.randoms(use_true_random=False),
)
def test_no_times_make_an_estimate_that_fails(
    plain: KnownTime,
    others: list[KnownTime],
    steps: list[tuple[int, float, bool]],
    counts: list[int],
    context: int,
    random: random.Random,
):
    times = [*others, replace(plain, rows=1)]
    random.shuffle(times)
    alone = LiveCosts({1024: times})
    for costs in (alone, *map(alone.for_sequences, counts)):
        check_makes_sense(costs)
        for rows, seconds, pipelined in steps:
            costs.record(rows, seconds, pipelined)
            check_makes_sense(costs)
        costs.move_to(context)
        check_makes_sense(costs)
        again = LiveCosts(costs.changes() or {1024: FALLING})
        check_makes_sense(again.for_sequences(2))
    for count in counts:  # with what the steps of one have taught
        check_makes_sense(alone.for_sequences(count))
