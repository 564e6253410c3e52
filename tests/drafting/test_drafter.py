"""Draft trees compared with brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.tree import DraftTree

branches = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = draw(st.lists(st.integers(-1, 5), min_size=size, max_size=size))
    return DraftTree(tuple(tokens), tuple(parents))


def path(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Return the nodes from the root to ``node``."""
    return (*path(tree, tree.parents[node]), node) if node >= 0 else ()


def token_paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in path(tree, node))[1:] for node in range(len(tree))}


@given(trees())
def test_depths_and_ancestors_follow_the_parents(tree: DraftTree) -> None:
    expected = np.zeros((len(tree), len(tree)), dtype=bool)
    for node in range(len(tree)):
        expected[node, list(path(tree, node))] = True
        assert tree.depths[node] == len(path(tree, node)) - 1
    assert (tree.ancestors() == expected).all()


@given(branches)
def test_branches_with_a_common_prefix_share_its_nodes(texts: list[list[int]]) -> None:
    tree = DraftTree.from_branches(9, texts)
    prefixes = {tuple(text[:end]) for text in texts for end in range(len(text) + 1)}
    assert token_paths(tree) == prefixes | {()}
    assert len(tree) == len(prefixes | {()})


@given(trees(), st.integers(0, 5))
def test_pruning_keeps_exactly_the_paths_that_are_short_and_in_the_vocabulary(
    tree: DraftTree, max_depth: int
) -> None:
    tree = DraftTree((0, *tree.tokens[1:]), tree.parents)
    kept = {
        text
        for text in token_paths(tree)
        if len(text) <= max_depth and all(0 <= token < 4 for token in text)
    }
    assert token_paths(tree.pruned(max_depth, vocab_size=4)) == kept


@given(trees())
def test_the_first_chain_descends_through_first_children(tree: DraftTree) -> None:
    expected, node = [tree.tokens[0]], 0
    while children := [n for n in range(len(tree)) if tree.parents[n] == node]:
        node = children[0]
        expected.append(tree.tokens[node])
    assert tree.first_chain() == DraftTree.chain(expected[0], expected[1:])


@given(trees(), st.integers(-1, 5))
def test_child_is_the_first_that_proposes_the_token(tree: DraftTree, token: int) -> None:
    for node in range(len(tree)):
        matches = [
            n for n in range(len(tree)) if tree.parents[n] == node and tree.tokens[n] == token
        ]
        assert tree.child(node, token) == (matches[0] if matches else None)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((), ()), ((1, 2), (-1,)), ((1,), (0,)), ((1, 2), (-1, 1)), ((1, 2), (-1, -1))],
)
def test_an_invalid_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="draft tree"):
        DraftTree(tokens, parents)


def test_any_sequence_of_integers_makes_a_tree() -> None:
    numbers = np.array([4, 5, 6], dtype=np.uint16)
    chain = DraftTree.chain(numbers[0], numbers[1:])
    assert chain == DraftTree((4, 5, 6), (-1, 0, 1)) == DraftTree([4, 5, 6], [-1, 0, 1])
    assert chain.is_chain
    assert all(type(token) is int for token in chain.tokens)
    with pytest.raises(TypeError):
        DraftTree.chain(1, [2.5])


@pytest.mark.parametrize(
    "p_reached", [(0.5,), (0.5, 0.6, 0.2), (-0.1, 0.1, 0.1), (0.5, float("nan"), 0.1), (1.5, 1, 1)]
)
def test_probabilities_fit_the_nodes_and_never_rise(p_reached: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="probabilit"):
        DraftTree((1, 2, 3, 4), (-1, 0, 1, 0), p_reached)


def test_probabilities_and_origins_go_with_their_nodes() -> None:
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 1, 0), (0.4, 0.2, 0.6), ("a", "b", "c"))
    first = tree.filtered([True, True, True, False])
    assert (first.p_reached, first.origins) == ((0.4, 0.2), ("a", "b"))
    assert tree.first_chain().origins == ("a", "b")
    assert tree.pruned(1, 99).p_reached == (0.4, 0.6)
