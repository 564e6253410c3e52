"""The pool against a list that is searched from its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.draft.lookahead import NgramPool

texts = st.lists(st.integers(0, 3), max_size=40)


def newest_first(ngrams: list[tuple[int, ...]], first: int, size: int) -> list[tuple[int, ...]]:
    """The last ``size`` different n-grams with this first token, by when they were last added."""
    tails: list[tuple[int, ...]] = []
    for ngram in reversed(ngrams):
        if ngram[0] == first and ngram[1:] not in tails:
            tails.append(ngram[1:])
    return tails[: 64 if size == -1 else size]


@given(texts, texts, st.integers(2, 4), st.sampled_from([1, 2, 3, -1]))
def test_each_token_keeps_the_ngrams_added_last(
    text: list[int], more: list[int], ngram_size: int, guess_set_size: int
) -> None:
    pool = NgramPool(ngram_size, guess_set_size)
    pool.read(text)
    foreign = [tuple(more[at : at + ngram_size]) for at in range(len(more) - ngram_size + 1)]
    for ngram in foreign:
        pool.add(ngram)
    added = [tuple(text[at : at + ngram_size]) for at in range(len(text) - ngram_size + 1)]
    for first in range(4):
        expected = newest_first(added + foreign, first, guess_set_size)
        assert pool.guesses(first) == expected
        assert pool.guesses(first, 1) == expected[:1]


def test_a_text_may_come_in_pieces() -> None:
    pool = NgramPool(3, 4)
    for piece in ([1], [2, 3], [], [4]):
        pool.read(piece)
    assert pool.guesses(1) == [(2, 3)]
    assert pool.guesses(2) == [(3, 4)]
    assert pool.guesses(3) == pool.guesses(9) == []


def test_it_knows_which_guesses_a_text_held() -> None:
    pool = NgramPool(3, 4)
    pool.read([1, 2, 3])
    pool.add((1, 5, 6))
    pool.add((1, 2, 3))
    assert pool.guesses(1) == [(2, 3), (5, 6)]
    assert pool.text_guesses(1) == [(2, 3)]
