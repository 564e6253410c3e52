"""When and how deep a planner runs a trained head, and what it learns from the drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

import pytest

from mlxspec.bench.replay import replay, verify
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.candidates import Candidates, TreeNode
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.heads import HeadExperience, HeadSource
from mlxspec.drafting.planner import Planner, plan_drafts
from mlxspec.drafting.sources import DrafterSource
from mlxspec.drafting.suffix_source import SuffixSource
from mlxspec.drafting.tree import DraftTree

FLAT = CostCurve([(1, 1), (32, 1.3)])
TWO_FREE = CostCurve([(1, 1), (3, 1.02), (4, 9), (32, 32)])
LINEAR = CostCurve([(1, 1), (32, 32)])
WRONG = -2


class Scripted(HeadSource):
    """Drafts an output's next tokens, or wrong ones; records its drafts' depths.

    Args:
        output: the tokens after the prompt.
        cost: the cost of each token, in plain steps.
        experience: estimates to share between several heads.
    """

    confidence = 0.9
    right = True
    has_state = True

    def __init__(
        self,
        output: Sequence[int] = (),
        cost: float = 0.05,
        experience: HeadExperience | None = None,
    ) -> None:
        super().__init__(experience or HeadExperience(cost, cost, 4))
        self.output, self.done = output, 0
        self.runs: list[tuple[int, int]] = []  # depth and sequences

    @property
    def ready(self) -> bool:
        return self.has_state

    @classmethod
    def run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        for head in heads:
            head.runs.append((depth, len(heads)))
        return [(head.tokens(depth), [head.confidence] * depth) for head in heads]

    def tokens(self, depth: int) -> list[int]:
        following = self.output[self.done : self.done + depth] if self.right else ()
        return [*following, *[WRONG] * (depth - len(following))]

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        self.done += len(step.tokens)


def noise(length: int, seed: int = 1) -> list[int]:
    """Return tokens that never repeat."""
    return random.Random(seed).sample(range(1000, 30000), length)


def planner_of(head: HeadSource, curve: CostCurve = FLAT, text: bool = False) -> Planner:
    sources = [SuffixSource() if text else DrafterSource(NoDraft())]
    planner = Planner(FixedCosts(curve), sources, branching=False)
    planner.head = head
    return planner


def begun(head: HeadSource, curve: CostCurve = FLAT, prompt: Sequence[int] = (1, 2)) -> Planner:
    planner = planner_of(head, curve, text=len(prompt) > 2)
    planner.begin([*prompt])
    return planner


def depths(head: Scripted) -> list[int]:
    return [depth for depth, _ in head.runs]


# --- the cost of a draft ---


def test_times_grow_by_depth_and_follow_measured_drafts() -> None:
    times = HeadExperience(0.01, 0.002, 4)
    assert [times.seconds(depth) for depth in (1, 2, 4)] == pytest.approx([0.01, 0.012, 0.016])
    for _ in range(50):
        times.record(2, 1, 0.024)
    assert times.seconds(2) == pytest.approx(0.024, rel=0.01)
    assert times.seconds(1) == pytest.approx(0.02, rel=0.01)


def test_times_of_more_sequences_begin_with_those_of_fewer() -> None:
    times = HeadExperience(0.01, 0.002, 4)
    for _ in range(50):
        times.record(1, 4, 0.03)
    assert times.seconds(1, 3) == pytest.approx(0.01)
    assert times.seconds(1, 4) == times.seconds(1, 9) == pytest.approx(0.03, rel=0.01)


def test_one_slow_draft_changes_little() -> None:
    times = HeadExperience(0.01, 0.002, 4)
    times.record(1, 1, 60.0)
    assert times.seconds(1) < 0.02
    for _ in range(2):
        times.record(1, 4, 60.0)  # the first one may compile kernels
    assert times.seconds(1, 3) < times.seconds(1, 4) < 0.02


# --- when and how deep it runs ---


@pytest.mark.parametrize(
    ("curve", "p_accept", "cost", "depth"),
    [
        (FLAT, 0.9, 0.01, 4),
        (TWO_FREE, 0.9, 0.01, 2),  # a third token would cost eight steps
        (FLAT, 0.9, 2.0, 0),  # costs more than its drafts gain
        (FLAT, 0.05, 0.2, 0),
        (LINEAR, 0.9, 0.01, 0),
    ],
)
def test_costs_and_acceptance_choose_the_depth(
    curve: CostCurve, p_accept: float, cost: float, depth: int
) -> None:
    head = Scripted(noise(10), cost)
    planner = begun(head, curve)
    head.experience.p_accept = [p_accept] * 4
    assert len(planner.propose(64)) == 1 + depth
    assert depths(head) == [depth] * (depth > 0)
    assert planner.head_time == pytest.approx(cost * depth)


def test_it_is_no_deeper_than_the_step_may_be() -> None:
    head = Scripted(noise(10))
    planner = begun(head)
    assert len(planner.propose(2)) == 3
    assert len(planner.propose(0)) == 1
    assert depths(head) == [2]


def test_where_text_is_sure_it_does_not_run() -> None:
    text = noise(300)
    head = Scripted(text[50:250])
    replayed = replay([*text, *text[:50]], text[50:250], planner_of(head, text=True))
    assert replayed.tokens / replayed.cost(FLAT) > 5
    assert len(head.runs) <= 3  # until the copy is certain


def test_without_text_it_carries_the_output() -> None:
    output = noise(400)
    head = Scripted(output)
    replayed = replay([1, 2], output, planner_of(head, text=True))
    assert set(depths(head)) == {4}
    spent = sum(step.head_time for step in replayed.steps)
    assert spent == pytest.approx(4 * 0.05 * len(head.runs))
    assert replayed.tokens / replayed.cost(FLAT) > 3


def test_it_never_runs_while_a_forward_is_ahead_or_without_state() -> None:
    head = Scripted(noise(10))
    planner = begun(head)
    planner.policy.ahead = True
    assert len(planner.propose(64)) == 1
    planner.policy.ahead = False
    head.has_state = False
    assert len(planner.propose(64)) == 1
    assert not head.runs
    head.has_state = True
    assert len(planner.propose(64)) == 5


def test_a_head_that_does_not_pay_is_tried_again_ever_more_rarely() -> None:
    output = noise(700)
    head = Scripted(output)
    replayed = replay([1, 2], output, planner_of(head, LINEAR))
    assert set(replayed.rows) == {1}
    assert len(head.runs) == 3  # after 64, 128 and 256 more tokens
    assert set(depths(head)) == {1}
    assert replayed.cost(LINEAR) < 1.002 * 700


def test_no_trial_where_text_is_likely() -> None:
    text = noise(80)
    head = Scripted(cost=3.0)
    planner = begun(head, FLAT, [*text, *text[:70]])
    head._idle = 100
    planner.propose(64)
    assert not head.runs
    planner = begun(head, FLAT, text)
    planner.propose(64)
    assert depths(head) == [1]


@pytest.mark.parametrize("curve", [FLAT, TWO_FREE, CostCurve([(1, 1), (2, 1.3), (32, 10)])])
@pytest.mark.parametrize("cost", [0.05, 0.4])
def test_an_overconfident_head_costs_little(curve: CostCurve, cost: float) -> None:
    experience = HeadExperience(cost, cost, 4)
    output, lost = noise(600), []
    for _ in range(3):
        head = Scripted(output, experience=experience)
        head.right, head.confidence = False, 0.98
        replayed = replay([1, 2], output, planner_of(head, curve, text=True))
        lost.append(replayed.cost(curve) / 600 - 1)
    assert max(lost) < 0.02
    assert lost[-1] < 0.01
    assert experience.p_accept[0] < 0.5


def test_a_head_that_becomes_better_is_used_again() -> None:
    class Late(Scripted):
        def tokens(self, depth: int) -> list[int]:
            self.right = self.done > 300
            return super().tokens(depth)

    output = noise(1500)
    head = Late(output)
    rows = replay([1, 2], output, planner_of(head)).rows
    assert sum(rows[:100]) < 200
    assert len(rows) < 900


def test_its_confidence_is_corrected_by_what_was_right() -> None:
    head = Scripted()
    head.begin([1])
    first = head.drafted([5], [0.98]).p_reached[0]
    assert first == pytest.approx(0.98)
    for _ in range(50):
        head.observe(verify(head.drafted([WRONG], [0.98]), [7, 7]))
    assert head.drafted([5], [0.98]).p_reached[0] < 0.5


def test_it_learns_from_tokens_that_can_be_judged() -> None:
    head = Scripted()
    head.begin([1])
    head.observe(verify(head.drafted([5, 6, WRONG, 8], [0.9] * 4), [5, 6, 7, 8]))
    first, second, third, fourth = head.experience.p_accept
    assert first == second > 0.7 > third
    assert fourth == 0.7  # after a wrong token
    assert head.last == 7


def test_a_draft_that_was_not_verified_teaches_too() -> None:
    head = Scripted()
    head.begin([1])
    head.drafted([5], [0.9])
    head.observe(verify(DraftTree.chain(1), [5]))
    assert head.experience.p_accept[0] > 0.7
    head.observe(verify(DraftTree.chain(5), [6]))  # nothing was drafted
    assert head._idle == 2


@pytest.mark.parametrize("name", ["begin", "ready", "outlook", "run", "drafted", "observe"])
def test_wherever_a_head_fails_the_output_continues(name: str, planning_faults: list[str]) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no state")

    members = {name: property(fails) if name == "ready" else fails}
    head = type("Faulty", (Scripted,), members)()
    assert len(replay([1, 2], noise(20), planner_of(head, text=True)).rows) <= 20
    assert "ValueError: no state" in planning_faults.pop()
    assert not planning_faults


def test_a_head_whose_drafts_are_too_dear_waits_for_no_token() -> None:
    planner = Planner(FixedCosts(FLAT), [DrafterSource(NoDraft())])
    planner.head = Scripted(cost=5)
    planner.begin([1, 2])
    planner.policy.gain = 0.0
    assert len(planner.propose(64)) == 1
    assert planner.pipelined


def test_a_constraint_does_not_keep_it_from_running() -> None:
    class Letters:
        def forced(self) -> Sequence[int]:
            return ()

        def allowed(self, tree: DraftTree) -> DraftTree:
            return tree.filtered([0 <= token < 1003 for token in tree.tokens])

    head = Scripted([1001, 1002, 1003, 1004])
    planner = begun(head)
    planner.guide = Letters()
    assert planner.propose(64).tokens == (2, 1001, 1002)


# --- several sequences ---


def joint_costs(sequences: int) -> FixedCosts:
    return FixedCosts(CostCurve([(1, 1), (32, 1.3)]), sync_overhead=0.0)


def test_heads_of_a_joint_step_run_together() -> None:
    experience = HeadExperience(0.05, 0.05, 4)
    heads = [Scripted(noise(10, seed), experience=experience) for seed in range(3)]
    planners = [begun(head) for head in heads]
    depths = dict(zip(planners, [64, 64, 2], strict=True))
    plans = plan_drafts(depths, joint_costs(4), sequences=4)
    assert [head.runs for head in heads] == [[(4, 3)]] * 3
    assert {plan.head_time for plan in plans} == {0.2}
    for planner, plan in zip(planners, plans, strict=True):
        planner.shared_plan = plan
    trees = [planner.propose(64) for planner in planners]
    assert [len(tree) for tree in trees] == [5, 5, 3]  # no deeper than its output may be
    charged = sum(plan.charge for plan in plans)
    assert charged == pytest.approx(3 + 4 * (0.2 + FLAT(11) - 1))  # charged to all who wait


def test_a_head_that_is_not_ready_is_left_out_of_a_joint_step() -> None:
    experience = HeadExperience(0.05, 0.05, 4)
    heads = [Scripted(noise(10, seed), experience=experience) for seed in range(3)]
    planners = [begun(head) for head in heads]
    heads[1].has_state = False
    plans = plan_drafts(dict.fromkeys(planners, 64), joint_costs(3), sequences=3)
    assert [head.runs for head in heads] == [[(4, 2)], [], [(4, 2)]]
    assert [plan.n_draft for plan in plans] == [4, 0, 4]
    planners[0].policy.ahead = True
    plan_drafts(dict.fromkeys(planners, 64), joint_costs(3), sequences=3)
    assert sum(len(head.runs) for head in heads) == 2


# --- text and head in one tree ---


def together(text: DraftTree, head: DraftTree, branching: bool) -> DraftTree:
    planner = begun(Scripted())
    planner.branching = branching
    candidates = Candidates(2, [TreeNode(text)], branching=branching, max_depth=64)
    candidates.tree(31)
    return planner.with_head(candidates, head, 64).tree(31)


@pytest.mark.parametrize(
    ("p_text", "p_head", "p_reached"),
    [
        (0.3, 0.76, {7: 0.24, 8: 0.76}),
        (0.9, 0.76, {7: 0.9, 8: 0.1}),
    ],
)
def test_the_likelier_token_keeps_its_probability(
    p_text: float, p_head: float, p_reached: dict[int, float]
) -> None:
    text, head = (DraftTree((2, t), (-1, 0), (p,)) for t, p in ((7, p_text), (8, p_head)))
    tree = together(text, head, branching=True)
    assert dict(zip(tree.tokens[1:], tree.p_reached, strict=True)) == pytest.approx(p_reached)
    chain = together(text, head, branching=False)
    assert chain.tokens[1:] == (max(p_reached, key=lambda token: p_reached[token]),)


def test_text_and_head_that_agree_share_nodes() -> None:
    text = DraftTree((2, 7), (-1, 0), (0.8,), ("context",))
    head = DraftTree((2, 7, 8), (-1, 0, 1), (0.6, 0.54), ("head", "head"))
    tree = together(text, head, branching=False)
    assert tree.tokens == (2, 7, 8)
    assert tree.p_reached == pytest.approx((0.8, 0.72))
    assert tree.origins == ("context", "head")
