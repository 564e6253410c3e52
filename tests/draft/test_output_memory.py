"""The memory of earlier outputs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxspec.draft.context_index import OutputMemory
from mlxspec.draft.suffix_index import SEPARATOR
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
    assert 1000 - 5 < len(tokens) <= 1000
