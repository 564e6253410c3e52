"""Sizes that follow cost and acceptance, with targets and costs that are made up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.bench.replay import replay
from mlxspec.drafting.costs import CostCurve
from mlxspec.drafting.drafter import DraftTree, VerifiedStep, accept
from mlxspec.drafting.lookahead import LookaheadDrafter, LookaheadKnowledge, NgramPool, WindowSize
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


def windows_of(drafter: Planner, foreseeable: bool) -> list[bool]:
    """Whether each of 400 steps had a window.

    The target's token is a function of its position, whatever stands before it, so that guesses
    of the tokens ahead are right at once; or it is random. None ever comes again.
    """
    source = random.Random(4)
    output = source.sample(range(100_000), 5000)
    drafter.begin(output[:3])
    shown, done = [], 3
    for _ in range(400):
        tree = drafter.propose(500)
        shown.append(bool(drafter.window_rows()))
        choices = tuple(
            output[done + depth] if foreseeable else source.randrange(100_000)
            for depth in tree.depths
        )
        accepted, tokens = accept(tree, choices)
        drafter.observe(VerifiedStep(tree, choices, choices, accepted, tokens))
        done += len(tokens)
    drafter.end()
    return shown


def test_a_window_is_kept_where_it_earns_and_given_up_where_it_does_not() -> None:
    earning = windows_of(lookahead_planner(FLAT), foreseeable=True)
    failing = windows_of(lookahead_planner(FLAT), foreseeable=False)
    assert sum(earning[100:]) > 200
    assert 0 < sum(failing) < 100
    assert not any(windows_of(lookahead_planner(LINEAR), foreseeable=True))


def test_a_window_needs_a_target_that_verifies_trees() -> None:
    drafter = lookahead_planner(FLAT, branching=False)
    assert not any(windows_of(drafter, foreseeable=True))
    drafter.begin(REPEATING * 3)
    assert drafter.propose(100).is_chain


def chosen(
    gain: LookaheadKnowledge, curve: CostCurve, bank: float = 99.0, now=None
) -> WindowSize | None:
    return gain.best_window([1.0, 1.3], curve.table, 1.3, bank, 5, now)


def test_the_window_follows_cost_and_what_it_earns() -> None:
    gain = LookaheadKnowledge()
    wide = chosen(gain, FLAT)
    assert wide is not None
    assert wide.rows > 30
    assert chosen(gain, LINEAR) is None
    assert chosen(gain, UNKNOWN) is None
    assert chosen(gain, FLAT, bank=0.0) is None  # nobody can pay for a trial
    for _ in range(100):
        gain.learn_gain(wide, 0)
    assert chosen(gain, FLAT, now=wide) is None
    for _ in range(2000):
        gain.relax()
    assert chosen(gain, FLAT) == wide  # tried again


def test_a_window_at_hand_stays_unless_another_is_worth_noticeably_more() -> None:
    gain = LookaheadKnowledge()
    wide = chosen(gain, FLAT)
    near = WindowSize(7, 5)
    assert near != wide
    assert chosen(gain, FLAT, now=near) == near
    assert chosen(gain, FLAT, now=WindowSize(3, 3)) == wide


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
