"""Numbers in sentences."""

from __future__ import annotations

import pytest

from mlxspec.cli.wording import counted, size_in_words


def test_one_thing_is_singular() -> None:
    assert [counted(number, "turn") for number in (0, 1, 2000)] == [
        "0 turns",
        "1 turn",
        "2,000 turns",
    ]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(640, "640 bytes"), (3210, "3.2 kB"), (1_250_000, "1.2 MB"), (10**9, "1,000.0 MB")],
)
def test_a_small_size_is_not_nothing(nbytes: int, words: str) -> None:
    assert size_in_words(nbytes) == words
