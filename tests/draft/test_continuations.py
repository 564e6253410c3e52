"""What follows at the occurrences of a text's end."""

from mlxspec.draft.context_index import OutputMemory
from mlxspec.draft.suffix_index import SEPARATOR, Occurrence, SuffixIndex, continuations


def tokens_after(text: list[int], path: list[int]) -> list[int]:
    index = SuffixIndex(text)
    found = continuations(index.tokens, index.occurrences(), [])
    for depth, token in enumerate(path):
        (group,) = (c.occurrences for c in found if c.token == token)
        found = continuations(index.tokens, group, path[: depth + 1])
    return [continuation.token for continuation in found]


def test_the_longest_match_comes_first_then_the_most_frequent_then_the_newest() -> None:
    assert tokens_after([1, 2, 7, 0, 2, 8, 0, 2, 8, 1, 2], []) == [7, 8]
    assert tokens_after([2, 8, 0, 2, 8, 3, 2, 9, 1, 2], []) == [8, 9]
    assert tokens_after([2, 8, 0, 2, 9, 1, 2], []) == [9, 8]


def test_only_occurrences_that_hold_the_path_go_on() -> None:
    text = [1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1]
    assert tokens_after(text, [2]) == [5, 3]
    assert tokens_after(text, [2, 5]) == [6]


def test_a_loop_is_drafted_beyond_the_end_of_the_text() -> None:
    text = [0, 4, 5, 4, 5]
    assert tokens_after(text, [4, 5, 4, 5, 4]) == [5]


def test_nothing_is_drafted_across_a_separator() -> None:
    assert tokens_after([1, 2, SEPARATOR, 3, 1, 2], []) == []


def test_negative_positions_are_a_stores() -> None:
    stored = [7, 8, 9, SEPARATOR]
    found = continuations([1, 8], [Occurrence(1, -2)], [], stored)
    assert [c.token for c in found] == [9]
    assert continuations([1, 8], [Occurrence(1, -2)], [9], stored) == []


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
