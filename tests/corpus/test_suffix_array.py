"""The suffix array against its definition, and look-ups against a scan of the whole text."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.corpus import suffix_index
from mlxspec.corpus.suffix_index import MAX_VOCABULARY, Occurrence, SuffixArray, sorted_places

TOKENS = st.lists(st.integers(-1, 3), max_size=80)


def before(tokens: list[int], place: int) -> list[int]:
    """Return the tokens before a place, in reverse order, down to the start of its text."""
    text = tokens[:place][::-1]
    return text[: text.index(-1)] if -1 in text else text


@given(TOKENS)
def test_places_are_ordered_by_the_tokens_before_them(tokens: list[int]):
    order = sorted_places(np.array(tokens, dtype=np.int32)).tolist()
    inner = [p for p in range(1, len(tokens)) if tokens[p - 1] >= 0 and tokens[p] >= 0]
    assert sorted(order) == inner
    keys = [before(tokens, place) for place in order]
    assert keys == sorted(keys)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(60, 200))
def test_a_loop_is_ordered_over_its_last_64_tokens(loop: list[int], repetitions: int):
    tokens = loop * repetitions
    order = sorted_places(np.array(tokens, dtype=np.int32)).tolist()
    keys = [before(tokens, place)[:64] for place in order]
    assert keys == sorted(keys)


@given(st.integers(0, 62), st.permutations(range(4)))
def test_one_token_that_differs_far_back_decides(distance: int, firsts: list[int]):
    tokens = [token for first in firsts for token in (first, *[9] * (distance + 1), -1)]
    order = sorted_places(np.array(tokens, dtype=np.int32)).tolist()
    keys = [before(tokens, place) for place in order]
    assert keys == sorted(keys)


def test_equal_places_keep_the_texts_order():
    order = sorted_places(np.full(500, 7, dtype=np.int32)).tolist()
    assert order[-400:] == sorted(order[-400:])


def test_the_largest_ids_are_ordered_too():
    last = MAX_VOCABULARY - 1
    tokens = np.array([last, 1, last, 0, last - 1, 0, -1], dtype=np.int32)
    assert sorted_places(tokens).tolist() == [4, 2, 5, 1, 3]


def test_a_text_without_places_has_no_order():
    for tokens in ([], [-1], [5], [5, -1, 6, -1]):
        assert sorted_places(np.array(tokens, dtype=np.int32)).tolist() == []


TEXT = st.lists(st.integers(-1, 3), max_size=120)
TAIL = st.lists(st.integers(0, 3), max_size=12)


def search(tokens: list[int]) -> SuffixArray:
    array = np.array([*tokens, -1], dtype=np.int32)
    return SuffixArray(array, sorted_places(array))


def scan(tokens: list[int], tail: list[int]) -> list[Occurrence]:
    """Find every occurrence by a full scan, the best first."""
    found = []
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, len(tail), 64) and (
            tokens[place - 1 - length] == tail[-1 - length]
        ):
            length += 1
        if length and tokens[place] >= 0:
            found.append(Occurrence(length, place))
    return sorted(found, reverse=True)


@given(TEXT, TAIL)
def test_without_a_limit_every_occurrence_is_found(tokens: list[int], tail: list[int]):
    assert search(tokens).matches(tail, 1000) == scan(tokens, tail)


@given(TEXT, TAIL, st.integers(0, 12))
def test_the_longest_matches_are_found_in_order(tokens: list[int], tail: list[int], limit: int):
    found = search(tokens).matches(tail, limit)
    everything = scan(tokens, tail)
    assert [length for length, _ in found] == [length for length, _ in everything[:limit]]
    assert set(found) <= set(everything)
    assert found == sorted(set(found), reverse=True)


@given(st.integers(1, 3), st.integers(1, 100), st.integers(60, 150))
def test_in_a_loop_matches_are_counted_up_to_64_tokens(period: int, limit: int, size: int):
    tokens = [index % period for index in range(size)]
    found = search(tokens).matches(tokens, limit)
    everything = scan(tokens, tokens)
    assert [length for length, _ in found] == [length for length, _ in everything[:limit]]
    assert set(found) <= set(everything)


def test_equally_long_matches_are_sampled_from_all_of_them():
    """1 occurs a thousand times; 2 follows two thirds of the occurrences."""
    pick = random.Random(0)
    tokens = [
        token for _ in range(1000) for token in (pick.randrange(10, 50), 1, pick.choice((2, 2, 3)))
    ]
    found = search(tokens).matches([9, 1], 60)
    assert len(found) == 60
    share = sum(tokens[place] == 2 for _, place in found) / 60
    assert share == pytest.approx(2 / 3, abs=0.15)
    assert min(place for _, place in found) < 300 < 2700 < max(place for _, place in found)


def test_any_sequence_of_ids_is_a_context():
    text = [1, 2, 3, 4]
    expected = [Occurrence(2, 2)]
    for tail in ((1, 2), np.array([1, 2]), memoryview(np.array([1, 2], dtype=np.int32))):
        assert search(text).matches(tail, 4) == expected


@given(TEXT.filter(lambda tokens: len(tokens) > 1), TAIL, st.integers(0, 1000))
def test_a_wrong_order_gives_places_of_the_text(tokens: list[int], tail: list[int], seed: int):
    """They need not match, since every draft is verified."""
    pick = random.Random(seed)
    order = np.array([pick.randrange(1, len(tokens)) for _ in tokens], dtype=np.int32)
    found = SuffixArray(np.array(tokens, dtype=np.int32), order).matches(tail, 9)
    assert len(found) <= 9
    assert all(0 < place < len(tokens) and length > 0 for length, place in found)


def test_nothing_before_a_separator_counts():
    assert search([1, 2, 3]).matches([1, -1, 2], 4) == [Occurrence(1, 2)]
    assert search([1, 2, 3]).matches([1, 2, -1], 4) == []


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=70), max_size=5)


def joined(texts: list[list[int]]) -> SuffixArray:
    return SuffixArray.of(np.array(text, np.int32).tobytes() for text in texts)


@given(TEXTS, TEXTS, st.integers(1, 20))
def test_merging_equals_sorting_all(first: list[list[int]], second: list[list[int]], chunk: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_index, "_CHUNK", chunk)
        pieces = [*suffix_index.merged_order(joined(first), joined(second))]
    order = np.concatenate(pieces).tolist()
    whole = joined([*first, *second])
    tokens = whole.tokens.tolist()
    assert sorted(order) == sorted(whole.order.tolist())
    keys = [before(tokens, place)[:64] for place in order]
    assert keys == sorted(keys)
