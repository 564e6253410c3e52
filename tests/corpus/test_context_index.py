"""An index that grows with a conversation and finds what a search finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mlxspec.corpus import suffix_index
from mlxspec.corpus.suffix_index import ContextIndex, SuffixIndex, common_length


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
    context: list[int] = []
    abandoned: list[list[int]] = []
    for _ in range(12):
        said = [pick.randrange(5) for _ in range(pick.randint(1, 12))]
        place = pick.choice([len(context), len(context), pick.randint(0, len(context))])
        prompt = context[:place] + said
        abandoned.append(context)
        kept.begin(prompt)
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

    monkeypatch.setattr(suffix_index, "SuffixIndex", Counted)
    kept = ContextIndex()
    prompt = list(range(100))
    kept.begin(prompt)
    kept.index.extend([1, 2, 3])
    kept.begin([*prompt, 1, 2, 3, 50, 51])
    assert kept.index.tokens.tolist() == [*prompt, 1, 2, 3, 50, 51]
    kept.begin([*prompt, 1, 60])  # an edited turn: the old one stays, to draft from
    assert kept.index.tokens.tolist()[-67:] == [51, -1, *[*prompt, 1][-64:], 60]
    assert built == [100]
    kept.begin(prompt[50:])  # next to nothing in common
    assert kept.index.tokens.tolist() == prompt[50:]
    assert built == [100, 50]


def test_abandoned_turns_take_no_more_than_three_times_what_a_conversation_needs() -> None:
    pick = random.Random(3)
    kept = ContextIndex()
    beginning = [pick.randrange(500) for _ in range(300)]
    sizes = []
    for _ in range(40):
        prompt = beginning + [pick.randrange(500) for _ in range(100)]
        kept.begin(prompt)
        kept.index.extend([2] * 20)
        assert kept.index.tokens.tolist()[-120:] == [*prompt[-100:], *[2] * 20]
        sizes.append(len(kept.index))
    assert 3 * 420 < max(sizes) <= 4 * 420 + 20
    assert sizes.count(420) > 2  # built anew now and then


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
