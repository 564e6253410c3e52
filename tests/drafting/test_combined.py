"""Combined drafts compared with sets of token paths."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.accept import VerifiedStep, accept, view
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.sources import CombinedDrafter
from mlxspec.drafting.tree import DraftTree

branches = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=5)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Generate any tree with root 9, including equal siblings."""
    size = draw(st.integers(1, 9))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = [9, *draw(st.lists(st.integers(0, 3), min_size=size - 1, max_size=size - 1))]
    return DraftTree(tuple(tokens), tuple(parents))


class Scripted(Drafter):
    """Proposes a given tree and records the steps that it observes."""

    pipelined = False
    branching = True

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        self.seen: list[VerifiedStep] = []
        self.calls: list[str] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.calls.append("begin")

    def propose(self, max_depth: int) -> DraftTree:
        return self.tree

    def observe(self, step: VerifiedStep) -> None:
        self.seen.append(step)

    def end(self) -> None:
        self.calls.append("end")


def path(tree: DraftTree, node: int) -> tuple[int, ...]:
    return (*path(tree, tree.parents[node]), tree.tokens[node]) if node > 0 else ()


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {path(tree, node) for node in range(len(tree))}


def choice(tokens: tuple[int, ...]) -> int:
    """Return the next token of an artificial target after a path."""
    return (7 * sum(tokens) + len(tokens)) % 4


def verified(tree: DraftTree) -> VerifiedStep:
    choices = tuple(choice(path(tree, node)) for node in range(len(tree)))
    argmaxes = tuple(token + 10 for token in choices)
    accepted, tokens = accept(tree, choices)
    return VerifiedStep(tree, choices, argmaxes, accepted, tokens)


@given(trees(), trees())
def test_the_merged_tree_has_exactly_the_paths_of_both(first: DraftTree, second: DraftTree) -> None:
    combined = CombinedDrafter(Scripted(first), Scripted(second))
    merged = combined.propose(10)
    assert paths(merged) == paths(first) | paths(second)
    assert len(merged) == len(paths(merged))  # no duplicates
    from_first = {path(merged, node) for node in range(len(merged))[: len(paths(first))]}
    assert from_first == paths(first)


@given(trees(), trees(), st.integers(0, 5), st.booleans())
def test_each_drafter_sees_the_step_as_if_its_own_tree_had_been_verified(
    first: DraftTree, second: DraftTree, depth: int, as_chain: bool
) -> None:
    drafters = Scripted(first), Scripted(second)
    combined = CombinedDrafter(*drafters)
    proposed = combined.propose(10)
    step = verified((proposed.first_chain() if as_chain else proposed).pruned(depth, 99))
    combined.observe(step)
    accepted = step.tokens[: len(step.accepted)]
    for drafter in drafters:
        (seen,) = drafter.seen
        assert paths(seen.tree) == paths(drafter.tree) & paths(step.tree)
        assert seen.tokens == step.tokens
        for node in range(len(seen.tree)):
            expected = choice(path(seen.tree, node))
            assert (seen.choices[node], seen.argmaxes[node]) == (expected, expected + 10)
        own = [accepted[:end] for end in range(1, len(accepted) + 1)]
        own = [tokens for tokens in own if tokens in paths(drafter.tree)]
        assert [path(seen.tree, node) for node in seen.accepted] == own
        if paths(drafter.tree) <= paths(step.tree):
            assert seen.tree is drafter.tree


def test_a_step_without_a_proposal_is_observed_as_one_without_a_draft() -> None:
    first, second = Scripted(DraftTree.chain(9, [1])), Scripted(DraftTree.chain(9, [2]))
    combined = CombinedDrafter(first, second)
    combined.begin([9])
    step = verified(DraftTree.chain(5))
    combined.observe(step)
    combined.propose(4)
    combined.observe(verified(DraftTree.chain(9, [1])))
    combined.observe(step)  # with the proposal before, this tree's root would be another
    for drafter in (first, second):
        assert [seen.tree.tokens[0] for seen in drafter.seen] == [5, 9, 5]


@given(trees())
def test_a_trees_view_of_its_own_step_is_the_step(tree: DraftTree) -> None:
    step = verified(DraftTree.from_branches(9, sorted(paths(tree))))
    seen = view(step, step.tree)
    assert seen == step


def test_the_window_advances_inside_a_combination() -> None:
    alone = LookaheadDrafter(4, 3, 3, pool_from_prompt=False)
    inside = LookaheadDrafter(4, 3, 3, pool_from_prompt=False)
    combined = CombinedDrafter(PromptLookupDrafter(3), inside)
    prompt = [1, 2, 3, 2, 3]
    alone.begin(prompt)
    combined.begin(prompt)
    for _ in range(8):
        tree, merged = alone.propose(50), combined.propose(50)
        assert paths(tree) <= paths(merged)
        assert len(merged.origins) == len(merged) - 1
        step = verified(merged)
        combined.observe(step)
        alone.observe(view(step, tree))
    assert "window" in merged.origins
    combined.end()


def test_pipelining_waits_for_neither_only_if_neither_drafts() -> None:
    drafting = Scripted(DraftTree.chain(9, [1]))
    assert not CombinedDrafter(NoDraft(), drafting).pipelined
    assert not CombinedDrafter(drafting, NoDraft()).pipelined
    assert CombinedDrafter(NoDraft(), NoDraft()).pipelined


def test_both_begin_and_end() -> None:
    drafters = Scripted(DraftTree.chain(9)), Scripted(DraftTree.chain(9))
    combined = CombinedDrafter(*drafters)
    combined.begin([9])
    combined.end()
    assert [drafter.calls for drafter in drafters] == [["begin", "end"]] * 2
