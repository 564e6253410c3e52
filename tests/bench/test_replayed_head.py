"""Replay with a simulated head: its random hits, its time and its gain."""

from __future__ import annotations

import random
import time

import pytest

from benchmarks.replayed_head import ReplayedHead, policies_with_head
from mlxspec.bench.policies import AUTO, POLICIES
from mlxspec.bench.prompts import Completion
from mlxspec.bench.replay import Replayed, Step, compare, replay, replay_jointly
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.heads import HeadExperience
from mlxspec.drafting.tree import DraftTree
from tests.bench.test_replay import Scripted

FLAT = CostCurve([(1, 1), (32, 1.3)])
ONE_FREE = CostCurve([(1, 1), (2, 1), (3, 9), (32, 40)])
LINEAR = CostCurve([(1, 1), (32, 32)])
SURE = [1.0, 1.0], 0.25


def output_of(length: int, seed: int = 1) -> list[int]:
    """Return tokens that never repeat."""
    return random.Random(seed).sample(range(1000, 30000), length)


def replayed_with(
    head: tuple[list[float], float], curve: CostCurve, output: list[int], name: str
) -> Replayed:
    drafter = policies_with_head(*head)[name](curve, b"")(output)
    return replay([1, 2], output, drafter)


def test_drafts_are_right_as_often_as_the_curve_says() -> None:
    output, curve = output_of(8000), (0.76, 0.6, 0.5, 0.41)
    head = ReplayedHead(HeadExperience(1, 1, 4), output, curve)
    head.begin([1])
    right = [0] * 4
    for place in range(len(output) - 4):
        head._done = place
        ((tokens, confidences),) = ReplayedHead.run([head], 4)
        wrong = [token != output[place + depth] for depth, token in enumerate(tokens)]
        assert wrong == sorted(wrong)  # after a wrong token, none is right
        for depth, one in enumerate(wrong):
            right[depth] += not one
    assert [count / 8000 for count in right] == pytest.approx(curve, abs=0.02)
    assert confidences == pytest.approx([0.76, 0.6 / 0.76, 0.5 / 0.6, 0.41 / 0.5])


def test_an_output_has_the_same_luck_again() -> None:
    output, curve = output_of(200), ([0.7, 0.5], 0.05)
    first, second = (replayed_with(curve, FLAT, output, "head") for _ in range(2))
    assert first == second
    assert replayed_with(curve, FLAT, output_of(200, 2), "head").rows != first.rows


def test_a_sure_head_s_speed_is_tokens_by_rows_and_its_own_time() -> None:
    output = output_of(100)
    replayed = replayed_with(SURE, ONE_FREE, output, "head")
    assert replayed.rows == [2] * 50
    assert {step.head_time for step in replayed.steps} == {0.25}
    assert replayed.cost(ONE_FREE) == pytest.approx(50 * 1.25)


def test_where_it_cannot_gain_it_only_takes_its_trials() -> None:
    replayed = replayed_with(SURE, LINEAR, output_of(300), f"{AUTO}+head")
    assert set(replayed.rows) == {1}
    trials = sum(step.head_time > 0 for step in replayed.steps)
    assert replayed.cost(LINEAR) == pytest.approx(300 + 0.25 * trials)
    assert trials <= 5


def test_the_clock_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    output = output_of(200)
    expected = replayed_with(SURE, ONE_FREE, output, "head")
    now = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    assert replayed_with(SURE, ONE_FREE, output, "head") == expected


def test_text_and_head_add_up() -> None:
    text = output_of(120)
    output = [*output_of(120, 2), *text]
    policies = {AUTO: POLICIES[AUTO], **policies_with_head([0.8, 0.6], 0.1)}
    work = [Completion("set", [*text, 1, *output], 121, output)] * 2
    reports = compare(work, b"", policies, {"flat": FLAT, "linear": LINEAR})
    speeds = {name: report["speedup"] for name, report in reports["flat"].items()}
    assert list(speeds) == ["auto", "head", "auto+head"]
    assert speeds["auto+head"] > 1.1 * max(speeds["auto"], speeds["head"])
    assert all(report["speedup"] > 0.99 for report in reports["linear"].values())


def test_in_joint_steps_all_wait_for_the_heads() -> None:
    outputs = [output_of(60, seed) for seed in range(3)]
    work = [Completion("set", [1, *output], 1, output) for output in outputs]
    free = CostCurve([(1, 1), (32, 1)])
    new = policies_with_head(*SURE)["head"](free, b"")
    joint = replay_jointly(work, new, free, 3)
    # Each gets two tokens of a head that is always right.
    assert joint.steps == (Step(9, 3, 0.5),) * 20
    assert joint.cost(free) == pytest.approx(20 * 1.5)


def test_the_time_of_heads_is_counted_in_steps_of_as_many_sequences() -> None:
    curve = CostCurve([(1, 1), (2, 1.25), (4, 2)])
    joint = Replayed(8, (Step(4, 2), Step(4, 2, 0.2)))
    assert joint.cost(curve) == pytest.approx(4 + 0.2 * 1.25)
    drafter = Scripted(DraftTree.chain(1, [2]))
    assert {step.head_time for step in replay([1], [2, 3, 4], drafter).steps} == {0}
