"""The suffix index and its continuations against a search of the whole text."""

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.corpus.suffix_index import (
    MAX_LENGTH,
    MOST_BYTES,
    SEPARATOR,
    Continuation,
    Occurrence,
    SuffixIndex,
    common_length,
    continuations,
)
from tests.support.examples import examples


def match_lengths(text: Sequence[int]) -> dict[int, int]:
    """Return, for each position, how many tokens before it equal the text's last ones."""
    lengths = {}
    for position in range(1, len(text)):
        length = 0
        while (
            length < min(position, MAX_LENGTH)
            and text[position - 1 - length] == text[len(text) - 1 - length]
        ):
            length += 1
        if length:
            lengths[position] = length
    return lengths


def newest_eight_per_size(text: Sequence[int]) -> list[tuple[int, int]]:
    """Search exhaustively under the index's rules."""
    lengths = match_lengths(text)
    found: dict[int, int] = {}
    for size in (8, 4, 2, 1):
        if size == 1 and len(found) >= 8:
            continue
        long_enough = [position for position, length in lengths.items() if length >= size]
        found |= {position: lengths[position] for position in sorted(long_enough)[-8:]}
    return sorted(((length, position) for position, length in found.items()), reverse=True)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.integers(0, 120))
@settings(max_examples=examples(100))
def test_finds_what_an_exhaustive_search_finds(text: list[int], prompt_length: int) -> None:
    index = SuffixIndex(text[:prompt_length])
    index.extend(text[prompt_length:])
    assert index.occurrences() == newest_eight_per_size(text)


def test_growing_past_its_tables_loses_nothing() -> None:
    source = random.Random(1)
    text = [source.randrange(300) for _ in range(9000)]
    grown = SuffixIndex(text[:10])
    for start in range(10, len(text), 7):
        grown.extend(text[start : start + 7])
    whole = SuffixIndex(text)
    for token in text[:200]:
        assert grown.occurrences() == whole.occurrences() != []
        grown.extend([token])
        whole.extend([token])


def test_the_largest_token_ids_and_separators_are_kept() -> None:
    text = [2**31 - 1, 6, SEPARATOR, 5, 2**31 - 1]
    index = SuffixIndex(text[:2])
    index.extend(text[2:])
    assert list(index.tokens) == text
    assert index.occurrences() == SuffixIndex(text).occurrences() == [(1, 1)]


@pytest.mark.parametrize("text", [[], [7]])
def test_without_an_earlier_token_nothing_is_found(text: list[int]) -> None:
    assert SuffixIndex([*text, 9]).occurrences() == []


def tokens_after(text: list[int], path: list[int]) -> list[int]:
    index = SuffixIndex(text)
    found = continuations(index.tokens, index.occurrences(), 0, list)
    for depth, token in enumerate(path):
        (group,) = (c.occurrences for c in found if c.token == token)
        found = continuations(index.tokens, group, depth + 1, lambda: path)
    return [continuation.token for continuation in found]


def test_the_longest_match_comes_first_then_the_most_frequent_then_the_newest() -> None:
    assert tokens_after([1, 2, 7, 0, 2, 8, 0, 2, 8, 1, 2], []) == [7, 8]
    assert tokens_after([2, 8, 0, 2, 8, 3, 2, 9, 1, 2], []) == [8, 9]
    assert tokens_after([2, 8, 0, 2, 9, 1, 2], []) == [9, 8]


def test_only_occurrences_that_hold_the_path_go_on() -> None:
    text = [1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1]
    assert tokens_after(text, [2]) == [5, 3]
    assert tokens_after(text, [2, 5]) == [6]


def test_a_loop_is_drafted_beyond_the_end_of_the_text() -> None:
    text = [0, 4, 5, 4, 5]
    assert tokens_after(text, [4, 5, 4, 5, 4]) == [5]


def test_nothing_is_drafted_across_a_separator() -> None:
    assert tokens_after([1, 2, SEPARATOR, 3, 1, 2], []) == []


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_one_occurrence_goes_on_as_it_does_among_others(at: int) -> None:
    text, path = [1, 2, SEPARATOR, 1, 3], [8, 9, 8, 9]
    one, other = Occurrence(5, at), Occurrence(1, 3)
    for depth in range(4):
        alone = continuations(text, [one], depth, lambda: path)
        together = continuations(text, [one, other], depth, lambda: path)
        assert [found.token for found in alone] == [
            found.token for found in together if one in found.occurrences
        ]
        assert all(found == Continuation(found.token, 5, at, [one]) for found in alone)


def test_an_index_says_what_its_arrays_take() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = SuffixIndex(range(50_000))
        taken = tracemalloc.get_traced_memory()[0] - before
        assert taken == pytest.approx(index.nbytes, rel=0.1)
        assert 36 * 50_000 < index.nbytes <= MOST_BYTES * 50_000
    finally:
        tracemalloc.stop()


def test_common_length_is_that_of_a_comparison_token_by_token() -> None:
    pick = random.Random(1)
    for _ in range(300):
        first = [pick.randrange(2) for _ in range(pick.randint(0, 12))]
        second = [pick.randrange(2) for _ in range(pick.randint(0, 12))]
        pairs = zip(first, second, strict=False)
        expected = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
        )
        assert common_length(first, second) == expected
