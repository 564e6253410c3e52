"""The memory of answers compared with a scan of every answer."""

import gc
import random
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.corpus import answer_index
from mlxspec.corpus.answer_index import AnswerIndex
from mlxspec.corpus.suffix_index import SuffixArray, split_texts
from mlxspec.errors import OptionError
from tests.corpus.test_suffix_array import scan
from tests.support.threads import at_once

ANSWERS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=30), max_size=25)
TAIL = st.lists(st.integers(0, 3), max_size=12)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small segments."""
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch, live: int = 40) -> None:
    patch.setattr(answer_index, "LIVE_TOKENS", live)


def holding(answers: list[list[int]], max_tokens: int = 1 << 20) -> AnswerIndex:
    held = AnswerIndex(max_tokens)
    for answer in answers:
        held.add(answer)
    held.settle()
    return held


def texts_of(held: AnswerIndex) -> list[list[int]]:
    """Return all texts, the oldest first."""
    texts = [*split_texts(held._worker._segment.tokens), *held._worker._live_texts]
    return [np.frombuffer(text, np.int32).tolist() for text in texts]


def followed(answers: list[list[int]], tail: list[int]) -> list[tuple[int, list[int]]]:
    """Find the tail's end by a full scan; return matches and continuations, the longest first."""
    found = []
    for answer in answers:
        found += [(length, answer[place:][:48]) for length, place in scan(answer, tail)]
    return sorted(found, key=lambda entry: -entry[0])


def looked_up(held: AnswerIndex, tail: list[int], limit: int = 8) -> list[tuple[int, list[int]]]:
    tokens, occurrences = held.look_up(tail, limit)
    assert len(occurrences) <= limit
    excerpts = []
    for length, position in occurrences:
        excerpts.append((length, tokens[position : tokens.index(-1, position)]))
    return excerpts


@given(ANSWERS, TAIL, st.integers(5, 200))
def test_the_longest_matches_are_found(answers: list[list[int]], tail: list[int], live: int):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, live)
        held = holding(answers)
        for _ in range(2):  # during and after merges
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


def test_an_excerpt_ends_at_the_requested_depth_or_the_answer_s_end():
    held = holding([[1, 2, 3, 4, 5], [1, 2, 9]])
    tokens, occurrences = held.look_up([7, 1, 2], depth=2)
    assert (tokens, occurrences) == ([9, -1, 3, 4, -1], [(2, 0), (2, 2)])
    assert held.look_up([5]) == ([], [])
    assert held.look_up([]) == ([], [])
    assert held.look_up([1, 2], limit=0) == ([], [])


def test_invalid_token_ids_are_refused_and_the_memory_continues():
    with closing(AnswerIndex()) as held:
        for answer, prompt in (["a"], []), ([1.5], []), ([1], ["b"]), (5, []):
            with pytest.raises(TypeError):
                held.add(answer, prompt=prompt)
        held.add([1, 2**63])
        held.add([1, 2], prompt=[2**31])
        held.add([1, 2], {"steps": float("nan")})
        held.add([1, 2], {"steps": 10**30})
        held.add([1, 2, 3])
        held.settle()
        assert held.look_up([1, 2])[1]


def test_the_opening_of_an_answer_is_found_by_the_end_of_its_prompt():
    held = AnswerIndex()
    held.add([21, 22, 23], prompt=[*range(1, 13)])
    held.add([31, 32, 33], prompt=[9, 10])
    held.add([41, 42, 43])
    held.settle()
    found = held.look_up([98, 99, 7, 8, 9, 10, 11, 12], limit=1)
    assert found[0] == [21, 22, 23, -1]
    assert found[1][0].length == 6
    assert held.look_up([4, 9, 10], limit=1)[0][:4] == [31, 32, 33, -1]
    assert not held.look_up([1, 2, 3, 4])[1]  # at most eight tokens of a prompt
    assert texts_of(held) == [[21, 22, 23], [31, 32, 33], [41, 42, 43]]


@pytest.mark.usefixtures("small")
def test_sorted_answers_have_lost_their_prompts():
    held = AnswerIndex()
    for first in range(0, 300, 10):
        held.add([*range(first, first + 10)], prompt=[1000, 1001, 1002])
    held.settle()
    assert len(held._worker._segment.tokens)
    assert texts_of(held) == [[*range(first, first + 10)] for first in range(0, 300, 10)]
    assert not np.isin([1000, 1001, 1002], held._worker._segment.tokens).any()
    assert held.look_up([7, 100, 101], limit=1)[0][:2] == [102, 103]


@pytest.mark.usefixtures("small")
def test_equal_answers_are_kept_once_with_what_all_of_them_earned():
    held = AnswerIndex()
    pick = random.Random(0)
    answers = [[pick.randrange(50) for _ in range(20)] for _ in range(30)]
    given = [pick.choice(answers) for _ in range(300)]
    for answer in given:
        held.add(answer, {"steps": 2, "tokens": 20, "memory": 18})
    held.settle()
    texts = [tuple(text) for text in texts_of(held)]
    assert texts == list(dict.fromkeys(map(tuple, given)))
    (figures,) = held._worker._answers.earned_by_day().values()
    assert figures["answers"] == len(texts)
    assert [figures[name] for name in ("steps", "tokens", "memory")] == [600, 6000, 5400]


@pytest.mark.slow
@given(ANSWERS, st.integers(5, 200), st.integers(20, 400))
def test_a_memory_holds_no_more_than_it_may(answers: list[list[int]], live: int, max_tokens: int):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, live)
        held = AnswerIndex(max_tokens)
        for answer in answers:
            held.add(answer)
            held.settle()
            assert len(held._worker._live) + len(held._worker._segment.tokens) <= max_tokens
        held.close()


@given(st.lists(st.integers(2, 30), max_size=40), st.integers(5, 60), st.integers(20, 400))
def test_of_one_day_and_even_of_one_second_what_was_learned_first_goes_first(
    lengths: list[int], live: int, max_tokens: int
):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch, live)
        held = AnswerIndex(max_tokens)
        answers = [[number] * min(length, max_tokens // 2) for number, length in enumerate(lengths)]
        for answer in answers:
            held.add(answer)
            held.settle()
        held.close()
        remaining = texts_of(held)
        assert remaining == answers[len(answers) - len(remaining) :]


def test_of_an_answer_that_is_too_long_the_end_is_remembered():
    held = holding([[*range(1000)]], 100)
    held.close()
    (text,) = texts_of(held)
    assert text == [*range(1000)][-len(text) :]
    assert 50 < len(text) <= 100


def test_a_memory_of_nothing_remembers_nothing():
    held = holding([[1, 2, 3]], 0)
    assert held.look_up([1, 2]) == ([], [])
    held.close()
    assert texts_of(held) == []


@pytest.mark.parametrize("max_tokens", [-1, 1.5, "many"])
def test_an_invalid_size_is_one_line(max_tokens: Any):
    with pytest.raises(OptionError, match=f"^max_tokens is {max_tokens!r}: give a whole number"):
        AnswerIndex(max_tokens)


def test_ids_that_are_no_tokens_divide_an_answer():
    held = holding([[1, 2, -5, 3, 4, 2**40, 5]])
    assert texts_of(held) == [[1, 2], [3, 4]]


@pytest.mark.usefixtures("small")
def test_threads_add_and_look_up_at_once():
    held = AnswerIndex()

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
    held = AnswerIndex()

    class KeptAnswer:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            held.add([1, 2, 3])

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for index in range(300):
            KeptAnswer()
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
    memory = AnswerIndex()
    memory.add([1, 2, 3])
    memory.close()
    memory.add([4, 5, 6])
    assert memory._worker.requests.empty()
    assert looked_up(memory, [1, 2]) == [(2, [3])]


def test_a_look_up_does_not_wait_for_sorting(monkeypatch: pytest.MonkeyPatch):
    begun, going_on, gone_on = threading.Event(), threading.Event(), threading.Event()

    def slow(texts: list[bytes]) -> SuffixArray:
        begun.set()
        going_on.wait(60)
        gone_on.set()
        return sorted_texts(texts)

    make_small(monkeypatch)
    sorted_texts = SuffixArray.of
    monkeypatch.setattr(SuffixArray, "of", slow)
    held = AnswerIndex()
    held.add([1, 2, 3])
    held.settle()
    held.add([4] * 100)
    assert begun.wait(20)
    monkeypatch.undo()
    assert looked_up(held, [1, 2]) == [(2, [3])]
    held.add([5, 6, 7])
    assert not gone_on.is_set()
    going_on.set()
    held.settle()
    assert looked_up(held, [5, 6]) == [(2, [7])]
