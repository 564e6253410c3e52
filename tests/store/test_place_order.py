"""The order of places against its definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.store.suffix_array import TOKEN_BITS, sorted_places

TOKENS = st.lists(st.integers(-1, 3), max_size=80)


def before(tokens: list[int], place: int) -> list[int]:
    """The tokens before a place read backwards, as far as its text goes."""
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
    last = (1 << TOKEN_BITS) - 2
    tokens = np.array([last, 1, last, 0, last - 1, 0, -1], dtype=np.int32)
    assert sorted_places(tokens).tolist() == [4, 2, 5, 1, 3]


def test_a_text_without_places_has_no_order():
    for tokens in ([], [-1], [5], [5, -1, 6, -1]):
        assert sorted_places(np.array(tokens, dtype=np.int32)).tolist() == []
