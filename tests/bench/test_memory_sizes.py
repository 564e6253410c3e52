"""Replay with memories of several sizes, some too small for the repeated outputs."""

from __future__ import annotations

import random

import pytest

from mlxspec.bench.policies import AUTO, POLICIES, policies_with_memory
from mlxspec.bench.prompts import Completion
from mlxspec.bench.replay import Report, compare
from mlxspec.drafting.chips import known_chip
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.errors import OptionError

FLAT = {"flat": CostCurve([(1, 1), (64, 1.1)])}
ANSWER = list(range(100, 160))


def noise(count: int, seed: int) -> list[int]:
    """Return different tokens."""
    return random.Random(seed).sample(range(1000 + 5000 * seed, 6000 + 5000 * seed), count)


def replayed(sizes: str, *outputs: tuple[str, list[int]]) -> dict[str, Report]:
    """Compare memories of these sizes, and none, on outputs by set."""
    policies = {AUTO: POLICIES[AUTO], **policies_with_memory(sizes)}
    completions = [
        Completion(name, [number + 1], 1, output) for number, (name, output) in enumerate(outputs)
    ]
    return compare(completions, b"", policies, FLAT)["flat"]


def steps_are_saved(report: Report, name: str) -> bool:
    """Return whether drafts were accepted. The contexts never repeat, so a memory drafted them."""
    return report["sets"][name]["tokens_per_step"] > 1


def test_memories_are_named_by_their_sizes_in_their_order() -> None:
    named = policies_with_memory("1025, 16k,2048K,1M,all")
    assert [*named] == ["memory 1025", "memory 16k", "memory 2048K", "memory 1M", "memory all"]


def test_k_is_1024_tokens() -> None:
    answer = noise(1500, 1)
    reports = replayed("1000,1k,1024", ("long", answer), ("long", answer[-1010:]))
    smaller, k, same = (reports[f"memory {size}"] for size in ("1000", "1k", "1024"))
    assert k == same != smaller


@pytest.mark.parametrize(
    "sizes", ["", "x", "-5", "16k,", "1.5k", "1e3", "16kk", "k", "ALL", "٣", "9" * 5000, "+1"]
)
def test_an_invalid_size_is_refused(sizes: str) -> None:
    with pytest.raises(
        OptionError, match=r"^--remember: '.*' is not a size: give tokens, such as "
    ):
        policies_with_memory(sizes)


def test_an_answer_that_repeats_is_known_with_a_memory_alone() -> None:
    reports = replayed("1k,all", ("first", ANSWER), ("again", ANSWER))
    assert [steps_are_saved(one, "first") for one in reports.values()] == [False, False, False]
    assert [steps_are_saved(one, "again") for one in reports.values()] == [False, True, True]


@pytest.mark.slow
def test_a_memory_forgets_what_it_has_no_room_for() -> None:
    others = [("other", noise(300, seed)) for seed in range(1, 4)]
    reports = replayed("400,4k", ("first", ANSWER), *others, ("again", ANSWER))
    without, small, large = reports.values()
    assert large["sets"]["again"]["tokens_per_step"] > 1.5
    assert small["sets"]["again"] == without["sets"]["again"]
    # But it holds the newest output.
    assert steps_are_saved(replayed("400", *others, others[-1])["memory 400"], "other")


def test_of_an_answer_that_is_too_long_a_memory_knows_the_end() -> None:
    reports = replayed("1,100,4k", ("long", noise(300, 1)), ("long", noise(300, 1)))
    saved = [one["sets"]["long"]["tokens_per_step"] for one in reports.values()]
    assert saved == sorted(saved)
    assert saved[0] == saved[1] == 1 < saved[2] < saved[3]


def test_what_comes_later_is_not_known_yet() -> None:
    longer = ("longer", [*noise(100, 1), *ANSWER])
    after, before = (
        replayed("all", *order)["memory all"]
        for order in ((longer, ("answer", ANSWER)), (("answer", ANSWER), longer))
    )
    assert steps_are_saved(after, "answer")
    assert not steps_are_saved(after, "longer")
    assert steps_are_saved(before, "longer")
    assert not steps_are_saved(before, "answer")


@pytest.mark.nightly
@pytest.mark.slow
def test_sizes_above_all_outputs_make_no_difference() -> None:
    pick = random.Random(0)
    outputs = [[pick.randrange(40) for _ in range(60)] for _ in range(6)]
    completions = [Completion("a", [41, 42], 2, pick.choice(outputs)) for _ in range(30)]
    curves = {"M4 Pro": known_chip("M4 Pro").curve}
    policies = {AUTO: POLICIES[AUTO], **policies_with_memory("1M")}
    named = compare(completions, b"", policies, curves)["M4 Pro"]
    sized = compare(completions, b"", policies_with_memory("1M,all,300"), curves)["M4 Pro"]
    assert named["auto"] not in sized.values()
    assert sized["memory 1M"] == sized["memory all"] == named["memory 1M"]
    assert sized["memory 300"] not in named.values()
    # Merging, in another thread, changes no result.
    again = compare(completions, b"", policies_with_memory("1M,all,300"), curves)["M4 Pro"]
    assert sized == again
