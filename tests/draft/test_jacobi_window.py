"""The window against Jacobi iterations that keep every guess by its step and its position."""

from __future__ import annotations

import random

import pytest

from mlxspec.draft.lookahead import JacobiWindow


def target(tokens: list[int]) -> int:
    """A made-up target: its token after these."""
    return random.Random(str(tokens)).randrange(50)


@pytest.mark.parametrize(
    ("window_size", "ngram_size"), [(1, 2), (4, 2), (1, 5), (3, 3), (5, 4), (6, 5)]
)
def test_guesses_and_ngrams_are_those_of_jacobi_iterations(
    window_size: int, ngram_size: int
) -> None:
    text = [3, 1, 4]
    window = JacobiWindow(window_size, ngram_size, text)
    made = {-1: {len(text) - 1 + i: token for i, token in enumerate(window.levels[0])}}
    assert set(window.levels[0]) <= set(text)
    for step in range(ngram_size + 6):
        here = len(text) - 1
        oldest = max(-1, step - ngram_size + 1)
        made[oldest][here] = text[-1]
        columns = window_size + max(0, ngram_size - 2 - step)
        expected_levels, newest, ngrams = [], [], []
        for at in range(oldest, step):
            first = here + at - oldest
            expected_levels.append([made[at][first + column] for column in range(columns)])
        assert window.levels == expected_levels
        for column in range(columns):
            before = [made[oldest][here + i] for i in range(column)]
            diagonal = [level[column] for level in expected_levels]
            newest.append(target(text[:-1] + before + diagonal))
            ngrams.append((*diagonal, newest[-1]))
        made[step] = {here + step - oldest + i: token for i, token in enumerate(newest)}
        text.append(target(text))
        full = step >= ngram_size - 2
        assert window.advance(newest, text[-1]) == (ngrams if full else [])


def test_a_window_that_was_verified_in_part_keeps_its_width() -> None:
    window = JacobiWindow(5, 3, [1, 2, 3])
    window.advance([4] * 6, 9)
    ngrams = window.advance([7, 8], 9)
    assert [ngram[1:] for ngram in ngrams] == [(4, 7), (4, 8)]
    assert [len(level) for level in window.levels] == [5, 5]
    assert window.levels[1][:2] == [7, 8]
    assert set(window.levels[1][2:]) <= {1, 2, 3}


def test_a_step_without_the_window_changes_only_the_current_token() -> None:
    window = JacobiWindow(3, 3, [1, 2, 3])
    before = [list(level) for level in window.levels]
    window.skip(8)
    assert window.levels == [[8, *before[0][1:]]]
