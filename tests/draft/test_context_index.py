"""Earlier outputs, and an index that grows with a conversation and finds what a search finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxspec.draft import context_index
from mlxspec.draft.context_index import ContextIndex, OutputMemory, common_length
from mlxspec.draft.suffix_index import SEPARATOR, SuffixIndex
from tests.support.threads import at_once

OUTPUTS = st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=12)


@given(OUTPUTS, st.integers(0, 20))
def test_the_last_outputs_are_remembered_and_no_more_than_asked(
    outputs: list[list[int]], size: int
) -> None:
    memory = OutputMemory(size)
    for output in outputs:
        memory.add(output)
    kept: list[list[int]] = []
    for output in reversed([output[max(0, len(output) - size) :] for output in outputs]):
        if sum(map(len, kept)) + len(output) > size:
            break
        kept = [output, *kept] if output else kept
    assert memory.text() == [token for output in kept for token in (*output, SEPARATOR)]


def test_threads_may_add_and_read_at_once() -> None:
    memory = OutputMemory(1000)

    def add(mark: int) -> None:
        for _ in range(300):
            memory.add([mark] * (mark + 1))

    def read() -> None:
        for _ in range(300):
            text = memory.text()
            while text:  # whole outputs only
                mark = text[0]
                assert text[: mark + 2] == [*[mark] * (mark + 1), SEPARATOR]
                del text[: mark + 2]

    at_once(*(lambda mark=mark: add(mark) for mark in range(1, 5)), read, read)
    tokens = [token for token in memory.text() if token != SEPARATOR]
    # Threads that add at once may each make room for what is too much.
    assert 1000 - 4 * 5 < len(tokens) <= 1000


def test_the_memory_forgets_the_oldest_output_first() -> None:
    memory = OutputMemory(max_tokens=5)
    memory.add([1, 2])
    memory.add([3, 4])
    assert memory.text() == [1, 2, SEPARATOR, 3, 4, SEPARATOR]
    memory.add([5, 6])
    assert memory.text() == [3, 4, SEPARATOR, 5, 6, SEPARATOR]
    memory.add(range(10))
    assert memory.text() == [5, 6, 7, 8, 9, SEPARATOR]
    memory.add([])
    assert memory.text() == [5, 6, 7, 8, 9, SEPARATOR]


def test_a_memory_of_no_tokens_remembers_nothing() -> None:
    memory = OutputMemory(max_tokens=0)
    memory.add([1, 2])
    assert memory.text() == []


def longest_match(texts: Sequence[Sequence[int]], context: Sequence[int]) -> int:
    """The length of the longest end of the context that stood earlier and was continued."""
    longest = 0
    for text in [*texts, context]:
        for end in range(1, len(text)):
            length = 0
            while length < end and text[end - 1 - length] == context[-1 - length]:
                length += 1
                if length == len(context):
                    break
            longest = max(longest, length)
    return longest


@pytest.mark.parametrize("seed", range(8))
def test_all_that_was_said_is_found_whatever_became_of_it(seed: int) -> None:
    pick = random.Random(seed)
    kept = ContextIndex()
    memory = [pick.randrange(5) for _ in range(20)]
    context: list[int] = []
    abandoned: list[list[int]] = [memory]
    for turn in range(12):
        said = [pick.randrange(5) for _ in range(pick.randint(1, 12))]
        place = pick.choice([len(context), len(context), pick.randint(0, len(context))])
        prompt = context[:place] + said
        abandoned.append(context)
        kept.begin(prompt, [*memory, -1] if turn == 0 else [])
        output = [pick.randrange(5) for _ in range(pick.randint(0, 9))]
        kept.index.extend(output)
        assert list(kept.output) == output
        context = prompt + output
        lengths = [found.length for found in kept.index.occurrences()]
        assert max(lengths, default=0) >= min(longest_match([], context), 64)
        assert max(lengths, default=0) <= longest_match(abandoned, context)


def test_a_next_turn_is_added_and_not_indexed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class Counted(SuffixIndex):
        def __init__(self, tokens: Sequence[int]) -> None:
            super().__init__(tokens)
            built.append(len(self))

    monkeypatch.setattr(context_index, "SuffixIndex", Counted)
    kept = ContextIndex()
    prompt = list(range(100))
    kept.begin(prompt, earlier=[7, 7, -1])
    kept.index.extend([1, 2, 3])
    kept.begin([*prompt, 1, 2, 3, 50, 51])
    assert kept.index.tokens.tolist() == [7, 7, -1, *prompt, 1, 2, 3, 50, 51]
    assert kept.memory_end == 3
    kept.begin([*prompt, 1, 60])  # an edited turn: the old one stays, to draft from
    assert kept.index.tokens.tolist()[-67:] == [51, -1, *[*prompt, 1][-64:], 60]
    assert built == [103]
    kept.begin(prompt[50:], earlier=[8])  # next to nothing in common
    assert kept.index.tokens.tolist() == [8, *prompt[50:]]
    assert built == [103, 51]


def test_abandoned_turns_take_no_more_than_three_times_what_a_conversation_needs() -> None:
    pick = random.Random(3)
    kept, memory = ContextIndex(), [1] * 50
    beginning = [pick.randrange(500) for _ in range(300)]
    sizes = []
    for _ in range(40):
        prompt = beginning + [pick.randrange(500) for _ in range(100)]
        kept.begin(prompt, earlier=memory)
        kept.index.extend([2] * 20)
        assert kept.index.tokens.tolist()[-120:] == [*prompt[-100:], *[2] * 20]
        sizes.append(len(kept.index))
    assert 3 * 470 < max(sizes) <= 4 * 470 + 20
    assert sizes.count(470) > 2  # built anew now and then


def test_common_length_is_that_of_a_comparison_token_by_token() -> None:
    pick = random.Random(1)
    for _ in range(300):
        first = [pick.randrange(2) for _ in range(pick.randint(0, 12))]
        second = [pick.randrange(2) for _ in range(pick.randint(0, 12))]
        pairs = zip(first, second, strict=False)
        expected = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
        )
        assert common_length(first, second) == expected
