"""Policies of other programs against exhaustive versions of their rules; hindsight."""

import random
from collections.abc import Callable, Sequence

import pytest

from benchmarks.rivals import RIVALS, Hindsight, NgramSimple, SuffixPath
from mlxspec.bench.policies import POLICIES
from mlxspec.bench.replay import replay
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.drafter import Drafter
from tests.support.planners import suffix_planner

FLAT = CostCurve([(1, 1), (16, 1)])
PROMPT = [1, 2, 3, 4, 5, 9, 1]


def drafter_of(name: str, output: list[int]) -> Drafter:
    """Return a policy's drafter for one output."""
    return (POLICIES | RIVALS)[name](FLAT, b"")(output)


def proposal(drafter: Drafter, text: Sequence[int], fed: int = 3) -> list[int]:
    """Return the draft after ``text``, whose last tokens arrive one by one."""
    known = []

    class Spy(Drafter):
        begin, observe, end = drafter.begin, drafter.observe, drafter.end

        def propose(self, max_depth: int):
            known.append(drafter.propose(max_depth))
            return type(known[-1]).chain(known[-1].tokens[0])

    replay(text[:-fed], [*text[-fed:], 0], Spy())
    return list(known[-1].tokens[1:])


def random_texts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(2, 6) for _ in range(source.randrange(8, 60))] for _ in range(60)]


def full_draft(text: list[int]) -> list[int]:
    for n in (3, 2, 1):
        for start in range(len(text) - n):
            draft = text[start + n : start + n + 10]
            if text[start : start + n] == text[-n:] and len(draft) == 10:
                return draft
    return []


def newest_long_copy(text: list[int]) -> list[int]:
    n, m = 2, 6
    if len(text) <= n + m + 1:
        return []
    for start in range(len(text) - n - 1, 0, -1):
        if text[start : start + n] == text[-n:]:
            draft = text[start + n : start + n + m]
            return draft if len(draft) >= n else []
    return []


def earliest_of(sizes: Sequence[int], count: int) -> Callable[[list[int]], list[int]]:
    def draft(text: list[int]) -> list[int]:
        for n in sizes:
            for start in range(len(text) - n):
                if text[start : start + n] == text[-n:]:
                    return text[start + n : start + n + count]
        return []

    return draft


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (lambda: drafter_of("spec-bench", []), full_draft),
        (lambda: drafter_of("transformers", []), earliest_of((2, 1), 10)),
        (lambda: drafter_of("vllm", []), earliest_of((5,), 5)),
        (lambda: NgramSimple(2, 6), newest_long_copy),
    ],
)
def test_drafts_follow_the_rule(
    drafter: Callable[[], Drafter], rule: Callable[[list[int]], list[int]]
) -> None:
    for text in random_texts():
        assert proposal(drafter(), text) == rule(text)


def test_suffix_decoding_drafts_the_most_frequent_path() -> None:
    # 3 follows "1 2" twice and 4 follows once; two matched tokens give a draft of two.
    text = [1, 2, 3, 7, 0, 1, 2, 4, 8, 0, 1, 2, 3, 7, 9, 1, 2]
    assert proposal(SuffixPath(), text) == [3, 7]


def test_suffix_decoding_stops_at_improbable_tokens() -> None:
    # With the end, each of ten continuations has 1/11, below the minimum of 0.1.
    text = [t for token in range(10, 20) for t in (1, token)] + [1]
    assert proposal(SuffixPath(), text) == []
    assert len(proposal(SuffixPath(min_token_prob=0.01), text)) == 1


@pytest.mark.parametrize("name", POLICIES | RIVALS)
def test_every_policy_replays_an_output_to_its_end(name: str) -> None:
    source = random.Random(6)
    output = [source.randrange(30) for _ in range(200)]
    replayed = replay([3, *output[:80]], output, drafter_of(name, output))
    assert replayed.tokens == 200
    assert len(replayed.rows) <= 200


def rows(output: list[int], curve: CostCurve, branching: bool = False) -> list[int]:
    return replay(PROMPT, output, Hindsight(output, curve, branching=branching)).rows


def test_verifies_exactly_what_is_right() -> None:
    assert rows([2, 3, 4, 7], FLAT) == [4]  # in the prompt, 5 and 9 follow it
    assert rows([7, 8], FLAT) == [1, 1]


def test_verifies_less_where_all_would_cost_too_much() -> None:
    # Per emitted token 3 rows cost 0.5, and 5 rows 0.8.
    stairs = CostCurve([(1, 1), (3, 1.5), (4, 4), (5, 4)])
    assert rows([2, 3, 4, 5, 9], stairs)[0] == 3
    # Two rows cost as much as two plain steps, so there is no gain.
    assert rows([2, 3, 4], CostCurve([(1, 1), (64, 64)])) == [1, 1, 1]


def test_of_a_tree_it_verifies_up_to_the_right_node() -> None:
    prompt = [5, 1, 2, 2, 5, 1, 3, 3, 5, 1]  # after 5 1: the newer 3 comes first, then 2
    output = [2, 2]
    chain = replay(prompt, output, Hindsight(output, FLAT, branching=False)).rows
    tree = replay(prompt, output, Hindsight(output, FLAT, branching=True)).rows
    assert chain[0] == 1
    assert len(tree) == 1
    assert tree[0] > 2


def test_a_node_costs_all_rows_up_to_it_and_not_those_of_its_depth_alone() -> None:
    prompt = [5, 1, 2, 2, 5, 1, 3, 3, 5, 1]  # the draft 2 2 comes before 3 3
    curve = CostCurve([(1, 1), (3, 1.2), (4, 4), (64, 64)])
    assert replay(prompt, [2, 2], Hindsight([2, 2], curve, branching=True)).rows == [3]
    assert replay(prompt, [3, 3], Hindsight([3, 3], curve, branching=True)).rows[0] == 1


def test_emits_no_less_per_time_than_the_planner_in_any_step() -> None:
    """At the same position with the same candidates, hindsight knows the output."""
    source = random.Random(3)
    curve = CostCurve([(1, 1), (2, 1.2), (8, 2.5), (16, 3)])
    for _ in range(40):
        text = [source.randrange(4) for _ in range(60)]
        prompt, output = text[:40], text[40:]
        known = Hindsight(output, curve, branching=False)
        planned = suffix_planner(curve, branching=False)
        emitted_per_time = []
        for drafter in (known, planned):
            drafter.begin(prompt)
            draft = drafter.propose(100).tokens[1:]
            right = 0
            while right < len(draft) and draft[right] == output[right]:
                right += 1
            emitted_per_time.append((1 + right) / curve(1 + len(draft)))
        assert emitted_per_time[0] >= emitted_per_time[1]


def test_prompt_lookup_drafts_what_generate_s_does():
    """The defaults of generate's options make the same drafter."""
    from mlxspec.cli.common.generation import DraftingOptions

    output = [2, 3, 4, 5, 9, 1, 2, 3, 7, 1, 2, 3, 4]
    ours = DraftingOptions(decoder="prompt-lookup").fixed.new()
    replayed = replay(PROMPT, output, drafter_of("prompt-lookup", output))
    assert replayed == replay(PROMPT, output, ours)
    assert replayed != replay(PROMPT, output, drafter_of("spec-bench", output))
