"""Costs updated by steps: context lengths, threads and the sync overhead."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import StepTime
from mlxspec.drafting.costs import LiveCosts
from mlxspec.drafting.time_filter import STEP_SECONDS, USUAL_SYNC_OVERHEAD, TimeFilter
from tests.support.costs import live_costs
from tests.support.threads import at_once


def times(cost: float) -> list[StepTime]:
    return [StepTime(1, 0.02, 0.05), StepTime(8, 0.02 * cost, 0.05)]


def plain(costs: LiveCosts, seconds: float) -> None:
    """Record a short pipeline. Only the times in its middle are those of single steps."""
    costs.record(1, 1.6 * seconds, False)
    costs.record(1, seconds, True)
    costs.record(1, seconds, True)
    costs.record(1, 0.3 * seconds, True)


CLIFF = {1: 0.02, 4: 0.024, 8: 0.04, 12: 0.05, 16: 0.052}
GROWTH = {1: 2e-6, 4: 2e-6, 8: 2.4e-6, 12: 12e-6, 16: 12e-6}
"""Seconds per position and number of rows; above 8 rows, attention leaves its fast kernel."""


def behind(context: int, rows: int) -> float:
    """Return a step's time on a machine whose attention has a cliff."""
    at = sorted(CLIFF)
    return float(np.interp(rows, at, [CLIFF[row] + context * GROWTH[row] for row in at]))


def measured(*contexts: int, rows: Sequence[int] = tuple(CLIFF)) -> dict[int, list[StepTime]]:
    """Return measurements on that machine."""
    return {
        context: [StepTime(row, behind(context, row), 0.05) for row in rows] for context in contexts
    }


@pytest.mark.parametrize("context", [64, 500, 4000, 8000, 20_000])
@pytest.mark.parametrize("rows", [4, 8, 12, 16])
def test_times_at_two_context_lengths_determine_all_others(context: int, rows: int):
    costs = live_costs(measured(64, 8000))
    costs.move_to(context)
    truth = behind(context, rows) / behind(context, 1)
    assert costs.curve(rows) == pytest.approx(truth, rel=0.03)
    assert costs.plain_seconds * costs.curve(rows) == pytest.approx(behind(context, rows), rel=0.05)


def test_of_several_context_lengths_the_nearest_two_count():
    known = {context: times(cost) for context, cost in ((64, 2.0), (1024, 2.0), (4096, 4.0))}
    costs = live_costs(known)
    for context, cost in ((0, 2.0), (500, 2.0), (2560, 3.0), (4096, 4.0), (8000, 6.67)):
        costs.move_to(context)
        assert costs.curve(8) == pytest.approx(cost, rel=0.03)


def test_rows_that_were_measured_at_one_length_only_follow_from_their_neighbours():
    known = measured(64) | measured(8000, rows=(1, 4, 16))
    costs = live_costs(known)
    costs.move_to(8000)
    # Interpolated between 4 and 16 rows, so the cliff is invisible.
    between = GROWTH[4] + (GROWTH[16] - GROWTH[4]) * 8 / 12
    expected = (behind(64, 12) + between * 8128) / behind(8000, 1)
    assert costs.curve(12) == pytest.approx(expected, rel=0.03)
    costs.move_to(64)
    assert costs.curve(12) == pytest.approx(behind(64, 12) / behind(64, 1))
    wider = TimeFilter(measured(64) | measured(8000, rows=(1, 4, 8)))
    grown = GROWTH[8] * 8000  # the growth of the widest measured step
    assert wider.curve(8000)(16) == pytest.approx((CLIFF[16] + grown) / behind(8000, 1), rel=0.03)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_wrong_growth_is_corrected_where_steps_run_and_elsewhere(wrong: float):
    known = measured(64) | {
        8000: [StepTime(row, behind(64, row) + wrong * 8128 * GROWTH[row], 0.05) for row in CLIFF]
    }
    costs = live_costs(known)
    chance = random.Random(1)
    for _ in range(400):
        context = chance.choice((500, 16_000))
        costs.move_to(context)
        for rows in (8, 12):
            plain(costs, behind(context, 1) * chance.lognormvariate(0, 0.02))
            costs.record(rows, behind(context, rows) * chance.lognormvariate(0, 0.02), False)
    for context, error in ((500, 0.1), (16_000, 0.1), (8_192, 0.1)):
        costs.move_to(context)
        for rows in (8, 12):
            assert costs.curve(rows) == pytest.approx(
                behind(context, rows) / behind(context, 1), rel=error
            )
    again = LiveCosts(costs.known())  # the saved costs, as the next process loads them
    again.move_to(16_000)
    assert again.curve(12) == pytest.approx(costs_at(costs, 16_000), rel=0.05)


def costs_at(costs: LiveCosts, context: int) -> float:
    costs.move_to(context)
    return costs.curve(12)


def test_joint_steps_do_not_begin_with_a_cost_that_was_measured_badly():
    times = ((1, 0.01, 0.02), (2, 0.2, 1.1), (4, 0.02, 0.02), (8, 0.03, 0.02), (32, 0.09, 0.02))
    curve = live_costs({64: [StepTime(*time) for time in times]}).for_sequences(2).curve
    assert [curve(rows) for rows in (1, 3, 7)] == pytest.approx([1, 1, 1.5], rel=0.02)


def test_sequences_that_share_a_step_attend_to_a_context_each():
    costs = live_costs(measured(64, 8000)).for_sequences(4)
    costs.move_to(8000)
    linear = CostCurve([(row, CLIFF[row] / CLIFF[1]) for row in CLIFF])
    truth = CLIFF[1] * linear(4) + 4 * 8000 * GROWTH[1]
    assert costs.plain_seconds == pytest.approx(truth, rel=0.05)
    more = CLIFF[1] * linear(16) + 4 * 8000 * GROWTH[4]  # 4 rows of each
    assert costs.plain_seconds * costs.curve(13) == pytest.approx(more, rel=0.05)


def test_only_the_middle_of_a_pipeline_teaches_the_time_of_a_plain_step():
    costs = live_costs({1024: times(2.0)})
    for _ in range(30):
        plain(costs, 0.02)
        costs.record(8, 0.04, False)
    assert costs.plain_seconds == pytest.approx(0.02)
    assert costs.curve(8) == pytest.approx(2.0)
    for _ in range(30):
        costs.record(1, 0.05, False)
        costs.record(1, 0.001, True)
        costs.record(8, 0.04, False)
    assert costs.plain_seconds == pytest.approx(0.02)
    assert costs.curve(8) == pytest.approx(2.0)


def test_the_cost_of_waiting_is_that_of_plain_steps_outside_the_pipeline() -> None:
    costs = live_costs({1024: [StepTime(1, 0.010, 0.01), StepTime(8, 0.020, 0.01)]})
    for _ in range(80):
        costs.record(1, 0.012, False)
        costs.record(8, 0.020, False)
    assert costs.sync_overhead == pytest.approx(0.2, abs=0.02)
    for _ in range(60):
        costs.record(1, 0.018, False)  # a pipeline's first step dispatches two forwards
        costs.record(1, 0.010, True)
        costs.record(1, 0.010, True)
        costs.record(1, 0.003, True)  # the last step's forward is nearly done already
        costs.record(8, 0.020, False)
    assert costs.sync_overhead == pytest.approx(0.1, abs=0.02)


def test_plain_steps_are_wanted_until_they_have_run_among_drafted_ones_and_again_later() -> None:
    costs = live_costs({1024: [StepTime(1, 0.010, 0.01), StepTime(8, 0.020, 0.01)]})
    for _ in range(50):
        costs.record(1, 0.010, True)
    assert costs.wants_plain_steps  # nothing is known of drafted steps yet
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
    costs = live_costs(
        {1024: [StepTime(r, s * (wrong if r == 1 else 1), 0.1) for r, s in true.items()]}
    )
    generator = random.Random(3)
    sought = 0
    for _ in range(200):
        sought = sought + 1 if costs.wants_plain_steps else 0
        rows = 1 if sought % 30 >= 24 else generator.choice((4, 8, 16))  # six plain steps in a row
        costs.record(rows, true[rows] * generator.lognormvariate(0, 0.05), rows == 1)
    for rows in (4, 8, 16):
        assert costs.curve(rows) == pytest.approx(true[rows] / true[1], rel=0.06)


def test_a_plain_step_that_was_measured_too_slow_is_corrected_by_the_few_that_run() -> None:
    true = {1: 0.0045, 4: 0.0073, 8: 0.0091, 16: 0.0106}
    costs = live_costs(
        {1024: [StepTime(r, s * (1.5 if r == 1 else 1), 0.05) for r, s in true.items()]}
    )
    for round_ in range(40):
        if costs.wants_plain_steps or round_ % 10 == 0:
            for _ in range(4):
                costs.record(1, true[1], True)
        for rows in (4, 8, 16):
            costs.record(rows, true[rows], False)
    for rows in (4, 8, 16):
        assert costs.curve(rows) == pytest.approx(true[rows] / true[1], rel=0.1)


def test_generations_beside_each_other_have_runs_of_their_own():
    """Plain steps of one between those of the other do not start or end its runs."""

    steps = [(1, 0.012, False), *[(1, 0.010, True)] * 20, *[(8, 0.021, False)] * 30]
    shared, in_turn = live_costs({64: times(2.0)}), live_costs({64: times(2.0)})
    beside = [shared.for_generation() for _ in range(3)]
    for step in steps:
        for own in beside:
            own.record(*step)
    for _ in range(3):
        own = in_turn.for_generation()
        for step in steps:
            own.record(*step)
    assert shared.curve(8) == pytest.approx(in_turn.curve(8), rel=0.02)
    assert shared.sync_overhead == pytest.approx(in_turn.sync_overhead, rel=0.2)


def test_threads_may_record_and_read_at_once():
    costs = live_costs({1024: times(2.0)})

    def generate(seed: int) -> None:
        own = costs.for_generation()
        chance = random.Random(seed)
        for context in range(0, 40_000, 100):
            own.move_to(context)
            rows = chance.choice((1, 1, 2, 3, 5, 9, 17))
            own.record(rows, 0.01 * (1 + rows / 8) * chance.uniform(0.5, 2), rows == 1)
            assert own.curve(64) >= own.curve(2) > 0
            own.known()

    at_once(*[lambda seed=seed: generate(seed) for seed in range(4)])


def test_until_a_step_has_waited_it_is_the_usual_one() -> None:
    assert live_costs({1024: times(2.0)}).sync_overhead == USUAL_SYNC_OVERHEAD


@pytest.mark.parametrize(("truth", "noise"), [(0.0, 0.1), (0.15, 0.1), (0.3, 0.02)])
def test_a_noisy_machine_shows_it_too(truth: float, noise: float) -> None:
    for seed in range(10):
        costs, generator = live_costs({1024: [StepTime(1, 0.01, 0.01)]}), random.Random(seed)
        for _ in range(100):
            first, last = (generator.lognormvariate(0, noise) for _ in range(2))
            costs.record(1, 0.01 * (1.8 + truth) * first, False)
            costs.record(1, 0.01 * 0.2 * last, True)
            costs.record(4, 0.02, False)
        assert costs.sync_overhead == pytest.approx(truth, abs=0.12)


def test_one_step_that_takes_an_age_changes_little() -> None:
    costs = live_costs({1024: times(2.0)})
    costs.record(1, 5.0, False)
    costs.record(8, 0.04, False)
    assert costs.sync_overhead < 0.08


def test_it_is_neither_negative_nor_above_half_a_step() -> None:
    for waits, value in ((0.001, 0.0), (0.08, 0.5)):
        costs = live_costs({1024: times(2.0)})
        for _ in range(100):
            costs.record(1, waits, False)
            costs.record(8, 0.04, False)
        assert costs.sync_overhead == pytest.approx(value, abs=0.01)


FALLING = [StepTime(1, 0.010, 0.05), StepTime(8, 0.012, 0.05), StepTime(16, 0.008, 0.05)]
ANY_TIME = st.builds(
    StepTime,
    rows=st.integers(1, 200),
    seconds=st.floats(*STEP_SECONDS),
    uncertainty=st.floats(0, 10),
)
ANY_STEP = st.tuples(st.integers(1, 200), st.floats(), st.booleans())


def check_makes_sense(costs: LiveCosts) -> None:
    """Assert that all costs are finite and that more rows never cost less."""
    table = costs.curve.table
    assert table[:2] == [0, 1]
    assert table == sorted(table)
    assert all(map(math.isfinite, table))
    assert all(cost >= 0 for cost in costs.curve.row_costs)
    assert 0 < costs.plain_seconds < math.inf
    assert 1 <= costs.curve(64) < math.inf
    assert 0 <= costs.sync_overhead <= 0.5
    assert costs.wants_plain_steps in (True, False)


def test_times_that_fall_with_the_rows_make_costs_of_several_sequences():
    for count in range(2, 65):
        check_makes_sense(live_costs({1024: FALLING}).for_sequences(count))


@given(
    plain=ANY_TIME,
    others=st.lists(ANY_TIME),
    steps=st.lists(ANY_STEP, max_size=30),
    counts=st.lists(st.integers(2, 80), max_size=3),
    contexts=st.lists(st.integers(0, 1 << 40), min_size=3, max_size=3, unique=True),
    random=st.randoms(use_true_random=False),
)
def test_no_times_make_an_estimate_that_fails(
    plain: StepTime,
    others: list[StepTime],
    steps: list[tuple[int, float, bool]],
    counts: list[int],
    contexts: list[int],
    random: random.Random,
):
    times = [*others, replace(plain, rows=1)]
    random.shuffle(times)
    first, second, context = contexts
    alone = live_costs({first: times, second: [*times[::2], replace(plain, rows=1)]})
    for costs in (alone, *map(alone.for_sequences, counts)):
        check_makes_sense(costs)
        for rows, seconds, pipelined in steps:
            costs.record(rows, seconds, pipelined)
            check_makes_sense(costs)
        costs.move_to(context)
        check_makes_sense(costs)
        again = LiveCosts(costs.known())
        check_makes_sense(again.for_sequences(2))
    for count in counts:  # with the costs learned from one sequence's steps
        check_makes_sense(alone.for_sequences(count))
