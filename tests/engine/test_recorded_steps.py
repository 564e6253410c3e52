"""Recorded steps: their nodes' origins, and why nothing was drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.nn as nn
import pytest

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import step as steps
from mlxspec.engine.capability import Capability
from mlxspec.engine.sampling import Chooser, SamplingParams
from tests.support.harness import new_target

PROMPT = [1, 300, 301]


class Branching(Drafter):
    """Drafts the same branches after each token, with an origin for each token.

    Args:
        branches: the branches; the origin of token t is "of t".
        pipelined: whether the next step may be dispatched early.
    """

    def __init__(self, *branches: Sequence[int], pipelined: bool = False) -> None:
        self.branches, self.pipelined = branches, pipelined

    def begin(self, prompt: Sequence[int]) -> None:
        self.last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        tree = DraftTree.from_branches(self.last, self.branches)
        origins = tuple(f"of {token}" for token in tree.tokens[1:])
        return DraftTree(tree.tokens, tree.parents, (), origins)

    def observe(self, step: VerifiedStep) -> None:
        self.last = step.tokens[-1]


def recorded(
    model: nn.Module,
    drafter: Drafter,
    max_tokens: int = 9,
    capability: Capability = Capability.TREE,
    each: Callable[[], None] = lambda: None,
    count: int = 1,
) -> list[VerifiedStep]:
    """Return ``count`` recorded steps; ``each`` is called after each of them."""
    sequence = steps.Sequence(
        *(new_target(model, capability), PROMPT, drafter, Chooser(SamplingParams())),
        max_tokens=max_tokens,
        ends=lambda token: False,
    )
    sequence.recorded = []
    sequence.begin()
    for _ in range(count):
        (outcome,) = steps.joint_step([sequence])
        assert outcome is sequence.recorded[-1]
        each()
    sequence.close()
    return sequence.recorded


@pytest.mark.parametrize(
    ("max_tokens", "capability"),
    [
        (9, Capability.TREE),
        (2, Capability.TREE),  # leaves room for one draft token
        (9, Capability.CHAIN),
    ],
)
def test_origins_follow_the_nodes_that_are_verified(
    model: nn.Module, max_tokens: int, capability: Capability
) -> None:
    drafter = Branching([11, 12], [11, 13], [14, 999999], [15])
    (step,) = recorded(model, drafter, max_tokens, capability)
    tree = step.tree
    assert step.no_draft == ""
    assert 1 < len(tree) < 7
    assert tree.node_origins == ("root", *(f"of {token}" for token in tree.tokens[1:]))


def why_none(model: nn.Module, drafter: Drafter, **options: int) -> str:
    *_, last = recorded(model, drafter, **options)
    assert last.drafted == 0
    return last.no_draft


def test_why_a_step_has_no_draft(model: nn.Module) -> None:
    assert why_none(model, Branching()) == "the drafter has nothing to propose"
    assert why_none(model, NoDraft()) == "this decoder never drafts"
    assert why_none(model, Branching([11]), max_tokens=1).startswith("the output's constraint or")
    assert why_none(model, Branching(), max_tokens=1) == "the output ends here"
    assert "no room" in why_none(model, Branching([999999]))


def test_a_draft_that_comes_too_late_is_the_reason(model: nn.Module) -> None:
    drafter = Branching(pipelined=True)

    def drafts_now() -> None:
        drafter.branches = ([11, 12],)

    plain, late, drafted = recorded(model, drafter, each=drafts_now, count=3)
    assert plain.no_draft == "the drafter has nothing to propose"
    assert "must wait" in late.no_draft
    assert (drafted.drafted, drafted.no_draft) == (2, "")
