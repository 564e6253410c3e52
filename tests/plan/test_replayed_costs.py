"""Planning where state cannot be cut back: pending rows stand in front of a step's own."""

from __future__ import annotations

import random

import pytest

from mlxspec.draft.drafter import VerifiedStep
from mlxspec.draft.tree import DraftTree
from mlxspec.plan.cost_curve import CostCurve
from mlxspec.plan.planner import PlannedDrafter
from mlxspec.plan.policy import expected_tokens, replayed_costs

LINEAR = [0.0, *(1 + 0.1 * rows for rows in range(16))]  # T(rows) / T(1) by rows


def test_pending_rows_are_paid_for_with_the_steps_own() -> None:
    assert replayed_costs([1.0], LINEAR, pending=0) == [0.0, 1.0]
    assert replayed_costs([1.0], LINEAR, pending=5) == [0.0, 1.5]


def test_a_sure_draft_costs_its_rows_and_no_more() -> None:
    costs = replayed_costs(expected_tokens([1.0, 1.0]), LINEAR, pending=2)
    assert costs == pytest.approx([0.0, 1.2, 1.3, 1.4])


def test_a_draft_that_may_fail_pays_for_the_wider_step_after_it() -> None:
    # Half the time the next step has the root's row in front of its own: 0.1 more.
    (_, _, drafted) = replayed_costs(expected_tokens([0.5]), LINEAR, pending=0)
    assert drafted == pytest.approx(1.1 + 0.5 * 0.1)
    # Of 0.1 that nothing is accepted, 0.3 that one and 0.6 that both are, the first two count.
    (*_, drafted) = replayed_costs(expected_tokens([0.9, 0.6]), LINEAR, pending=3)
    assert drafted == pytest.approx(1.5 + 0.4 * 0.5)


def test_costs_end_where_the_table_ends() -> None:
    assert len(replayed_costs(expected_tokens([0.9] * 3), LINEAR, pending=12)) == 5


def test_a_planner_leaves_room_for_pending_rows() -> None:
    text = random.Random(1).sample(range(30000), 100)
    drafter = PlannedDrafter(CostCurve([(1, 1.0), (16, 1.1)]), branching=False, replays=True)
    drafter.begin([*text, *text[:20]])
    widths = []
    for pending, token in zip((0, 9, 15, 0), text[20:24], strict=True):
        tree = drafter.propose(100)
        widths.append(len(tree))
        drafter.observe(VerifiedStep(DraftTree.chain(0), (), (), (), (token,), pending))
    drafter.end()
    assert widths[0] == widths[1] == 16
    assert widths[2:] == [7, 1]
