"""The planner as a whole, on texts whose best draft is known."""

import itertools
import random

import pytest

from mlxspec.draft.context_index import ContextIndex, OutputMemory
from mlxspec.draft.drafter import DraftTree, VerifiedStep
from mlxspec.draft.suffix_index import SEPARATOR, Occurrence, SuffixIndex
from mlxspec.eval.replay import replay
from mlxspec.plan.chips import chip_curve
from mlxspec.plan.cost_curve import CostCurve
from tests.support.planners import suffix_planner

FLAT = CostCurve([(1, 1), (32, 1.3)])
LINEAR = CostCurve([(1, 1), (32, 32)])


def noise(length: int, seed: int) -> list[int]:
    """Tokens that never repeat."""
    return random.Random(seed).sample(range(1000, 30000), length)


@pytest.mark.parametrize("branching", [False, True])
def test_copies_are_drafted_wide_where_rows_are_cheap(branching: bool) -> None:
    text = noise(200, seed=1)
    drafter = suffix_planner(FLAT, branching=branching)
    copied = replay([5, *text, 6, *text[:10]], text[10:150], drafter)
    assert copied.tokens / copied.cost(FLAT) > 8


def test_nothing_is_drafted_where_rows_cost_as_much_as_steps() -> None:
    text = noise(200, seed=2)
    drafter = suffix_planner(LINEAR, branching=True)
    assert set(replay([*text, *text[:50]], text[50:150], drafter).rows) == {1}


def test_text_without_matches_is_decoded_plainly_and_pipelined() -> None:
    text = noise(400, seed=3)
    drafter = suffix_planner(chip_curve("M4 Pro"), branching=True)
    drafter.begin(text[:100])
    assert len(drafter.propose(100)) == 1
    drafter.end()
    plain = replay(text[:100], text[100:], drafter)
    assert set(plain.rows) == {1}
    drafter.begin(text[:100])
    for token in text[100:]:
        assert len(drafter.propose(100)) == 1
        drafter.observe(VerifiedStep(DraftTree.chain(0), (), (), (), (token,)))
    drafter.propose(100)
    assert drafter.pipelined
    drafter.end()


def test_a_passage_worth_drafting_ends_the_pipeline() -> None:
    text = noise(300, seed=4)
    drafter = suffix_planner(chip_curve("M4 Pro"))
    output = [*noise(100, seed=5), *text[50:250]]
    rows = replay(text, output, drafter).rows
    assert set(rows[:100]) == {1}
    assert max(rows[100:]) > 2
    assert len(rows) < 200


def test_no_draft_is_deeper_than_max_depth() -> None:
    text = noise(60, seed=6)
    drafter = suffix_planner(FLAT, branching=True)
    drafter.begin([*text, *text[:20]])
    for max_depth in (0, 1, 3):
        assert max(drafter.propose(max_depth).depths) <= max_depth
    drafter.end()


def test_an_earlier_output_is_drafted_from_memory() -> None:
    output = noise(100, seed=7)
    memory = OutputMemory()
    drafter = suffix_planner(FLAT, memory=memory)
    first = replay([1, 2, 3], output, drafter)
    again = replay([1, 4, 3], output, drafter)
    assert len(first.rows) == 100
    assert len(again.rows) < 30
    assert memory.text().count(SEPARATOR) == 2


def test_an_answer_is_drafted_from_the_one_it_takes_the_place_of() -> None:
    prompt, answer = noise(100, seed=9), noise(80, seed=10)
    index = ContextIndex()
    first = replay(prompt, answer, suffix_planner(FLAT, context=index))
    again = replay(prompt, answer, suffix_planner(FLAT, context=index))
    assert len(first.rows) == 80
    assert len(again.rows) < 30
    # A drafter without a conversation's index forgets.
    forgetful = suffix_planner(FLAT)
    for _ in range(2):
        assert len(replay(prompt, answer, forgetful).rows) == 80


def test_a_store_is_drafted_from() -> None:
    class Stored:
        tokens = (*noise(100, seed=8), SEPARATOR)

        def occurrences(self, tail: list[int], limit: int) -> list[Occurrence]:
            if tail[-1] not in self.tokens:
                return []
            return [Occurrence(1, self.tokens.index(tail[-1]) + 1 - len(self.tokens))]

    drafter = suffix_planner(FLAT, store=Stored())
    assert len(replay([1, 2], list(Stored.tokens[:100]), drafter).rows) < 40


def test_an_abandoned_generation_leaves_the_drafter_usable() -> None:
    text = noise(50, seed=9)
    drafter = suffix_planner(FLAT, memory=OutputMemory())
    drafter.begin(text)
    drafter.end()
    assert len(replay([*text, *text[:5]], text[5:], drafter).rows) < 20


def test_the_guard_bounds_what_misleading_text_costs() -> None:
    # The same start goes on differently every time: every draft is wrong.
    curve = chip_curve("M2 Pro")
    source = random.Random(10)
    output = [t for _ in range(150) for t in (7, 8, 9, 10, source.randrange(100, 30000))]
    guarded = suffix_planner(curve, branching=True)
    done = replay([7, 8, 9, 10], [*output, *noise(100, seed=11)], guarded)
    assert done.tokens / done.cost(curve) > 0.98


def test_where_waiting_is_expensive_only_a_draft_that_the_guard_allows_is_waited_for() -> None:
    known, new = noise(30, seed=11), iter(range(40_000, 41_000))
    for sync_overhead, bank, pipelined in ((0.02, -9, False), (0.4, -9, True)):
        drafter = suffix_planner(FLAT, sync_overhead)
        drafter.begin([*known, *known])
        tokens = [*(next(new) for _ in range(60)), *known[:3]]
        for token in tokens:  # until drafts have been worth nothing for long
            drafter.propose(0)
            drafter.observe(VerifiedStep(DraftTree.chain(0), (), (), (), (token,)))
        drafter.policy.bank = bank
        drafter.propose(100)
        assert drafter.pipelined is pipelined
        drafter.end()


def test_where_a_row_costs_a_step_three_of_four_steps_look_for_no_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches: list[int] = []
    find = SuffixIndex.occurrences
    monkeypatch.setattr(SuffixIndex, "occurrences", lambda index: searches.append(1) or find(index))
    text = noise(400, seed=13)
    replay(text[:100], text[100:], suffix_planner(LINEAR))
    assert 70 < len(searches) < 90
    searches.clear()
    replay(text[:100], text[100:], suffix_planner(chip_curve("M2 Pro")))
    assert len(searches) == 300


def test_while_plain_steps_are_wanted_some_in_a_row_go_without_a_draft() -> None:
    drafter = suffix_planner(FLAT)
    drafter.costs.wants_plain_steps = True
    drafter.begin([5, 6, 7, 8] * 20)
    drafted = []
    for token in [5, 6, 7, 8] * 30:
        drafted.append(len(drafter.propose(100)) > 1)
        assert drafter.pipelined
        drafter.observe(VerifiedStep(DraftTree.chain(8), (), (), (), (token,)))
    drafter.end()
    plain_runs = [len(list(run)) for some, run in itertools.groupby(drafted) if not some]
    assert max(plain_runs) > 3  # the first and the last of a run tell nothing
    assert sum(drafted) > 60
