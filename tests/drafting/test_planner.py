"""The whole planner, on texts whose best draft is known."""

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxspec.bench.replay import MAX_DEPTH, replay, verify
from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.corpus.suffix_index import SEPARATOR, Occurrence
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.candidates import Candidates
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.cost_file import StepTime
from mlxspec.drafting.costs import FixedCosts, LiveCosts
from mlxspec.drafting.p_accept import AcceptanceModel, Corrections
from mlxspec.drafting.planner import Planner, allowed_shortfall
from mlxspec.drafting.suffix_source import SuffixSource, Text, TextNode
from mlxspec.drafting.tree import DraftTree
from tests.support.costs import live_costs
from tests.support.planners import suffix_planner

FLAT = CostCurve([(1, 1), (32, 1.3)])
LINEAR = CostCurve([(1, 1), (32, 32)])


def noise(length: int, seed: int) -> list[int]:
    """Return tokens that never repeat."""
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
    drafter = suffix_planner(known_chip("M4 Pro").curve, branching=True)
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
    drafter = suffix_planner(known_chip("M4 Pro").curve)
    output = [*noise(100, seed=5), *text[50:250]]
    rows = replay(text, output, drafter).rows
    assert set(rows[:100]) == {1}
    assert max(rows[100:]) > 2
    assert len(rows) < 200


def why_none(prompt: Sequence[int], costs: CostCurve | LiveCosts) -> str:
    """Return the stated reason for a first proposal without a draft."""
    costs = FixedCosts(costs) if isinstance(costs, CostCurve) else costs
    drafter = Planner(costs, [SuffixSource()])
    drafter.begin(prompt)
    assert len(drafter.propose(100)) == 1
    reason = drafter.no_draft()
    assert drafter.no_draft() == reason  # asking changes nothing
    drafter.end()
    return reason


def test_why_nothing_is_drafted_is_said_with_its_figures() -> None:
    text = noise(100, seed=30)
    assert why_none(text, CostCurve([(1, 1), (11, 3)])).endswith(
        "likely enough here for rows that cost 0.20 plain steps each"
    )
    copied = [*text, text[3]]
    assert why_none(copied, LINEAR).endswith("rows that cost 1.00 plain steps each")
    stairs = CostCurve([(1, 1), (2, 3), (32, 3.5)])
    figures = r"(\d+) rows cost (\S+) plain steps, expected (\S+) tokens"
    found = re.fullmatch(figures, why_none(copied, stairs))
    assert found is not None
    assert float(found[2]) == pytest.approx(stairs(int(found[1])), abs=0.01)
    assert 1 < float(found[3]) < 3
    # The expected tokens are worth the step's time, but the guard does not take the risk.
    guard = r"the guard, with 2\.00 plain steps in its bank, forbids it: "
    found = re.fullmatch(guard + figures, why_none(copied, CostCurve([(1, 1), (2, 1.3)])))
    assert found is not None
    assert found.groups()[:2] == ("2", "1.30")
    expected = float(found[3])
    price = (expected / 1.3) ** 0.8 * 1.2**0.2
    # The step loses 0.3 if the draft is wrong, and nothing if it is right.
    assert 0.3 * (2 - expected) > allowed_shortfall([2.0], expected - 1 - price * 0.3)


def test_the_time_of_a_plain_step_is_without_the_planner() -> None:
    """A plain decoder has no planner. Sequences that wait for a draft pay for planning, too."""
    costs = live_costs({1024: [StepTime(1, 0.010, 0.02), StepTime(2, 0.012, 0.02)]})
    drafter = Planner(costs, [SuffixSource()])
    drafter.begin(noise(50, seed=8))
    tree = DraftTree.chain(0)
    for number in range(300):
        drafter.propose(0)
        times = {"seconds": 0.013, "blocking_seconds": 0.003, "pipelined": number % 10 > 0}
        drafter.observe(VerifiedStep(tree, (), (), (), (1,), context=51 + number, **times))
    drafter.end()
    assert costs.plain_seconds == pytest.approx(0.010, rel=0.01)
    assert costs.sync_overhead == pytest.approx(0.3, abs=0.1)


def learning(known: Sequence[StepTime], truth: CostCurve, disturbed: int = 0) -> list[float]:
    """Generate 300 tokens at a time; return tokens per plain step's time.

    Other programs slow down half of the first ``disturbed`` steps.
    """
    shared, speeds, scatter = live_costs({1024: known, 4096: known}), [], random.Random(5)
    for number in range(3):
        prompt, pick, output = noise(400, seed=number), random.Random(number), []
        while len(output) < 300:  # copies with new words in between
            start, fresh = pick.randrange(350), pick.randrange(30000, 60000)
            output += [*prompt[start : start + pick.randrange(5, 40)], *range(fresh, fresh + 8)]
        costs, seconds = shared.for_generation(), 0.0
        drafter = Planner(costs, [SuffixSource()], branching=False)
        drafter.begin(prompt)
        done, last, ahead = 0, prompt[-1], False
        while done < len(output):
            proposal, pipelined = drafter.propose(MAX_DEPTH), ahead
            tree = DraftTree.chain(last) if pipelined else proposal
            ahead = len(proposal) == 1 and drafter.pipelined
            step = verify(tree, output[done : done + len(tree)], ahead)
            time = 0.01 * truth(len(tree)) * scatter.lognormvariate(0, 0.05)
            if disturbed > 0 and scatter.random() < 0.5:
                time *= scatter.uniform(2, 10)
            disturbed -= 1
            done, last, seconds = done + len(step.tokens), step.tokens[-1], seconds + time
            timed = {"rows": len(tree), "seconds": time, "context": len(prompt) + done}
            drafter.observe(replace(step, **timed, pipelined=pipelined))
        drafter.end()
        speeds.append(0.01 * len(output) / seconds)
    return speeds


def known_times(costs: Mapping[int, float], uncertainty: float = 0.1) -> list[StepTime]:
    return [StepTime(rows, 0.01 * cost, uncertainty) for rows, cost in costs.items()]


MEASURED = (1, 2, 4, 5, 6, 8, 10, 12, 16, 32)


@pytest.mark.parametrize("chip", ["CPU fp32 OpenBLAS", "M4 Pro", "M3 Max"])
def test_where_only_plain_steps_were_measured_drafts_are_soon_those_of_a_good_curve(chip: str):
    truth = known_chip(chip).curve
    good = learning(known_times({rows: truth(rows) for rows in MEASURED}), truth)
    begun = learning(known_times({1: 1.0}), truth)
    assert begun[0] > 0.85 * good[0]
    assert sum(begun[1:]) > 0.9 * sum(good[1:])


@pytest.mark.slow
def test_a_machine_that_is_still_busy_at_first_is_learned_as_well():
    truth = known_chip("CPU fp32 OpenBLAS").curve
    good = learning(known_times({rows: truth(rows) for rows in MEASURED}), truth)
    for plain in (0.5, 1.0, 2.0):  # compared with a quiet machine
        assert learning(known_times({1: plain}, 0.4), truth, disturbed=20)[2] > 0.85 * good[2]


@pytest.mark.parametrize("chip", ["CPU fp32 OpenBLAS", "M4 Pro"])
@pytest.mark.parametrize("uncertainty", [0.02, 0.1])
def test_rows_that_were_measured_too_dear_are_drafted_after_a_few_hundred_tokens(
    chip: str, uncertainty: float
):
    truth = known_chip(chip).curve
    good = learning(known_times({rows: truth(rows) for rows in MEASURED}), truth)
    dear = known_times({rows: float(rows) for rows in MEASURED}, uncertainty)
    speeds = learning(dear, truth)
    assert speeds[0] > 1.2
    assert speeds[2] > 0.75 * good[2]


def test_trying_drafts_costs_little_where_rows_cost_as_much_as_steps():
    for known in ({rows: float(rows) for rows in MEASURED}, {1: 1.0}):
        assert min(learning(known_times(known), LINEAR)) > 0.97


def test_fixed_costs_are_not_hoped_to_be_lower():
    costs = FixedCosts(LINEAR)
    assert costs.hopeful is costs.curve


def test_no_draft_is_deeper_than_max_depth() -> None:
    text = noise(60, seed=6)
    drafter = suffix_planner(FLAT, branching=True)
    drafter.begin([*text, *text[:20]])
    for max_depth in (0, 1, 3):
        assert max(drafter.propose(max_depth).depths) <= max_depth
    drafter.end()


def test_an_earlier_output_is_drafted_from_memory() -> None:
    output = noise(100, seed=7)
    reports = []

    class Noting(AnswerIndex):
        def add(self, output, earned=None, prompt=()):
            super().add(output, earned, prompt)
            self.settle()
            reports.append(dict(earned))

    drafter = suffix_planner(FLAT, memory=Noting())
    first = replay([1, 2, 3], output, drafter)
    again = replay([1, 4, 3], output, drafter)
    assert len(first.rows) == 100
    assert len(again.rows) < 30
    assert reports[0] == {"steps": 100, "tokens": 100}
    assert reports[1]["steps"] == len(again.rows)
    # The last step adds no token of the target's own.
    assert reports[1]["memory"] == 101 - len(again.rows)


@pytest.mark.slow
def test_a_memory_that_misleads_is_trusted_less_in_each_generation() -> None:
    """Its texts contain the output's tokens, each with a wrong continuation."""

    class Lies(AnswerIndex):
        def add(self, *answer: Any, **more: Any) -> None:
            """Remember no output."""

    output = noise(300, seed=20)
    lies = [[token, wrong] for token, wrong in zip(output, noise(300, seed=21), strict=True)]
    memory = Lies()
    for lie in lies:
        AnswerIndex.add(memory, [*lie, *noise(3, seed=lie[1])])
    memory.settle()
    drafter = suffix_planner(known_chip("M4 Pro").curve, memory=memory)
    costs = [replay([1, 2], output, drafter).cost(known_chip("M4 Pro").curve) for _ in range(4)]
    assert 301 > costs[0] > costs[1] >= costs[2] >= costs[3] >= 300


def test_the_context_comes_before_the_memory_and_this_before_the_prediction() -> None:
    """A node's origin is the first text that proposes it."""
    memory, prediction = AnswerIndex(), [3, 4, 5, 6]
    memory.add([1, 2, *prediction])
    memory.settle()

    def origins(prompt: list[int], **earlier: Any) -> tuple[str, ...]:
        source = SuffixSource(**earlier)
        source.begin(prompt)
        roots = source.search(2)
        tree = Candidates(2, roots, branching=True, max_depth=2).tree(8)
        assert tree.tokens[:3] == (2, 3, 4)
        accepted = VerifiedStep(tree, (3, 4, 9), (3, 4, 9), (1, 2), (3, 4, 9))
        source.observe(accepted)
        assert source.earned[tree.origins[0]] == 2
        return tree.origins[:2]

    repeated, new = [1, 2, 3, 4, 8, 1, 2], [7, 8, 1, 2]
    both = {"memory": memory, "prediction": prediction}
    assert origins(repeated, **both) == ("context", "context")
    assert origins(new, **both) == ("memory", "memory")
    assert origins(new, prediction=prediction) == ("prediction", "prediction")


def test_where_texts_agree_a_child_has_the_higher_probability() -> None:
    """Several texts give one draft; a single text gives its own."""
    every_token = range(1000)
    sure, unsure = (Corrections(dict.fromkeys(every_token, by)) for by in (0.3, -0.1))

    def candidates(*evidence: tuple[Any, ...], branching: bool = True) -> DraftTree:
        roots = [TextNode(Text(name, text, model), 5, at) for name, text, at, model in evidence]
        return Candidates(5, roots, branching=branching, max_depth=4).tree(8)

    def says(name: str, tokens: list[int], taught: Corrections) -> tuple[Any, ...]:
        model = AcceptanceModel(earlier=True)
        model.begin([taught])
        return name, [*tokens, SEPARATOR], [Occurrence(3, 0)], model

    high, low = says("high", [1, 2], sure), says("low", [1, 3], unsure)
    alone = candidates(high)
    both = candidates(low, high)
    assert alone.tokens == (5, 1, 2)
    assert set(both.tokens) == {5, 1, 2, 3}
    assert both.p_reached[0] == pytest.approx(alone.p_reached[0])
    assert both.origins[0] == "low"  # the first that proposes it
    below = [p for p, parent in zip(both.p_reached, both.parents[1:], strict=True) if parent]
    assert sum(below) <= both.p_reached[0]
    chain = candidates(low, high, branching=False)
    assert chain.tokens == (5, 1, 2)
    assert chain.is_chain


def test_an_abandoned_generation_leaves_the_drafter_usable() -> None:
    text = noise(50, seed=9)
    memory = AnswerIndex()
    drafter = suffix_planner(FLAT, memory=memory)
    drafter.begin(text)
    drafter.end()
    assert len(replay([*text, *text[:5]], text[5:], drafter).rows) < 20


def test_the_guard_bounds_what_misleading_text_costs() -> None:
    # The same start continues differently each time, so every draft is wrong.
    curve = known_chip("M2 Pro").curve
    source = random.Random(10)
    output = [t for _ in range(150) for t in (7, 8, 9, 10, source.randrange(100, 30000))]
    guarded = suffix_planner(curve, branching=True)
    done = replay([7, 8, 9, 10], [*output, *noise(100, seed=11)], guarded)
    assert done.tokens / done.cost(curve) > 0.98


def test_only_a_draft_that_the_guard_allows_is_waited_for() -> None:
    known, new = noise(30, seed=11), iter(range(40_000, 41_000))
    for sync_overhead, bank, pipelined in ((0.02, 2, False), (0.02, -9, True), (0.4, -9, True)):
        drafter = suffix_planner(FLAT, sync_overhead)
        drafter.begin([*known, *known])
        tokens = [*(next(new) for _ in range(60)), *known[:3]]
        for token in tokens:  # until drafts have gained nothing for long
            drafter.propose(0)
            drafter.observe(VerifiedStep(DraftTree.chain(0), (), (), (), (token,)))
        drafter.policy.bank = bank
        drafter.propose(100)
        assert drafter.pipelined is pipelined
        drafter.end()


def test_a_step_during_which_the_next_was_dispatched_makes_drafts_dearer() -> None:
    drafter = suffix_planner(FLAT, 0.3)
    drafter.begin([5, 6, 7])
    for ahead in (True, False, True):
        drafter.propose(100)
        drafter.observe(VerifiedStep(DraftTree.chain(7), (), (), (), (7,), ahead=ahead))
        assert drafter.policy.ahead is ahead
    drafter.end()


def test_while_plain_steps_are_wanted_some_consecutive_steps_have_no_draft() -> None:
    drafter = suffix_planner(FLAT)
    drafter.costs.wants_plain_steps = True
    drafter.begin([5, 6, 7, 8] * 20)
    drafted = []
    for token in [5, 6, 7, 8] * 30:
        drafter.policy.gain = 0.2  # when drafts gain more, none is dropped for a measurement
        drafted.append(len(drafter.propose(100)) > 1)
        assert drafted[-1] or drafter.pipelined
        drafter.observe(VerifiedStep(DraftTree.chain(8), (), (), (), (token,)))
    drafter.end()
    plain_runs = [len(list(run)) for some, run in itertools.groupby(drafted) if not some]
    assert max(plain_runs) > 3  # a run's first and last steps give no time
    assert sum(drafted) > 60
