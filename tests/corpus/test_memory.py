"""A memory of answers against a look at each of them."""

import gc
import random
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.corpus import EARNED, Memory, memory, part
from mlxspec.corpus.part import Learned, Merged, Part
from mlxspec.errors import OptionError
from tests.corpus.test_suffix_array import scan
from tests.support.threads import at_once

ANSWERS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), max_size=25)
TAIL = st.lists(st.integers(0, 3), max_size=12)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens make a part, and few parts are sorted anew."""
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch, live: int = 40) -> None:
    patch.setattr(memory, "LIVE_TOKENS", live)
    patch.setattr(part, "_SORTED_ANEW", 2 * live)


def holding(answers: list[list[int]], max_tokens: int = 1 << 20) -> Memory:
    held = Memory(max_tokens)
    for answer in answers:
        held.add(answer)
    held.settle()
    return held


def texts_of(held: Memory) -> list[list[int]]:
    """All texts, the oldest first."""
    live, parts, _ = held._shelf.searched
    found = []
    for one in reversed(parts):
        ends = one.records["end"].tolist()
        for start, end, used in zip([0, *ends], ends, one.used, strict=False):
            if used:
                found.append(one.array.tokens[start : end - 1].tolist())
    return found + [np.frombuffer(answer.text, np.int32).tolist() for answer in live.answers]


def followed(answers: list[list[int]], tail: list[int]) -> list[tuple[int, list[int]]]:
    """Match and what followed, wherever the tail's end stands, the longest match first."""
    found = []
    for answer in answers:
        found += [(length, answer[place:][:48]) for length, place in scan(answer, tail)]
    return sorted(found, key=lambda entry: -entry[0])


def looked_up(held: Memory, tail: list[int], limit: int = 8) -> list[tuple[int, list[int]]]:
    tokens, occurrences, sources = held.look_up(tail, limit)
    assert len(occurrences) == len(sources) <= limit
    excerpts = []
    for length, position in occurrences:
        excerpts.append((length, tokens[position : tokens.index(-1, position)]))
    return excerpts


@given(ANSWERS, TAIL, st.integers(5, 200))
def test_the_longest_matches_are_found(answers: list[list[int]], tail: list[int], live: int):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, live)
        held = holding(answers)
        for _ in range(2):  # while parts may be merged, and after that
            found = looked_up(held, tail)
            expected = followed(answers, tail)
            assert [length for length, _ in found[:1]] == [length for length, _ in expected[:1]]
            assert all(entry in expected for entry in found)
            held.close()


@given(ANSWERS, TAIL)
def test_in_sorted_parts_all_the_best_matches_are_found(answers: list[list[int]], tail: list[int]):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, 1)
        held = holding(answers)
        held.close()
    expected = followed(texts_of(held), tail)
    found = looked_up(held, tail)
    assert [length for length, _ in found] == [length for length, _ in expected[:8]]
    assert sorted(texts_of(held)) == sorted(map(list, {tuple(answer) for answer in answers}))


def test_what_followed_is_copied_as_far_as_asked_and_not_into_the_next_answer():
    held = holding([[1, 2, 3, 4, 5], [1, 2, 9]])
    tokens, occurrences, _ = held.look_up([7, 1, 2], depth=2)
    assert (tokens, occurrences) == ([9, -1, 3, 4, -1], [(2, 0), (2, 2)])
    assert held.look_up([5]) == ([], [], [])
    assert held.look_up([]) == ([], [], [])
    assert held.look_up([1, 2], limit=0) == ([], [], [])


def test_what_is_no_token_ids_is_refused_and_the_memory_goes_on():
    with closing(Memory()) as held:
        for answer, prompt in (["a"], []), ([1.5], []), ([1], ["b"]), (5, []):
            with pytest.raises(OptionError, match="token ids"):
                held.add(answer, prompt=prompt)
        held.add([1, 2, 3])
        held.settle()
        assert held.look_up([1, 2]).occurrences


def test_the_opening_of_an_answer_is_found_by_the_end_of_its_prompt():
    held = Memory()
    held.add([21, 22, 23], prompt=[*range(1, 13)])
    held.add([31, 32, 33], prompt=[9, 10])
    held.add([41, 42, 43])
    held.settle()
    found = held.look_up([98, 99, 7, 8, 9, 10, 11, 12], limit=1)
    assert found.tokens == [21, 22, 23, -1]
    assert found.occurrences[0].length == 6
    assert held.look_up([4, 9, 10], limit=1).tokens[:4] == [31, 32, 33, -1]
    assert not held.look_up([1, 2, 3, 4]).occurrences  # eight tokens of a prompt, and no more
    assert texts_of(held) == [[21, 22, 23], [31, 32, 33], [41, 42, 43]]


@pytest.mark.usefixtures("small")
def test_sorted_answers_have_lost_their_prompts():
    held = Memory()
    for first in range(0, 300, 10):
        held.add([*range(first, first + 10)], prompt=[1000, 1001, 1002])
    held.settle(tidy=True)
    assert held._shelf.searched.parts
    assert texts_of(held) == [[*range(first, first + 10)] for first in range(0, 300, 10)]
    sorted_tokens = [part.array.tokens for part in held._shelf.searched.parts]
    assert not np.isin([1000, 1001, 1002], np.concatenate(sorted_tokens)).any()
    assert held.look_up([7, 100, 101], limit=1).tokens[:2] == [102, 103]


def test_a_prompt_is_left_out_where_a_token_is_unknown():
    with closing(Memory()) as held:
        held.add([5, 6, 7], prompt=[1, 2, -1, 3])
        held.add([1 << 30, 15, 16, 17], prompt=[1, 2, 3])
        held.add([14, 1 << 30, 25, 26, 27], prompt=[1, 2, 3])
        held.add([5, 6, 8], prompt=[1, 2, 1 << 40, 3])
        held.settle()
        assert not held.look_up([1, 2]).occurrences
        assert not held.look_up([3]).occurrences
        assert held.look_up([5, 6], limit=1).tokens[0] == 8


@pytest.mark.usefixtures("small")
def test_equal_answers_are_kept_once_as_the_newest_with_what_all_of_them_earned():
    held = Memory()
    pick = random.Random(0)
    answers = [[pick.randrange(50) for _ in range(20)] for _ in range(30)]
    given = [pick.choice(answers) for _ in range(300)]
    for answer in given:
        held.add(answer, {"steps": 2, "tokens": 20, "memory": 18})
    held.close()
    newest = list(dict.fromkeys(map(tuple, reversed(given))))[::-1]
    live, parts, _ = held._shelf.searched
    # What is in the live part may be in a sorted one until it is sorted itself.
    texts = list(map(tuple, texts_of(held)))
    assert set(texts) == set(newest)
    assert len(texts) <= len(newest) + len(live.answers)
    assert texts[-1] == newest[-1]
    earned = np.zeros(len(EARNED), int)
    for one in parts:
        for record in one.records[one.used > 0]:
            earned += [int(record[name]) for name in EARNED]
    for answer in live.answers:
        earned += answer.earned
    figures = dict(zip(EARNED, earned.tolist(), strict=True))
    # Answers that are still found twice have earned apart.
    assert figures["memory"] == 9 * figures["steps"] <= 18 * 300
    assert figures["steps"] >= 2 * len(newest)


def test_merging_adds_up_what_equal_answers_earned_as_far_as_it_fits():
    def one(learned: int, steps: int) -> Part:
        figures = (steps, *range(1, len(EARNED)))
        return Part.of([Learned(np.array([1, 2], np.int32).tobytes(), learned, figures)])

    for steps, expected in ((5, 12), (0xFFFF, 7)):
        merged = Merged(one(90000, steps), one(180000, 7))
        assert (merged.n_tokens, merged.n_places, len(merged.records)) == (3, 1, 1)
        assert merged.records["learned"] == 180000
        assert merged.records["steps"] == expected
        assert merged.records["tokens"] == (2 if expected == 12 else 1)


@given(ANSWERS, st.integers(5, 200), st.integers(20, 400))
def test_a_tidy_memory_holds_no_more_than_it_may_in_few_parts(
    answers: list[list[int]], live: int, max_tokens: int
):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, live)
        held = Memory(max_tokens)
        for answer in answers:
            held.add(answer)
            held.settle(tidy=True)
            newest, parts, *_ = held._shelf.searched
            sizes = [len(one) for one in parts]
            assert len(newest) + sum(sizes) <= max_tokens
            for number in range(1, len(sizes)):
                assert sizes[number] >= memory.RATIO * sum(sizes[:number])
        held.close()


@given(st.lists(st.integers(2, 30), max_size=40), st.integers(5, 60), st.integers(20, 400))
def test_of_one_day_and_even_of_one_second_what_was_learned_first_goes_first(
    lengths: list[int], live: int, max_tokens: int
):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, live)
        held = Memory(max_tokens)
        answers = [[number] * min(length, max_tokens // 2) for number, length in enumerate(lengths)]
        for answer in answers:
            held.add(answer)
            held.settle(tidy=True)
        held.close()
        remaining = texts_of(held)
        assert remaining == answers[len(answers) - len(remaining) :]


@pytest.mark.usefixtures("small")
def test_a_full_memory_forgets_what_was_not_used_for_the_longest_time():
    pick = random.Random(0)
    answers = [[index, *(pick.randrange(100) for _ in range(19))] for index in range(100, 300)]
    held = Memory(1000)
    for number, answer in enumerate(answers):
        held.add(answer)
        held.settle(tidy=True)
        assert sum(map(len, texts_of(held))) <= 1000
        if number >= 10:
            for one in held._shelf.searched.parts:
                one.used[:] = 1  # long ago
            held.used(held.look_up(answers[0][:3]).sources[0])
    held.close()
    remaining = texts_of(held)
    assert answers[0] in remaining
    assert answers[-1] in remaining
    assert 300 < sum(map(len, remaining)) <= 1000
    gone = [answer for answer in answers[1:] if answer not in remaining]
    assert len(gone) > 100


def test_of_an_answer_that_is_too_long_the_end_is_remembered():
    held = holding([[*range(1000)]], 100)
    held.close()
    (text,) = texts_of(held)
    assert text == [*range(1000)][-len(text) :]
    assert 50 < len(text) <= 100


def test_a_memory_of_nothing_remembers_nothing():
    held = holding([[1, 2, 3]], 0)
    assert held.look_up([1, 2]) == ([], [], [])
    held.close()
    assert texts_of(held) == []


@pytest.mark.parametrize("max_tokens", [-1, 1.5, "many"])
def test_a_size_that_is_none_is_one_line(max_tokens: Any):
    with pytest.raises(
        OptionError, match=f"^a memory of {max_tokens!r} tokens: give a whole number"
    ):
        Memory(max_tokens)


def test_ids_that_are_no_tokens_divide_an_answer():
    held = holding([[1, 2, -5, 3, 4, 2**40, 5]])
    assert texts_of(held) == [[1, 2], [3, 4]]


@pytest.mark.usefixtures("small")
def test_threads_add_and_look_up_at_once():
    held = Memory()

    def work(number: int) -> None:
        pick = random.Random(number)
        for index in range(60):
            answer = [number, index, *(pick.randrange(4) for _ in range(10))]
            held.add(answer)
            for length, excerpt in looked_up(held, answer[:5]):
                assert 0 < length <= 5
                assert excerpt

    at_once(*(lambda number=number: work(number) for number in range(10, 13)))
    held.settle()
    for number in range(10, 13):
        pick = random.Random(number)
        for index in range(60):
            answer = [number, index, *(pick.randrange(4) for _ in range(10))]
            assert looked_up(held, answer[:5])[0] == (5, answer[5:])


@pytest.mark.usefixtures("small")
def test_a_finaliser_may_add_anywhere():
    held = Memory()

    class Answer:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            held.add([1, 2, 3])

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for index in range(300):
            Answer()
            held.add([index, 7, index])
            held.look_up([1, 2])
            held.settle()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    held.settle()
    assert looked_up(held, [1, 2])[0] == (2, [3])


def test_a_memory_that_is_not_used_any_more_ends_its_thread():
    held = holding([[1, 2, 3]])
    thread = held._thread
    del held
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert thread not in threading.enumerate()


def test_what_is_added_to_a_closed_memory_goes():
    memory = Memory()
    memory.add([1, 2, 3])
    memory.close()
    memory.add([4, 5, 6])
    assert memory._shelf.requests.empty()
    assert looked_up(memory, [1, 2]) == [(2, [3])]


def test_a_look_up_does_not_wait_for_sorting(monkeypatch: pytest.MonkeyPatch):
    begun, going_on, gone_on = threading.Event(), threading.Event(), threading.Event()

    def slow(answers: list[Learned]) -> Part:
        begun.set()
        going_on.wait(60)
        gone_on.set()
        return Part.of(answers)

    make_small(monkeypatch)
    monkeypatch.setattr(memory.Part, "of", slow)
    held = Memory()
    held.add([1, 2, 3, *[4] * 100])
    assert begun.wait(20)
    monkeypatch.undo()
    assert looked_up(held, [1, 2])[0][1][0] == 3
    held.add([5, 6, 7])
    assert not gone_on.is_set()
    going_on.set()
    held.settle()
    assert looked_up(held, [5, 6]) == [(2, [7])]
