"""Wall times of steps by number of rows."""

from mlxspec.drafting.costs import StepTimes
from tests.support.threads import at_once


def test_a_table_has_medians_and_costs_relative_to_a_pipelined_token() -> None:
    times = StepTimes()
    for seconds in (0.010, 0.030, 0.011, 0.012):
        times.record(1, seconds, True)
    times.record(1, 0.020)
    for seconds in (0.040, 0.046, 0.900):
        times.record(8, seconds)
    table = times.table()
    assert [(t.rows, t.pipelined, t.steps) for t in table] == [
        (1, False, 1),
        (1, True, 4),
        (8, False, 3),
    ]
    assert [t.seconds for t in table] == [0.020, 0.0115, 0.046]
    assert [t.cost for t in table] == [0.020 / 0.0115, 1.0, 4.0]


def test_recent_steps_count_and_the_number_of_all_is_kept() -> None:
    times = StepTimes()
    for _ in range(500):
        times.record(1, 1.0)
    for _ in range(100):
        times.record(1, 2.0)  # the chip became hot
    (row,) = times.table()
    assert (row.steps, row.seconds) == (600, 2.0)


def test_without_a_step_of_one_row_there_is_no_cost() -> None:
    times = StepTimes()
    times.record(3, 0.5)
    assert times.table()[0].cost is None


def test_threads_may_record_and_read_at_once() -> None:
    times = StepTimes()

    def record(first: int) -> None:
        for step in range(2000):
            times.record(first + step % 10, 0.01)

    def read() -> None:
        for _ in range(300):
            times.table()

    at_once(*[lambda first=first: record(first) for first in (1, 1, 5)], read)
    assert sum(entry.steps for entry in times.table()) == 6000
