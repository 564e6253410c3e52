"""Replay of several outputs at once, against steps and times worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxspec.bench.policies import AUTO, POLICIES
from mlxspec.bench.prompts import Completion
from mlxspec.bench.replay import (
    Replayed,
    Step,
    compare,
    joint_report,
    replay,
    replay_jointly,
    verdict,
)
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.tree import DraftTree
from tests.bench.test_replay import Scripted, of_rows
from tests.support.planners import suffix_planner

FLAT = CostCurve([(1, 1), (64, 1.1)])
STEEP = CostCurve([(1, 1), (64, 64)])
ROUND = list(range(100, 112))  # repeated by outputs that copy


def outputs(*texts: list[int]) -> list[Completion]:
    """Return outputs whose prompt is the token 1."""
    return [Completion("set", [1, *text], 1, text) for text in texts]


def scripted(*drafters: Drafter) -> Callable[[list[int]], Drafter]:
    """Return a factory that gives each output the next of these drafters."""
    remaining = iter(drafters)
    return lambda output: next(remaining)


def replay_plain_batch(work: list[Completion], count: int) -> Replayed:
    return replay_jointly(work, lambda output: NoDraft(), FLAT, count)


def test_two_sequences_add_their_rows_in_each_step() -> None:
    first = Scripted(DraftTree.chain(1, [2, 3]), DraftTree.chain(4))
    second = Scripted(DraftTree.chain(1, [9]), DraftTree.chain(6, [7]))
    work = outputs([2, 3, 4, 5], [6, 7, 8])
    joint = replay_jointly(work, scripted(first, second), FLAT, 2)
    assert joint == Replayed(7, (Step(3 + 2, 2), Step(1 + 2, 2)))
    assert [step.tokens for step in first.steps] == [(2, 3, 4), (5,)]
    assert [step.tokens for step in second.steps] == [(6,), (7, 8)]
    assert {(step.rows, step.sequences) for step in second.steps} == {(5, 2), (3, 2)}
    assert joint.cost(CostCurve([(1, 1), (2, 1), (3, 1.5), (5, 4)])) == 5.5
    assert first.ended
    assert second.ended


def test_the_next_output_takes_the_place_of_one_that_ended() -> None:
    work = outputs([2, 3], [4], [5, 6, 7], [8])
    joint = replay_plain_batch(work, 2)
    # 2 and 4; 3 and 5; 6 and 8; 7.
    assert joint == Replayed(7, (Step(2, 2), Step(2, 2), Step(2, 2), Step(1, 1)))
    assert [step.sequences for step in replay_plain_batch(work, 10**30).steps] == [4, 2, 1]


class Pipelined(Scripted):
    pipelined = True


def test_a_draft_made_while_a_plain_step_is_under_way_waits() -> None:
    draft = DraftTree.chain(2, [3])
    first = Pipelined(DraftTree.chain(1), draft, DraftTree.chain(3, [4]))
    joint = replay_jointly(outputs([2, 3, 4, 5], [6, 7, 8]), scripted(first, Pipelined()), FLAT, 2)
    assert joint.rows == [2, 2, 3]


def test_all_go_on_pipelined_or_none() -> None:
    first = Pipelined(DraftTree.chain(1), DraftTree.chain(2, [3]))
    joint = replay_jointly(outputs([2, 3, 4], [6, 7]), scripted(first, Scripted()), FLAT, 2)
    assert joint.rows == [2, 3]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_plain_batching_takes_the_time_of_its_rows(count: int) -> None:
    curve = CostCurve([(1, 1), (4, 1.6), (8, 4)])
    work = outputs(*([token] * 5 for token in range(count)))
    joint = replay_plain_batch(work, count)
    assert joint.cost(curve) / joint.tokens == pytest.approx(curve(count) / count)


@pytest.mark.parametrize("curve", [FLAT, STEEP, CostCurve([(1, 1), (4, 1.2), (16, 3)])])
@pytest.mark.parametrize("name", POLICIES)
def test_one_at_a_time_is_the_replay_of_one(curve: CostCurve, name: str) -> None:
    work = outputs(ROUND * 4, [5, 6, 7] * 5, ROUND * 2)
    new = POLICIES[name](curve, b"")
    alone = [replay(one.prompt, one.output, new(one.output)) for one in work]
    joint = replay_jointly(work, POLICIES[name](curve, b""), curve, 1)
    assert joint.rows == [rows for one in alone for rows in one.rows]
    report = joint_report(joint, replay_plain_batch(work, 1), alone, curve)
    assert report["speedup"] == pytest.approx(report["one_at_a_time"])
    assert report["plain_batching"] == pytest.approx(1)
    assert report["sequences_per_step"] == 1


def test_planners_share_rows_where_they_pay() -> None:
    work = outputs(ROUND * 6, [5, 6, 7] * 20, list(range(200, 260)))
    for curve, gains in ((FLAT, True), (STEEP, False)):
        joint = replay_jointly(work, lambda output, c=curve: suffix_planner(c), curve, 3)
        plain = replay_plain_batch(work, 3)
        assert joint.tokens == plain.tokens == 72 + 60 + 60
        faster = plain.cost(curve) / joint.cost(curve)
        assert faster > 1.1 if gains else faster >= 0.98


def test_every_token_of_every_output_is_emitted_once() -> None:
    work = outputs(ROUND * 3, [5, 6] * 9, [1], ROUND)
    drafters = [Watched(), Watched(), Watched(), Watched()]
    replay_jointly(work, scripted(*drafters), FLAT, 3)
    assert [one.emitted for one in drafters] == [one.output for one in work]


class Watched(NoDraft):
    """Drafts the same token three times and records the steps that it observes."""

    pipelined = False

    def begin(self, prompt: list[int]) -> None:  # type: ignore[override]
        super().begin(prompt)
        self.emitted: list[int] = []

    def propose(self, max_depth: int) -> DraftTree:
        return DraftTree.chain(self._last, [6, 5, 6])

    def observe(self, step) -> None:  # type: ignore[no-untyped-def]
        super().observe(step)
        self.emitted += step.tokens


def test_a_joint_plain_step_is_the_unit_of_joint_costs() -> None:
    curve = FixedCosts(CostCurve([(1, 1), (2, 1.5), (4, 3), (8, 4)])).for_sequences(2).curve
    assert curve.widest == 8
    assert curve(1) == 1
    assert curve(3) == pytest.approx(3 / 1.5)
    assert curve(7) == pytest.approx(4 / 1.5)
    assert curve(8) == pytest.approx(4.5 / 1.5)  # nine rows: beyond the curve's end


def test_one_sequence_has_the_curve_itself() -> None:
    curve = CostCurve([(1, 1), (3, 1.1), (16, 2)])
    assert FixedCosts(curve).for_sequences(1).curve.table == pytest.approx(curve.table)


def test_speeds_are_against_one_plain_sequence() -> None:
    curve = CostCurve([(1, 1), (2, 1.25), (4, 2)])
    # In a time of 4; a plain joint step takes 1.25.
    joint = Replayed(8, (Step(4, 2),) * 2)
    plain = Replayed(8, (Step(2, 2),) * 4)  # of 5
    alone = of_rows(5, 2, 2), of_rows(3, 1, 2, 2)  # of 6
    report = joint_report(joint, plain, alone, curve)
    assert report["speedup"] == pytest.approx(2)
    assert report["plain_batching"] == pytest.approx(8 / 5)
    assert report["over_plain_batching"] == pytest.approx(5 / 4)
    assert report["one_at_a_time"] == pytest.approx(8 / 6)
    assert (report["tokens"], report["completions"]) == (8, 2)
    assert (report["tokens_per_step"], report["rows_per_step"]) == (4, 4)
    assert report["sequences_per_step"] == 2
    speeds = {"mine": {"auto": report}}
    assert [*verdict(speeds)] == ["On mine, auto has 1.25 times the speed of plain batching."]
    speeds["mine"]["other"] = {**report, "over_plain_batching": 1.1}
    assert [*verdict(speeds)] == ["auto wins on mine (1.25×)."]


def test_where_drafts_gain_nothing_the_verdict_says_so() -> None:
    work = outputs(list(range(2, 40)), list(range(50, 90)))
    reports = compare(work, b"", POLICIES, {"s": STEEP}, 2)
    assert [*verdict(reports)] == ["plain decoding wins on s (1.00×)."]


def test_progress_counts_every_replay() -> None:
    shares: list[float] = []
    work = outputs([2], [3])
    compare(work, b"", {AUTO: POLICIES[AUTO]}, {"s": STEEP}, 2, shares.append)
    assert shares == pytest.approx([turn / 6 for turn in range(1, 7)])
