"""p_accept: token classes, estimates and learning."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.corpus.suffix_index import Continuation, Occurrence
from mlxspec.drafting import p_accept as features
from mlxspec.drafting.p_accept import TOKEN_FEATURES, AcceptanceModel, Corrections, token_classes

_EXPECTED = {
    "▁the": features.WORD_START,
    "Ġthe": features.WORD_START,
    "▁": features.WORD_START,
    "ing": features.CONTINUATION,
    "7": features.DIGIT,
    ").": features.PUNCTUATION,
    "▁(": features.SPACED_PUNCTUATION,
    "<0x0A>": features.BYTE_OR_NEWLINE,
    "Ċ": features.BYTE_OR_NEWLINE,
    "ĊĊ": features.BYTE_OR_NEWLINE,
    "": features.WORD_START,
}


@pytest.mark.parametrize("piece", _EXPECTED)
def test_pieces_are_classified_in_either_spelling(piece: str) -> None:
    assert token_classes([piece], special=()) == bytes([_EXPECTED[piece]])


def test_special_tokens_go_by_their_id() -> None:
    assert token_classes(["</s>", "a"], special={0}) == bytes(
        [features.SPECIAL, features.CONTINUATION]
    )


def continuation(length: int, position: int = 50, count: int = 1) -> Continuation:
    return Continuation(9, length, position, [Occurrence(length, position)] * count)


def p_accept(model: AcceptanceModel, *found: Continuation) -> list[float]:
    estimates = model.estimate(found, end=100, depth=0, before=3, limit=6)
    return [p_accept for p_accept, _, _ in estimates]


def test_longer_matches_are_more_likely_right() -> None:
    model = AcceptanceModel()
    short, middle, long = (p_accept(model, continuation(length))[0] for length in (1, 4, 20))
    assert 0 < short < middle < long < 1


def test_competitors_make_the_best_less_likely() -> None:
    model = AcceptanceModel()
    alone = p_accept(model, continuation(4, count=2))[0]
    close, clear = (
        p_accept(model, continuation(4), continuation(length, position=20))[0] for length in (4, 1)
    )
    assert close < clear < alone


def test_what_comes_from_earlier_texts_is_less_likely_right() -> None:
    own = p_accept(AcceptanceModel(), continuation(3))[0]
    assert p_accept(AcceptanceModel(earlier=True), continuation(3))[0] < own


@pytest.mark.parametrize("earlier", [True, False])
def test_the_next_generation_knows_what_this_one_taught(earlier: bool) -> None:
    taught = Corrections()
    model = AcceptanceModel(earlier=earlier)
    model.begin([taught])
    first = p_accept(model, continuation(3))
    estimates = model.estimate([continuation(3)], end=100, depth=0, before=3, limit=1)
    for _ in range(20):
        model.learn(estimates, None)
    model.begin([taught])
    assert p_accept(model, continuation(3)) < first
    model.begin()
    assert p_accept(model, continuation(3)) == first


def test_what_differs_in_a_feature_is_distinguished() -> None:
    """Continuations of the prompt are right, those of the output are wrong."""
    source, taught = random.Random(1), Corrections()
    model = AcceptanceModel()
    before = p_accept(model, continuation(3))[0]
    for _ in range(100):
        model.begin([taught], output_start=70)
        for position, right in source.choices(((50, 0), (80, None)), k=4):
            found = [continuation(3, position)]
            model.learn(model.estimate(found, 100, 0, 3, 1), right)
    model.begin([taught], output_start=70)
    of_prompt = p_accept(model, continuation(3, position=50))[0]
    of_output = p_accept(model, continuation(3, position=80))[0]
    assert of_output < before < of_prompt


@pytest.mark.parametrize("truth", [True, False])
def test_experience_moves_the_estimates(truth: bool) -> None:
    model = AcceptanceModel()
    before = p_accept(model, continuation(2))[0]
    for _ in range(60):
        estimates = model.estimate([continuation(2)], end=100, depth=0, before=3, limit=1)
        model.learn(estimates, 0 if truth else None)
    after = p_accept(model, continuation(2))[0]
    assert after > max(before, 0.9) if truth else after < min(before, 0.1)
    model.begin()
    assert p_accept(model, continuation(2))[0] == before


@given(
    length=st.integers(1, 600),
    newest=st.integers(10, 90),
    count=st.integers(1, 8),
    depth=st.integers(1, 700),
    token=st.integers(0, 12),
    earlier=st.booleans(),
    weights=st.dictionaries(st.integers(0, TOKEN_FEATURES + 12), st.floats(-1, 1)),
)
def test_where_all_occurrences_agree_the_fast_way_says_the_same(
    length: int,
    newest: int,
    count: int,
    depth: int,
    token: int,
    earlier: bool,
    weights: dict[int, float],
) -> None:
    model = AcceptanceModel(bytes([0, 3, 5, 6, 1, 2, 4, 0, 3, 1]), earlier=earlier)
    model.begin([Corrections(weights)], output_start=200)
    one = Continuation(token, length, newest, [Occurrence(length, newest)] * count)
    ((expected, _, _),) = model.estimate([one], 100, depth, 7, 6)
    assert model.unanimous(one, 100)(token, 7, depth) == pytest.approx(expected)
