"""Recording a drafter's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.sources import RecordedStep, RecordingDrafter
from mlxspec.drafting.tree import DraftTree

#      0
#    1   4
#   2 3   5
TREE = DraftTree((10, 11, 12, 13, 14, 15), (-1, 0, 1, 1, 0, 4))


class Talkative(Drafter):
    """Reports its tokens' origins, but only until the step is over."""

    pipelined = False
    branching = True

    def __init__(self, tree: DraftTree) -> None:
        self.calls: list[str] = []
        names = (
            tree.origins
            if "draft" not in tree.origins
            else [f"origin of {token}" for token in tree.tokens[1:]]
        )
        self._tree = replace(tree, origins=names)

    def begin(self, prompt: Sequence[int]) -> None:
        self.calls.append(f"begin {list(prompt)}")

    def propose(self, max_depth: int) -> DraftTree:
        self.calls.append(f"propose {max_depth}")
        return self._tree

    def observe(self, step: VerifiedStep) -> None:
        self.calls.append(f"observe {step.tokens}")

    def end(self) -> None:
        self.calls.append("end")


Cut = Callable[[DraftTree], DraftTree]


def step(tree: DraftTree) -> VerifiedStep:
    return VerifiedStep(tree, (0,) * len(tree), (0,) * len(tree), (), (7,))


def record(drafter: Drafter, cut: Cut = lambda tree: tree) -> RecordedStep:
    steps: list[RecordedStep] = []
    recording = RecordingDrafter(drafter, steps)
    recording.begin([1, 10])
    recording.observe(step(cut(recording.propose(8))))
    recording.end()
    assert len(steps) == 1
    return steps[0]


def test_the_drafter_gets_the_same_calls_as_without_a_recording():
    drafter = Talkative(TREE)
    record(drafter)
    assert drafter.calls == ["begin [1, 10]", "propose 8", "observe (7,)", "end"]
    for other in (drafter, NoDraft()):
        recording = RecordingDrafter(other, [])
        assert (recording.pipelined, recording.branching) == (other.pipelined, other.branching)


@pytest.mark.parametrize(
    "cut",
    [
        lambda tree: tree,
        lambda tree: tree.pruned(max_depth=1, vocab_size=100),
        lambda tree: tree.pruned(max_depth=9, vocab_size=13),
        lambda tree: tree.first_chain(),
        lambda tree: DraftTree.chain(10),
    ],
)
def test_origins_follow_the_nodes_that_the_loop_has_kept(cut: Cut):
    verified = cut(TREE)
    recorded = record(Talkative(TREE), cut)
    assert recorded.verified.tree.node_origins == (
        "root",
        *(f"origin of {token}" for token in verified.tokens[1:]),
    )


def test_equal_siblings_keep_their_own_origins():
    names = ("first", "second", "below the second")
    tree = DraftTree((1, 5, 5, 6), (-1, 0, 0, 2), origins=names)
    recorded = record(Talkative(tree))
    assert recorded.verified.tree.node_origins == ("root", "first", "second", "below the second")


def test_a_drafter_without_origins_has_drafts():
    class Silent(NoDraft):
        def propose(self, max_depth: int) -> DraftTree:
            return TREE

    recorded = record(Silent())
    assert recorded.verified.tree.node_origins == ("root", *["draft"] * 5)


def why_none(proposed: DraftTree, max_depth: int = 8, pipelined: bool = False) -> str:
    """Return the recorded reason for a step without a draft."""
    steps: list[RecordedStep] = []
    recording = RecordingDrafter(Talkative(proposed), steps)
    recording.propose(max_depth)
    recording.observe(replace(step(DraftTree.chain(10)), pipelined=pipelined))
    return steps[0].no_draft


def test_why_a_step_has_no_draft() -> None:
    nothing = DraftTree.chain(10)
    assert why_none(nothing) == "the drafter has nothing to propose"
    assert why_none(nothing, max_depth=0) == "the output ends here"
    assert "must wait" in why_none(TREE, pipelined=True)
    assert "no room" in why_none(TREE)
    assert record(Talkative(TREE)).no_draft == ""
    assert record(NoDraft()).no_draft == "this decoder never drafts"
