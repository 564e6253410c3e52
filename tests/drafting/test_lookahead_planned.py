"""Sizes that follow cost and acceptance, with targets and costs that are made up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.bench.replay import replay
from mlxspec.drafting.costs import CostCurve
from mlxspec.drafting.drafter import DraftTree, VerifiedStep
from mlxspec.drafting.lookahead import LookaheadDrafter, LookaheadKnowledge, NgramPool
from mlxspec.drafting.planner import Planner
from tests.support.planners import lookahead_planner

FLAT = CostCurve([(1, 1.0), (16, 1.05), (64, 1.2)])
LINEAR = CostCurve([(1, 1.0), (64, 64.0)])
UNKNOWN = CostCurve([(1, 1.0)])
REPEATING = [random.Random(1).randrange(30) for _ in range(40)]
ONCE = random.Random(2).sample(range(5000), 300)


def speed(drafter: Planner, prompt: list[int], output: list[int]) -> float:
    """Plain decoding's time by the drafter's."""
    completion = replay(prompt, output, drafter)
    return completion.tokens / completion.cost(drafter.costs.curve)


@pytest.mark.parametrize("curve", [LINEAR, UNKNOWN], ids=["linear", "unknown"])
def test_nothing_is_drafted_where_it_cannot_pay_or_the_cost_is_unknown(curve: CostCurve) -> None:
    drafter = lookahead_planner(curve)
    completion = replay(REPEATING * 2, REPEATING * 4, drafter)
    assert set(completion.rows) == {1}


def test_it_is_pipelined_where_there_is_nothing_to_draft() -> None:
    drafter = lookahead_planner(LINEAR)
    drafter.begin(ONCE[:20])
    for token in ONCE[20:100]:
        assert len(drafter.propose(100)) == 1
        assert drafter.pipelined
        drafter.observe(VerifiedStep(DraftTree.chain(0), (token,), (token,), (), (token,)))


def test_a_text_that_repeats_is_drafted_where_rows_are_cheap() -> None:
    assert speed(lookahead_planner(FLAT), REPEATING * 2, REPEATING * 5) > 3
    moderate = CostCurve([(1, 1.0), (4, 1.8), (8, 2.5), (64, 9.0)])
    assert speed(lookahead_planner(moderate), REPEATING * 2, REPEATING * 5) > 1.8


@pytest.mark.parametrize("slope", [0.2, 0.5, 0.8])
def test_little_is_lost_where_guesses_fail(slope: float) -> None:
    curve = CostCurve([(1, 1.0), (64, 1 + 63 * slope)])
    source = random.Random(3)
    noise = [source.randrange(20) for _ in range(400)]  # each token has been seen, none foretells
    assert speed(lookahead_planner(curve), noise[:100], noise[100:]) > 0.97


def test_a_planner_drafts_guesses_and_no_window() -> None:
    drafter = lookahead_planner(FLAT)
    drafter.begin(REPEATING * 3)
    tree = drafter.propose(100)
    assert len(tree) > 4
    assert set(tree.origins) == {"guess"}


@given(st.lists(st.integers(0, 2), min_size=8, max_size=30), st.integers(2, 5))
def test_guesses_agree_with_as_many_tokens_as_they_say(text: list[int], ngram_size: int) -> None:
    pool = NgramPool(ngram_size, -1)
    pool.live_guesses(text[0])
    pool.read(text[:1])
    for end in range(1, len(text)):
        pool.follow([text[end]])
        pool.read([text[end]])
        read = text[: end + 1]
        for tail, agreement in pool.live_guesses(text[end]):
            reach = min(agreement, ngram_size - 1)  # a streak counts on
            ngram = [*read[len(read) - reach :], *tail]
            ends = range(len(ngram), len(read) + 1)
            assert any(read[at - len(ngram) : at] == ngram for at in ends)


def test_odds_are_learned_from_what_came() -> None:
    odds = LookaheadKnowledge()
    before = odds.p_accept(2, 0)
    for _ in range(50):
        odds.learn(2, 0, True)
    assert odds.p_accept(2, 0) > max(0.9, before)
    assert odds.p_accept(5, 0) < odds.p_accept(2, 0)


def test_the_likeliest_nodes_hang_together() -> None:
    guesses = [((1, 2, 3), 4), ((1, 2, 4), 3), ((5, 6), 1), ((1, 7), 1)]
    drafter = LookaheadDrafter("auto")
    drafter.begin([9])
    tree = drafter._likely(guesses, 3, 0.0, 4).best_first()
    assert [*tree.p_reached] == sorted(tree.p_reached, reverse=True)
    assert len(tree.p_reached) == 7
    for n_draft in range(1, 8):
        assert len(tree.first(n_draft)) == n_draft + 1
        assert sum(tree.p_by_depth(n_draft)) == pytest.approx(sum(tree.p_reached[:n_draft]))


def test_without_a_planner_all_guesses_are_drafted_and_no_window() -> None:
    alone, given = LookaheadDrafter("auto"), LookaheadDrafter(0, guess_set_size=16)
    for drafter in (alone, given):
        drafter.begin(REPEATING * 2)
    assert len(alone.propose(100)) > 1
    assert alone.propose(100) == given.propose(100)
    assert alone.window_rows() == {}
