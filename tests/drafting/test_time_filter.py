"""A live curve tracks simulated machines with known curves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import StepTime
from mlxspec.drafting.time_filter import WIDEST, TimeFilter
from tests.support.interrupts import functions_of, interrupted_anywhere

M4 = known_chip("M4 Pro").curve
FLAT = known_chip("CPU fp32 OpenBLAS").curve
LINEAR = known_chip("linear").curve
MIXED = (1, 1, 1, 2, 4, 5, 8, 16)
PLAIN_SECONDS = 0.025
CONTEXT = 64


def measured(
    truth: CostCurve, rows: Sequence[int] = (1, 2, 4, 8, 16, 32), uncertainty: float = 0.1
) -> TimeFilter:
    """Return the curve after a correct measurement."""
    return TimeFilter({CONTEXT: [StepTime(r, PLAIN_SECONDS * truth(r), uncertainty) for r in rows]})


def run(
    live: TimeFilter,
    truth: CostCurve,
    steps: int,
    *,
    rows: Sequence[int] = MIXED,
    speed: Callable[[int], float] = lambda step: 1.0,
    noise: float = 0.03,
    spikes: float = 0.0,
) -> list[float]:
    """Decode on a simulated machine; return the worst relative error of a cost after each step."""
    generator = random.Random(1)
    errors = []
    for step in range(steps):
        width = generator.choice(rows)
        seconds = PLAIN_SECONDS * truth(width) * speed(step) * generator.lognormvariate(0, noise)
        if generator.random() < spikes:
            seconds *= generator.uniform(2, 20)
        live.record(width, CONTEXT, seconds)
        errors.append(max(abs(math.log(live.curve(CONTEXT)(r) / truth(r))) for r in rows))
    return errors


def test_a_measured_curve_is_believed_before_the_first_step():
    live = measured(M4)
    assert [live.curve(CONTEXT)(rows) for rows in (1, 2, 4, 8)] == pytest.approx(
        [1, 1.03, 1.47, 2.69]
    )
    assert live.plain_seconds(CONTEXT) * live.curve(CONTEXT)(8) == pytest.approx(0.025 * 2.69)
    assert live.slowdown == pytest.approx(1)


def test_a_right_curve_stays_right_in_noise():
    assert max(run(measured(M4), M4, 1000)) < 0.06
    assert max(run(measured(M4), M4, 1000, noise=0.2)) < 0.25


def test_a_hot_machine_is_noticed_and_leaves_the_costs_alone():
    live = measured(M4)
    errors = run(live, M4, 600, speed=lambda step: 2.0 if step >= 500 else 1.0)
    assert live.slowdown == pytest.approx(2.0, rel=0.1)
    assert live.plain_seconds(CONTEXT) * live.curve(CONTEXT)(8) == pytest.approx(
        2 * 0.025 * 2.69, rel=0.1
    )
    assert max(errors[500:]) < 0.06


def test_a_machine_that_heats_up_in_the_middle_of_drafted_steps_leaves_the_costs_alone():
    live = measured(M4)
    run(live, M4, 200)
    errors = run(live, M4, 100, rows=[8], speed=lambda step: 1.7)
    assert live.slowdown == pytest.approx(1.7, rel=0.1)
    assert max(errors) < 0.06


def test_a_machine_that_slows_down_by_and_by_leaves_the_costs_alone():
    live = measured(M4)
    assert max(run(live, M4, 1000, speed=lambda step: 1 + step / 1000)) < 0.06
    assert live.slowdown == pytest.approx(2.0, rel=0.1)


def test_drafted_steps_that_take_longer_than_measured_hardly_change_what_a_plain_step_takes():
    truth = CostCurve([(r, 1.0 if r == 1 else 1.3 * FLAT(r)) for r in (1, 2, 4, 8, 16, 32)])
    live = measured(FLAT, uncertainty=0.02)
    run(live, truth, 10, rows=[1])
    run(live, truth, 100, rows=[2, 4, 8, 16])
    assert live.slowdown == pytest.approx(1, abs=0.06)


def test_a_temporary_load_does_not_change_the_costs():
    errors = run(measured(M4), M4, 1000, speed=lambda step: 1.5 if step // 50 % 2 else 1.0)
    assert max(errors) < 0.1


@pytest.mark.parametrize("change", [0.5, 1.4])
def test_plain_steps_that_change_alone_are_distinguished_from_the_machine(change: float):
    live = TimeFilter({CONTEXT: [StepTime(1, PLAIN_SECONDS, 0.03)]})
    generator = random.Random(1)

    def rounds(number: int, plain: float) -> None:
        for _ in range(number):
            for rows in [4] * 24 + [1] * 4:
                cost = 1.5 if rows == 4 else plain
                live.record(rows, CONTEXT, PLAIN_SECONDS * cost * generator.lognormvariate(0, 0.02))

    rounds(20, plain=1)
    assert live.curve(CONTEXT)(4) == pytest.approx(1.5, rel=0.03)
    rounds(20, plain=change)
    assert live.curve(CONTEXT)(4) == pytest.approx(1.5 / change, rel=0.03)
    live.record(6, CONTEXT, PLAIN_SECONDS * 2)  # more rows than any step before
    assert 1.5 / change <= live.curve(CONTEXT)(6) < 3 / change


def test_a_burst_of_another_program_s_work_leaves_the_costs_alone():
    live = measured(M4)
    run(live, M4, 200)
    # Another program's threads slow down wide steps only; some narrow steps run in between.
    for _ in range(6):
        for rows in (1, 8, 1):
            live.record(rows, CONTEXT, PLAIN_SECONDS * M4(rows) * (5 if rows == 8 else 1))
    assert live.curve(CONTEXT)(8) == pytest.approx(M4(8), rel=0.1)


def test_one_outlier_changes_nothing():
    live = measured(M4)
    run(live, M4, 100)
    before = [live.curve(CONTEXT)(rows) for rows in range(1, WIDEST)]
    for rows in MIXED:
        live.record(rows, CONTEXT, 5.0)
    assert [live.curve(CONTEXT)(rows) for rows in range(1, WIDEST)] == before
    assert live.slowdown == pytest.approx(1, rel=0.05)


def test_spikes_are_overcome():
    errors = run(measured(M4), M4, 2000, spikes=0.05)
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert sum(error > 0.1 for error in errors) < 0.05 * len(errors)


@pytest.mark.parametrize(("believed", "truth"), [(FLAT, LINEAR), (LINEAR, FLAT)])
def test_a_wrong_curve_becomes_right_where_steps_run(believed: CostCurve, truth: CostCurve):
    errors = run(measured(believed), truth, 300)
    assert errors[0] > 0.3
    assert max(errors[100:]) < 0.15
    assert max(errors[200:]) < 0.1


def test_a_wrong_time_of_plain_steps_is_corrected_for_rows_that_never_run():
    known = [StepTime(1, PLAIN_SECONDS / 1.5, 0.2)]  # makes all costs 1.5 times too high
    known += [StepTime(r, PLAIN_SECONDS * M4(r), 0.05) for r in (4, 8, 16)]
    live = TimeFilter({CONTEXT: known})
    assert live.curve(CONTEXT)(16) == pytest.approx(1.5 * M4(16))
    run(live, M4, 300, rows=(1, 1, 4))
    assert live.curve(CONTEXT)(4) == pytest.approx(M4(4), rel=0.05)
    assert live.curve(CONTEXT)(16) < 1.3 * M4(16)


def test_a_number_of_rows_between_measured_ones_is_learned_from_its_first_steps():
    stairs = CostCurve([(1, 1), (8, 2), (9, 4), (16, 4)])
    live = measured(stairs, rows=(1, 8, 16))
    assert live.curve(CONTEXT)(10) == pytest.approx(2.5)
    run(live, stairs, 30, rows=(1, 10))
    assert live.curve(CONTEXT)(10) == pytest.approx(4, rel=0.1)
    assert live.curve(CONTEXT)(12) == pytest.approx(4, rel=0.1)


def test_a_stair_that_was_not_measured_hardly_changes_what_was():
    truth = known_chip("M3 Max").curve
    live = measured(truth, rows=(1, 2, 3, 4, 6, 8, 12, 16, 32))
    run(live, truth, 60, rows=(1, 9))
    for rows in (9, 12, 16):
        assert live.curve(CONTEXT)(rows) == pytest.approx(truth(rows), rel=0.1)


def test_rows_that_were_measured_after_a_long_context_only_are_known_after_all():
    short = {1: 0.02, 5: 0.026, 11: 0.032, 24: 0.05}
    long = {1: 0.024, 4: 0.038, 8: 0.056, 16: 0.070}
    known = {64: short, 8000: long}
    live = TimeFilter({c: [StepTime(r, s, 0.05) for r, s in known[c].items()] for c in known})
    for context, times in known.items():
        for rows, seconds in times.items():
            assert live.curve(context)(rows) == pytest.approx(seconds / times[1])
    curve = live.curve(64)
    assert curve(1) < curve(4) < curve(5) < curve(8) < curve(11) < curve(16) < curve(24)
    assert curve(16) == pytest.approx(curve(11) * 70 / np.interp(11, [8, 16], [56, 70]))


def test_costs_never_fall_with_the_rows():
    live = TimeFilter(
        {CONTEXT: [StepTime(r, s, 0.02) for r, s in ((1, 1.0), (12, 3.0), (16, 2.7))]}
    )
    assert live.curve(CONTEXT)(16) == live.curve(CONTEXT)(12) == pytest.approx(math.sqrt(3 * 2.7))


def test_a_cost_that_was_measured_badly_does_not_raise_those_that_are_known():
    times = ((1, 1.0, 0.02), (2, 20.0, 1.1), (4, 2.0, 0.02), (8, 12.0, 1.1), (16, 4.0, 0.02))
    live = TimeFilter({CONTEXT: [StepTime(*time) for time in times]})
    curve = live.curve(CONTEXT)
    assert [curve(rows) for rows in (2, 4, 8, 16)] == pytest.approx([2, 2, 4, 4], rel=0.01)


@pytest.mark.parametrize("worst", [2, 8, 16])
def test_drafts_pay_again_soon_after_a_measurement_on_a_busy_machine(worst: int):
    times = [StepTime(1, PLAIN_SECONDS, 0.2)]
    times += [
        StepTime(r, 40 * PLAIN_SECONDS if r == worst else PLAIN_SECONDS * M4(r), 1.0)
        for r in range(2, 33)
    ]
    live = TimeFilter({CONTEXT: times})
    for step in range(300):
        # Like a planner: the widest step whose optimistic cost is below half its rows.
        hopeful = live.hopeful(CONTEXT)
        rows = max((r for r in range(1, 17) if hopeful(r) < 0.5 * r), default=1) if step % 4 else 1
        live.record(rows, CONTEXT, PLAIN_SECONDS * M4(rows))
        live.ran(rows)
    assert live.curve(CONTEXT)(16) == pytest.approx(M4(16), rel=0.1)


def test_beyond_the_widest_measured_step_rows_cost_what_the_measured_ones_do_on_average():
    live = TimeFilter({CONTEXT: [StepTime(1, 0.02, 0.02), StepTime(32, 0.08, 0.02)]})
    assert live.curve(CONTEXT).widest == WIDEST
    assert live.curve(CONTEXT)(64) == pytest.approx(8)


def test_without_drafted_steps_rows_cost_what_they_usually_do():
    curve = TimeFilter({CONTEXT: [StepTime(1, 0.02, 0.02)]}).curve(CONTEXT)
    assert [curve(rows) for rows in (1, 4, 16)] == pytest.approx([1, 2, 4])
    curve = TimeFilter({CONTEXT: [StepTime(1, 0.02, 0.02), StepTime(2, 0.022, 0.02)]}).curve(
        CONTEXT
    )
    assert [curve(rows) for rows in (2, 8, 32)] == pytest.approx([1.1, 2.2, 4.4])


@pytest.mark.parametrize("truth", [FLAT, M4, LINEAR])
def test_a_few_steps_correct_usual_costs_for_all_rows(truth: CostCurve):
    live = TimeFilter({CONTEXT: [StepTime(1, PLAIN_SECONDS, 0.02)]})
    run(live, truth, 24, rows=(1, 1, 4, 7))
    for rows in (4, 7, 8):
        assert live.curve(CONTEXT)(rows) == pytest.approx(truth(rows), rel=0.15)
    for rows in (2, 16):  # within the accuracy of a power law
        assert live.curve(CONTEXT)(rows) == pytest.approx(truth(rows), rel=0.45)


def test_what_was_assumed_and_did_not_run_is_not_known():
    live = TimeFilter({CONTEXT: [StepTime(1, PLAIN_SECONDS, 0.02)]})
    live.record(4, CONTEXT, PLAIN_SECONDS * 1.3)
    assert [time.rows for time in live.known(assumed=False)[CONTEXT]] == [1, 4]


def test_where_costs_are_known_there_is_nothing_to_hope_for():
    live = measured(M4)
    run(live, M4, 100)
    assert live.hopeful(CONTEXT) is live.curve(CONTEXT)


def test_costs_of_rows_that_never_run_become_uncertain_until_a_step_runs():
    live = measured(LINEAR, uncertainty=0.05)
    believed = [live.curve(CONTEXT)(rows) for rows in range(1, WIDEST + 1)]
    for _ in range(300):
        live.record(1, CONTEXT, PLAIN_SECONDS)
        live.ran(1)
    assert [live.curve(CONTEXT)(rows) for rows in range(1, WIDEST + 1)] == believed
    assert live.hopeful(CONTEXT)(2) < 1.2
    assert live.hopeful(CONTEXT)(4) < 2
    assert live.stddev < 0.2  # plain steps are known, so the first drafted step settles it
    live.record(2, CONTEXT, 2 * PLAIN_SECONDS)
    assert (
        live.hopeful(CONTEXT)(2)
        == pytest.approx(live.curve(CONTEXT)(2))
        == pytest.approx(2, rel=0.1)
    )


def test_what_one_process_doubts_the_next_one_doubts_more():
    live = measured(LINEAR, uncertainty=0.05)
    for process in range(9):
        for _ in range(80):  # too few steps for one process to try a draft
            live.record(1, CONTEXT, PLAIN_SECONDS)
            live.ran(1)
        if process == 0:
            assert live.hopeful(CONTEXT)(2) > 1.5
        live = TimeFilter(live.known(assumed=False))
        assert live.curve(CONTEXT)(2) == pytest.approx(2)
    for _ in range(80):
        live.record(1, CONTEXT, PLAIN_SECONDS)
        live.ran(1)
    assert live.hopeful(CONTEXT)(2) < 1.2
    for _ in range(3):
        live.record(2, CONTEXT, 2 * PLAIN_SECONDS)
    again = TimeFilter(live.known(assumed=False))
    assert again.hopeful(CONTEXT)(2) == pytest.approx(2, rel=0.1)


def test_a_time_that_no_step_has_shown_stays_as_uncertain_from_process_to_process():
    wrong = [StepTime(1, PLAIN_SECONDS, 0.0), StepTime(2, 3 * PLAIN_SECONDS, 0.15)]
    known = {CONTEXT: [*wrong, StepTime(16, M4(16) * PLAIN_SECONDS, 0.02)]}
    for _ in range(20):
        live = TimeFilter(known)
        for _ in range(30):
            live.record(1, CONTEXT, PLAIN_SECONDS)
            live.record(16, CONTEXT, M4(16) * PLAIN_SECONDS)
        known = live.known()
        assert known[CONTEXT][1].uncertainty == pytest.approx(0.15)
    live = TimeFilter(known)
    for _ in range(10):
        live.record(1, CONTEXT, PLAIN_SECONDS)
        live.record(16, CONTEXT, M4(16) * PLAIN_SECONDS)
        live.record(2, CONTEXT, M4(2) * PLAIN_SECONDS)
    assert live.curve(CONTEXT)(2) == pytest.approx(M4(2), rel=0.1)


def test_only_rows_that_have_not_run_lately_are_hoped_to_be_cheaper():
    live = measured(LINEAR, uncertainty=0.05)
    for _ in range(300):
        live.record(4, CONTEXT, 4 * PLAIN_SECONDS)
        live.ran(4)
    assert live.hopeful(CONTEXT)(4) == pytest.approx(live.curve(CONTEXT)(4))
    assert live.hopeful(CONTEXT)(8) < 0.6 * live.curve(CONTEXT)(8)


def test_the_curve_is_the_same_object_until_a_cost_changes():
    live = measured(M4)
    run(live, M4, 200, noise=0)
    curve = live.curve(CONTEXT)
    run(live, M4, 20, noise=0)
    assert live.curve(CONTEXT) is curve
    run(live, LINEAR, 50, noise=0)
    assert live.curve(CONTEXT) is not curve


def test_what_is_known_is_in_times_of_the_cool_machine_and_starts_the_next_run():
    live = measured(LINEAR)
    run(live, M4, 300, speed=lambda step: 1.8)
    known = live.known()[CONTEXT]
    assert [time.rows for time in known] == sorted({*MIXED, 32})
    assert known[0].seconds == pytest.approx(PLAIN_SECONDS)
    again = TimeFilter({CONTEXT: known})
    assert again.curve(CONTEXT)(8) == pytest.approx(M4(8), rel=0.05)
    assert again.slowdown == pytest.approx(1)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_interrupt_anywhere_in_a_lesson_leaves_a_curve_that_goes_on_learning():
    def knowing() -> TimeFilter:
        live = measured(LINEAR, rows=(1, 4))
        run(live, LINEAR, 10, rows=(1, 4))
        return live

    def learn(live: TimeFilter) -> None:
        for rows in (4, 7, 1, 3, 7):
            live.record(rows, CONTEXT, PLAIN_SECONDS * M4(rows))
            live.curve(CONTEXT)

    for live in interrupted_anywhere(functions_of(TimeFilter), knowing, learn):
        errors = run(live, M4, 300, rows=(1, 3, 4, 5, 7))
        assert errors[-1] < 0.1


step = st.tuples(
    st.integers(-1, 200),
    st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-5, 1e3),
)


@given(st.lists(step, max_size=60))
def test_whatever_is_recorded_the_curve_is_a_curve(steps: list[tuple[int, float]]):
    live = measured(M4)
    for rows, seconds in steps:
        live.record(rows, CONTEXT, seconds)
    costs = [live.curve(CONTEXT)(rows) for rows in range(1, WIDEST + 1)]
    assert costs == sorted(costs)
    assert costs[0] == 1
    assert all(map(math.isfinite, costs))
    assert 0 < live.plain_seconds(CONTEXT) < math.inf
    assert all(0 <= time.uncertainty < math.inf for time in live.known()[CONTEXT])
