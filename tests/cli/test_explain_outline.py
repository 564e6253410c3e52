"""Draft trees as lines."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.cli.explain_outline import BONUS, outline
from mlxspec.cli.explain_walk import Fate, fates, telling_run
from mlxspec.draft.drafter import DraftTree, VerifiedStep
from mlxspec.draft.recording import RecordedStep
from tests.support.explained_steps import lookahead_step, verified


@st.composite
def steps(draw: st.DrawFn) -> VerifiedStep:
    """Walks over random trees."""
    size = draw(st.integers(1, 40))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    letters = st.sampled_from("abc")
    tree = DraftTree(tuple(ord(draw(letters)) for _ in parents), tuple(parents))
    return verified(tree, "".join(draw(letters) for _ in parents))


@given(steps())
def test_every_node_stands_on_one_line_below_its_parent_and_the_bonus_token_once(
    step: VerifiedStep,
) -> None:
    lines = [(*line.nodes, *line.branch) for line in outline(step)]
    listed = [node for line in lines for node in line]
    assert sorted(listed) == [BONUS, *range(len(step.tree))]
    seen: set[int] = set()
    for node in listed:
        assert node in (0, BONUS) or step.tree.parents[node] in seen
        seen.add(node)


@given(steps())
def test_lines_are_runs_of_parents_and_children(step: VerifiedStep) -> None:
    for line in outline(step):
        for run in (line.nodes, (line.nodes[-1], *line.branch)):
            for parent, child in pairwise(run):
                assert step.tree.parents[child] == parent


@given(steps())
def test_a_line_is_accepted_as_a_whole_or_not_at_all(step: VerifiedStep) -> None:
    for line in outline(step):
        accepted = {node in step.accepted for node in line.nodes}
        assert accepted == {line.fate is Fate.ACCEPTED}
        assert not set(line.branch) & set(step.accepted)


@given(steps())
def test_the_indentation_grows_with_the_logarithm_of_the_size(step: VerifiedStep) -> None:
    deepest = max(len(line.guides) for line in outline(step)) / 2
    assert deepest <= math.log2(len(step.tree)) + 2


def test_a_trunk_of_any_length_runs_straight_down() -> None:
    branches = [[1] * length + [2, 3] for length in range(2000)]
    step = verified(DraftTree.from_branches(0, branches), "?" * 6000)
    lines = outline(step)
    assert sum(len(line.nodes) + len(line.branch) for line in lines) == len(step.tree) + 1
    assert max(len(line.guides) for line in lines) == 2


def test_a_rejected_node_is_one_that_the_target_could_have_chosen_and_did_not() -> None:
    step = lookahead_step().verified
    fate = {chr(token): fate for token, fate in zip(step.tree.tokens, fates(step), strict=True)}
    assert fate["a"] is Fate.ROOT
    assert {letter for letter in fate if fate[letter] is Fate.ACCEPTED} == set("bc")
    assert {letter for letter in fate if fate[letter] is Fate.REJECTED} == set("dmx")
    assert {letter for letter in fate if fate[letter] is Fate.UNREACHED} == set("nyozp")


def test_behind_the_end_of_the_output_nothing_is_rejected_and_no_bonus_token_stands() -> None:
    tree = DraftTree((1, 2, 3), (-1, 0, 1))
    step = VerifiedStep(tree, (2, 9, 9), (2, 9, 9), (1,), (2,))  # token 2 ended the output
    assert fates(step) == (Fate.ROOT, Fate.ACCEPTED, Fate.UNREACHED)
    assert all(line.nodes != (BONUS,) for line in outline(step))


def test_the_telling_run_has_walks_that_end_inside_their_drafts() -> None:
    def chain(drafted: int, accepted: int) -> RecordedStep:
        tree = DraftTree.chain(0, [1] * drafted)
        walk = tuple(range(1, accepted + 1))
        step = VerifiedStep(tree, (1,) * len(tree), (1,) * len(tree), walk, (1,) * (accepted + 1))
        return RecordedStep(step, ("",) * len(tree), {})

    plain, partly, whole, wrong = chain(0, 0), chain(5, 2), chain(9, 9), chain(5, 0)
    assert telling_run([plain, whole, whole, partly, partly, wrong], 2) == 3
    assert telling_run([plain, wrong, whole, plain], 1) == 2  # none is partly accepted
    assert telling_run([plain, plain], 3) == 0
