"""The tree of a lookahead step against masks and positions built from the paper's description."""

from __future__ import annotations

import itertools
import random

import pytest

from mlxspec.draft.drafter import DraftTree, TreeBuilder
from mlxspec.draft.lookahead import add_window

Row = tuple[str, int, int]  # ("window", level, column) or ("guess", number, place)


def visible(row: Row) -> list[Row]:
    """What a row may attend to among the step's rows, as the paper has it."""
    kind, first, second = row
    if kind == "guess":
        return [("window", 0, 0), *(("guess", first, place) for place in range(second + 1))]
    trunk = [("window", 0, column) for column in range(second + 1)]
    return trunk + [("window", level, second) for level in range(1, first + 1)]


def position(row: Row) -> int:
    """The row's position behind that of the current token."""
    kind, first, second = row
    return second + 1 if kind == "guess" else first + second


@pytest.mark.parametrize("ngram_size", [2, 3, 4, 5])
def test_masks_and_positions_are_the_papers(ngram_size: int) -> None:
    source = random.Random(ngram_size)
    for window_size, guess_count, alphabet in itertools.product(range(1, 7), range(5), (2, 5, 999)):
        for height in range(1, ngram_size):  # fewer levels: the window is warming up
            levels = [source.choices(range(alphabet), k=window_size) for _ in range(height)]
            guesses = [
                source.choices(range(alphabet), k=ngram_size - 1) for _ in range(guess_count)
            ]
            check(levels, guesses)


def check(levels: list[list[int]], guesses: list[list[int]]) -> None:
    tree = TreeBuilder.of(DraftTree.from_branches(levels[0][0], guesses))
    rows = add_window(tree, levels)
    draft = tree.tree()
    tokens: dict[Row, int] = {}
    nodes: dict[Row, int] = {}
    for level, of_level in enumerate(rows):
        for column, node in enumerate(of_level):
            nodes["window", level, column] = node
            tokens["window", level, column] = levels[level][column]
    for number, guess in enumerate(guesses):
        node = 0
        for place, token in enumerate(guess):
            child = draft.child(node, token)
            assert child is not None
            node = nodes["guess", number, place] = child
            tokens["guess", number, place] = token
    assert len(tokens) == sum(map(len, levels)) + sum(map(len, guesses))
    mask = draft.ancestors()
    for row, node in nodes.items():
        assert draft.tokens[node] == tokens[row]
        assert draft.depths[node] == position(row)
        assert set(mask[node].nonzero()[0]) == {nodes[other] for other in visible(row)}
    assert set(nodes.values()) | {0} == set(range(len(draft)))  # and there is no other row


def test_equal_beginnings_are_verified_once() -> None:
    tree = TreeBuilder.of(DraftTree.from_branches(7, [(1, 2, 3), (1, 2, 4)]))
    assert add_window(tree, [[7, 1, 5], [1, 2, 6]]) == [[0, 1, 5], [1, 2, 6]]
    assert tree.tree().tokens == (7, 1, 2, 3, 4, 5, 6)


def test_the_first_guess_is_what_remains_of_it_for_a_target_without_trees() -> None:
    tree = TreeBuilder.of(DraftTree.from_branches(7, [(1, 2, 3), (4, 5, 6)]))
    add_window(tree, [[7, 8, 9], [1, 8, 9]])
    assert tree.tree().first_chain().tokens == (7, 1, 2, 3)
