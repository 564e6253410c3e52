"""Lookahead's pool, window, tree and drafter, each against an independent reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.drafting.accept import VerifiedStep, accept
from mlxspec.drafting.lookahead import (
    WINDOW,
    LookaheadDrafter,
    add_window,
    first_window,
    next_window,
)
from mlxspec.drafting.tree import DraftTree, TreeBuilder
from mlxspec.errors import OptionError

texts = st.lists(st.integers(0, 3), max_size=40)


def newest_first(ngrams: list[tuple[int, ...]], first: int, size: int) -> list[tuple[int, ...]]:
    """Return the last ``size`` different n-grams with this first token, the newest first."""
    tails: list[tuple[int, ...]] = []
    for ngram in reversed(ngrams):
        if ngram[0] == first and ngram[1:] not in tails:
            tails.append(ngram[1:])
    return tails[: 64 if size == -1 else size]


def guesses(drafter: LookaheadDrafter, first: int) -> DraftTree:
    """Return a pool's guesses after a token."""
    drafter._text.append(first)
    return drafter.propose(100)


@given(texts, texts, st.integers(2, 4), st.sampled_from([1, 2, 3, -1]))
def test_each_token_keeps_the_ngrams_added_last(
    text: list[int], more: list[int], ngram_size: int, guess_set_size: int
) -> None:
    drafter = LookaheadDrafter(0, ngram_size, guess_set_size)
    drafter.begin(text or [9])
    foreign = [tuple(more[at : at + ngram_size]) for at in range(len(more) - ngram_size + 1)]
    for ngram in foreign:
        drafter.add(ngram)
    added = [tuple(text[at : at + ngram_size]) for at in range(len(text) - ngram_size + 1)]
    for first in range(4):
        expected = newest_first(added + foreign, first, guess_set_size)
        assert guesses(drafter, first) == DraftTree.from_branches(first, expected)


def test_a_text_may_come_in_pieces() -> None:
    drafter = LookaheadDrafter(0, 3, 4)
    drafter.begin([1])
    for piece in ((2, 3), (4,)):
        drafter.observe(VerifiedStep(DraftTree.chain(1), (), (), (), piece))
    assert guesses(drafter, 1) == DraftTree.from_branches(1, [(2, 3)])
    assert guesses(drafter, 2) == DraftTree.from_branches(2, [(3, 4)])
    for token in (3, 9):
        assert guesses(drafter, token) == DraftTree.chain(token)


def target(tokens: list[int]) -> int:
    """Return the next token of an artificial target."""
    return random.Random(str(tokens)).randrange(50)


@pytest.mark.parametrize(
    ("window_size", "ngram_size"), [(1, 2), (4, 2), (1, 5), (3, 3), (5, 4), (6, 5)]
)
def test_guesses_and_ngrams_are_those_of_jacobi_iterations(
    window_size: int, ngram_size: int
) -> None:
    text = [3, 1, 4]
    levels = first_window(window_size, ngram_size, text)
    made = {-1: {len(text) - 1 + i: token for i, token in enumerate(levels[0])}}
    assert set(levels[0]) <= set(text)
    for step in range(ngram_size + 6):
        here = len(text) - 1
        oldest = max(-1, step - ngram_size + 1)
        made[oldest][here] = text[-1]
        columns = window_size + max(0, ngram_size - 2 - step)
        expected_levels, newest, ngrams = [], [], []
        for at in range(oldest, step):
            first = here + at - oldest
            expected_levels.append([made[at][first + column] for column in range(columns)])
        assert levels == expected_levels
        for column in range(columns):
            before = [made[oldest][here + i] for i in range(column)]
            diagonal = [level[column] for level in expected_levels]
            newest.append(target(text[:-1] + before + diagonal))
            ngrams.append((*diagonal, newest[-1]))
        made[step] = {here + step - oldest + i: token for i, token in enumerate(newest)}
        text.append(target(text))
        full = step >= ngram_size - 2
        levels, found = next_window(levels, newest, ngram_size)
        levels[0][0] = text[-1]
        assert found == (ngrams if full else [])


Row = tuple[str, int, int]  # ("window", level, column) or ("guess", number, place)


def visible(row: Row) -> list[Row]:
    """Return the rows of a step that a row may attend to, after the paper."""
    kind, first, second = row
    if kind == "guess":
        return [("window", 0, 0), *(("guess", first, place) for place in range(second + 1))]
    trunk = [("window", 0, column) for column in range(second + 1)]
    return trunk + [("window", level, second) for level in range(1, first + 1)]


def position(row: Row) -> int:
    """Return a row's position relative to the current token."""
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


def builder(root: int, guesses: Iterable[Iterable[int]]) -> TreeBuilder:
    tree = TreeBuilder(root)
    for guess in guesses:
        tree.add_branch(guess)
    return tree


def check(levels: list[list[int]], guesses: list[list[int]]) -> None:
    tree = builder(levels[0][0], guesses)
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
    assert set(nodes.values()) | {0} == set(range(len(draft)))  # there are no other rows


def test_equal_beginnings_are_verified_once() -> None:
    tree = builder(7, [(1, 2, 3), (1, 2, 4)])
    assert add_window(tree, [[7, 1, 5], [1, 2, 6]]) == [[0, 1, 5], [1, 2, 6]]
    assert tree.tree().tokens == (7, 1, 2, 3, 4, 5, 6)


def test_the_first_guess_is_what_remains_of_it_for_a_target_without_trees() -> None:
    tree = builder(7, [(1, 2, 3), (4, 5, 6)])
    add_window(tree, [[7, 8, 9], [1, 8, 9]])
    assert tree.tree().first_chain().tokens == (7, 1, 2, 3)


def verified(tree: DraftTree, successors: dict[int, int], argmax: int = 0) -> VerifiedStep:
    """Verify a tree with a target whose choice is a function of the previous token."""
    choices = tuple(successors.get(token, argmax) for token in tree.tokens)
    accepted, tokens = accept(tree, choices)
    return VerifiedStep(tree, choices, choices, accepted, tokens)


ROUND = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 1}


def test_a_guess_that_is_right_to_its_end_gives_the_bonus_token_too() -> None:
    drafter = LookaheadDrafter(window_size=0, ngram_size=4, guess_set_size=2)
    drafter.begin([1, 2, 3, 4, 5, 6, 1])
    step = verified(drafter.propose(100), ROUND)
    assert len(step.accepted) == 3  # N - 1
    assert step.tokens == (2, 3, 4, 5)


def test_after_a_hit_the_pool_gets_what_was_emitted_and_not_the_wrong_guess() -> None:
    drafter = LookaheadDrafter(window_size=0, ngram_size=3, guess_set_size=4)
    drafter.begin([1, 2, 9, 1, 2, 3, 1])
    # Both guesses after 1 are drafted; the older one, (2, 9), is wrong.
    tree = drafter.propose(100)
    assert set(tree.tokens[1:]) == {2, 3, 9}
    drafter.observe(verified(tree, ROUND))
    drafter.observe(verified(DraftTree.chain(4), {4: 1}))
    tree = drafter.propose(100)
    assert tree.first_chain().tokens == (1, 2, 3)
    assert tree.tokens == (1, 2, 3, 9)  # its age is unchanged, so the right guess comes first


def test_the_window_may_be_accepted_along() -> None:
    drafter = LookaheadDrafter(3, 3, 2, pool_from_prompt=False)
    drafter.begin([5, 5, 5])  # so the window's first level is all 5
    step = verified(drafter.propose(100), {5: 5})
    assert step.tokens == (5, 5, 5, 5)


def test_the_window_follows_the_argmax_where_choices_are_samples() -> None:
    drafter = LookaheadDrafter(2, 2, 4, pool_from_prompt=False)
    drafter.begin([1])
    tree = drafter.propose(100)
    rows = len(tree)
    drafter.observe(VerifiedStep(tree, (30,) * rows, (20,) * rows, (), (30,)))
    # The n-grams of two columns began with 1, and the text is 1, 30.
    drafter.observe(VerifiedStep(drafter.propose(0), (1,), (1,), (), (1,)))
    assert {drafter.propose(100).tokens[node] for node in (1, 2)} == {20, 30}


@pytest.mark.parametrize("prompt", [[1], [1, 2], list(range(200))])
@pytest.mark.parametrize("size", [(1, 2, 1), (8, 5, 3), (0, 3, -1), (30, 2, -1)])
def test_trees_are_never_deeper_than_max_depth(
    prompt: list[int], size: tuple[int, int, int]
) -> None:
    for max_depth in (0, 1, 2, 5, 100):
        drafter = LookaheadDrafter(*size)
        drafter.begin(prompt)
        for _ in range(8):
            tree = drafter.propose(max_depth)
            assert max(tree.depths) <= max_depth
            drafter.observe(verified(tree, ROUND))
        drafter.end()


def test_the_window_is_drafted_as_soon_as_it_fits() -> None:
    drafter = LookaheadDrafter(3, 3, 3)
    drafter.begin([1, 2, 3, 4])
    deepest = max(drafter.propose(100).depths)
    assert WINDOW in drafter.propose(100).origins
    assert max(drafter.propose(deepest).depths) == deepest
    assert max(drafter.propose(deepest - 1).depths) < deepest


@pytest.mark.parametrize("cut", [DraftTree.first_chain, lambda tree: tree.pruned(2, 99)])
def test_a_tree_that_was_cut_does_no_harm(cut) -> None:
    drafter = LookaheadDrafter(5, 4, 3)
    drafter.begin([1, 2, 3, 4, 5, 6, 1, 3])
    emitted = []
    for _ in range(10):
        step = verified(cut(drafter.propose(100)), ROUND)
        drafter.observe(step)
        emitted += step.tokens
    assert emitted == [ROUND[token] for token in [3, *emitted[:-1]]]


def test_the_same_generation_drafts_the_same() -> None:
    drafter = LookaheadDrafter(5, 3, 3)
    runs = []
    for _ in range(2):
        drafter.begin([1, 7, 2, 9, 1])
        trees = []
        for _ in range(6):
            trees.append(drafter.propose(100))
            drafter.observe(verified(trees[-1], ROUND, argmax=3))
        drafter.end()
        runs.append(trees)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 5, 8), "window_size is -1"),
        ((10, 1, 8), "ngram_size is 1"),
        ((10, 5, 0), "guess_set_size is 0"),
        ((10, 5, -2), "guess_set_size is -2"),
        ((2.5, 5, None), "window_size is 2.5: choose a whole number"),
        ((10, 2.5, 8), "ngram_size is 2.5: choose a whole number"),
        ((10, 5, "8"), "guess_set_size is '8': choose a whole number"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LookaheadDrafter(*sizes)


@pytest.mark.parametrize("window_size", [0, 5])
def test_without_a_limit_on_guesses_a_step_stays_bounded_on_a_text_of_few_symbols(
    window_size: int,
) -> None:
    drawn = random.Random(1)
    drafter = LookaheadDrafter(window_size, guess_set_size=-1)
    drafter.begin([drawn.randrange(8) for _ in range(20_000)])
    for _ in range(20):
        tree = drafter.propose(100)
        assert len(tree) <= (drafter.ngram_size - 1) * (window_size + 64) + 1
        drafter.observe(verified(tree, {}, argmax=drawn.randrange(8)))
