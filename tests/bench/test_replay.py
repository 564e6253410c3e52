"""The steps and figures of a replay, against values worked out by hand."""

from collections.abc import Sequence

import pytest

from mlxspec.bench.replay import Replayed, Step, replay, replay_report
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree


class Scripted(Drafter):
    """Proposes given trees in turn and records the steps that it observes."""

    def __init__(self, *trees: DraftTree) -> None:
        self.trees = list(trees)
        self.steps: list[VerifiedStep] = []
        self.ended = False

    def begin(self, prompt: Sequence[int]) -> None:
        self.last = prompt[-1]

    def propose(self, max_depth: int) -> DraftTree:
        return self.trees.pop(0) if self.trees else DraftTree.chain(self.last)

    def observe(self, step: VerifiedStep) -> None:
        self.steps.append(step)
        self.last = step.tokens[-1]

    def end(self) -> None:
        self.ended = True


def of_rows(tokens: int, *rows: int) -> Replayed:
    """Return an output whose steps had these numbers of rows."""
    return Replayed(tokens, tuple(map(Step, rows)))


def test_plain_decoding_takes_one_row_per_token() -> None:
    replayed = replay([1], [2, 3, 4], NoDraft())
    assert replayed.rows == [1, 1, 1]
    assert replayed.cost(lambda rows: rows * 2.0) == 6


def test_a_tree_is_walked_along_the_output() -> None:
    tree = DraftTree.from_branches(1, [[2, 9], [2, 3], [8]])
    drafter = Scripted(tree)
    replayed = replay([1], [2, 3, 4, 5], drafter)
    assert replayed.rows == [5, 1]
    first = drafter.steps[0]
    assert first.accepted == (1, 3)
    assert first.tokens == (2, 3, 4)
    assert [first.choices[node] for node in (0, 1, 3)] == [2, 3, 4]
    assert drafter.ended


def test_an_output_may_end_inside_a_draft() -> None:
    drafter = Scripted(DraftTree.chain(1, [2, 3, 4]))
    replayed = replay([1], [2, 3], drafter)
    assert replayed.rows == [4]
    assert drafter.steps[0].tokens == (2, 3)
    assert drafter.steps[0].accepted == (1, 2)


def test_a_draft_made_while_a_plain_step_is_under_way_waits() -> None:
    class Pipelined(Scripted):
        pipelined = True

    draft = DraftTree.chain(2, [3])
    drafter = Pipelined(DraftTree.chain(1), draft, DraftTree.chain(3, [4]))
    assert replay([1], [2, 3, 4, 5], drafter).rows == [1, 1, 2]


def test_prompt_lookup_copies_ten_tokens_a_step() -> None:
    text = list(range(100, 140))
    replayed = replay([*text, 1, 2, text[0]], text[1:34], PromptLookupDrafter())
    assert replayed.rows == [11, 11, 11]
    assert replayed.cost(CostCurve([(1, 1), (11, 2)])) == 6


def test_sets_count_alike_and_completions_by_their_time() -> None:
    replayed = [
        ("a", of_rows(8, 2, 2, 2, 2)),  # 8 tokens for a cost of 6
        ("b", of_rows(2, 1, 1)),
        ("a", of_rows(3, 2, 2, 2, 2)),  # 3 tokens for a cost of 6
        ("c", of_rows(1, 2, 2)),  # below 0.98, but by only two plain steps
    ]
    figures = replay_report(replayed, lambda rows: {1: 1.0, 2: 1.5}[rows])
    assert figures["sets"]["a"]["speedup"] == pytest.approx(11 / 12)
    assert figures["sets"]["a"]["share_slow"] == 0.5
    assert figures["sets"]["a"]["tokens_per_step"] == 11 / 8
    assert figures["sets"]["a"]["rows_per_step"] == 2
    assert figures["sets"]["c"]["share_slow"] == 0
    assert figures["speedup"] == pytest.approx((11 / 12 * 1 * 1 / 3) ** (1 / 3))
    assert figures["share_slow"] == pytest.approx(0.5 / 3)
    assert figures["tokens_per_step"] == 14 / 12
    assert figures["rows_per_step"] == 22 / 12
    assert figures["worst"] == pytest.approx(1 / 3)
    assert list(figures["sets"]) == ["a", "b", "c"]
