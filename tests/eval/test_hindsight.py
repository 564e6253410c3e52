"""Hindsight: the planner's candidates, as many as the output shows to pay."""

import random

from mlxspec.eval.hindsight import Hindsight
from mlxspec.eval.replay import replay
from mlxspec.plan.cost_curve import CostCurve
from tests.support.planners import suffix_planner

FLAT = CostCurve([(1, 1), (16, 1)])
PROMPT = [1, 2, 3, 4, 5, 9, 1]


def rows(output: list[int], curve: CostCurve, branching: bool = False) -> tuple[int, ...]:
    return replay(PROMPT, output, Hindsight(output, curve, branching=branching)).rows


def test_verifies_exactly_what_is_right() -> None:
    assert rows([2, 3, 4, 7], FLAT) == (4,)  # the prompt has 5 and 9 after it
    assert rows([7, 8], FLAT) == (1, 1)


def test_verifies_less_where_all_would_cost_too_much() -> None:
    # Per emitted token 3 rows cost 0.5, and 5 rows 0.8.
    stairs = CostCurve([(1, 1), (3, 1.5), (4, 4), (5, 4)])
    assert rows([2, 3, 4, 5, 9], stairs)[0] == 3
    # Two rows cost as much as two plain steps: nothing is gained.
    assert rows([2, 3, 4], CostCurve([(1, 1), (64, 64)])) == (1, 1, 1)


def test_of_a_tree_it_verifies_up_to_the_right_node() -> None:
    prompt = [5, 1, 2, 2, 5, 1, 3, 3, 5, 1]  # after 5 1: the newer 3 comes first, then 2
    output = [2, 2]
    chain = replay(prompt, output, Hindsight(output, FLAT, branching=False)).rows
    tree = replay(prompt, output, Hindsight(output, FLAT, branching=True)).rows
    assert chain[0] == 1
    assert len(tree) == 1
    assert tree[0] > 2


def test_a_node_costs_all_rows_up_to_it_and_not_those_of_its_depth_alone() -> None:
    prompt = [5, 1, 2, 2, 5, 1, 3, 3, 5, 1]  # the draft 2 2 stands before 3 3
    curve = CostCurve([(1, 1), (3, 1.2), (4, 4), (64, 64)])
    assert replay(prompt, [2, 2], Hindsight([2, 2], curve, branching=True)).rows == (3,)
    assert replay(prompt, [3, 3], Hindsight([3, 3], curve, branching=True)).rows[0] == 1


def test_emits_no_less_per_time_than_the_planner_in_any_step() -> None:
    """While both stand at the same place with the same candidates, the known output decides."""
    source = random.Random(3)
    curve = CostCurve([(1, 1), (2, 1.2), (8, 2.5), (16, 3)])
    for _ in range(40):
        text = [source.randrange(4) for _ in range(60)]
        prompt, output = text[:40], text[40:]
        known = Hindsight(output, curve, branching=False)
        planned = suffix_planner(curve, branching=False)
        emitted_per_time = []
        for drafter in (known, planned):
            drafter.begin(prompt)
            draft = drafter.propose(100).tokens[1:]
            right = 0
            while right < len(draft) and draft[right] == output[right]:
                right += 1
            emitted_per_time.append((1 + right) / curve(1 + len(draft)))
        assert emitted_per_time[0] >= emitted_per_time[1]
