"""The lookahead drafter, with targets made up for the purpose."""

from __future__ import annotations

import random

import pytest

from mlxspec.draft.drafter import DraftTree, VerifiedStep, accept
from mlxspec.draft.lookahead import LookaheadDrafter
from mlxspec.errors import OptionError


def verified(tree: DraftTree, successors: dict[int, int], argmax: int = 0) -> VerifiedStep:
    """A step of a target whose choice is a function of the token before it."""
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
    # Both guesses after 1 are drafted; (2, 9) is the older one, and wrong.
    tree = drafter.propose(100)
    assert set(tree.tokens[1:]) == {2, 3, 9}
    drafter.observe(verified(tree, ROUND))
    drafter.observe(verified(DraftTree.chain(4), {4: 1}))
    tree = drafter.propose(100)
    assert tree.first_chain().tokens == (1, 2, 3)
    assert tree.tokens == (1, 2, 3, 9)  # as old as before: behind the one that was right


def test_the_window_may_be_accepted_along() -> None:
    drafter = LookaheadDrafter(3, 3, 2, pool_from_prompt=False)
    drafter.begin([5, 5, 5])  # so all of the window's first level are 5
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
def test_trees_fit_into_any_budget(prompt: list[int], size: tuple[int, int, int]) -> None:
    for max_depth in (0, 1, 2, 5, 100):
        drafter = LookaheadDrafter(*size)
        drafter.begin(prompt)
        for _ in range(8):
            tree = drafter.propose(max_depth)
            assert max(tree.depths) <= max_depth
            drafter.observe(verified(tree, ROUND))
        drafter.end()


def test_it_fits_into_the_rows_that_are_left() -> None:
    drafter = LookaheadDrafter(6, 4, 3)
    drafter.begin([1, 2, 3, 4, 5, 6] * 3)
    widths = []
    for max_rows in (1, 2, 9, 12, 20, 100):
        tree = drafter.propose_beside(5, 100, max_rows)
        assert len(tree) - 1 <= max(0, max_rows - 5)
        widths.append(sum(level == 0 for level, _ in drafter.window_rows()))
        drafter.observe(verified(tree, ROUND))
    assert widths == sorted(widths)
    assert widths[-1] >= 6


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
