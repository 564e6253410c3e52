"""Views of steps compared with sets of token paths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.accept import VerifiedStep, accept, view
from mlxspec.drafting.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Generate any tree with root 9, including equal siblings."""
    size = draw(st.integers(1, 9))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = [9, *draw(st.lists(st.integers(0, 3), min_size=size - 1, max_size=size - 1))]
    return DraftTree(tuple(tokens), tuple(parents))


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


@given(trees(), trees(), st.integers(0, 5), st.booleans())
def test_a_tree_s_view_of_a_step_is_that_of_its_own_nodes(
    tree: DraftTree, other: DraftTree, depth: int, as_chain: bool
) -> None:
    both = DraftTree.from_branches(9, sorted(paths(tree) | paths(other)))
    step = verified((both.first_chain() if as_chain else both).pruned(depth, 99))
    accepted = step.tokens[: len(step.accepted)]
    seen = view(step, tree)
    assert paths(seen.tree) == paths(tree) & paths(step.tree)
    assert seen.tokens == step.tokens
    for node in range(len(seen.tree)):
        expected = choice(path(seen.tree, node))
        assert (seen.choices[node], seen.argmaxes[node]) == (expected, expected + 10)
    own = [accepted[:end] for end in range(1, len(accepted) + 1)]
    own = [tokens for tokens in own if tokens in paths(tree)]
    assert [path(seen.tree, node) for node in seen.accepted] == own
    if paths(tree) <= paths(step.tree):
        assert seen.tree is tree


@given(trees())
def test_a_trees_view_of_its_own_step_is_the_step(tree: DraftTree) -> None:
    step = verified(DraftTree.from_branches(9, sorted(paths(tree))))
    seen = view(step, step.tree)
    assert seen == step
