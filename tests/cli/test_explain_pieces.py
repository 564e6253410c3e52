"""Tokens as readable pieces."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len

from mlxspec import load
from mlxspec.cli.explain_pieces import Pieces, shortened, shortened_from_left


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load("demo")[1]


def pieces_of(tokenizer: TokenizerWrapper, text: str) -> list[str]:
    pieces = Pieces(tokenizer)
    return [pieces[token] for token in tokenizer.encode(text, add_special_tokens=False)]


def test_the_pieces_of_a_text_join_to_it_with_its_white_space_in_signs(
    tokenizer: TokenizerWrapper,
) -> None:
    pieces = pieces_of(tokenizer, "def f(a):\n    return\ta\r\n")
    assert "".join(pieces) == "·def·f(a):↵····return⇥a␍↵"


def test_parts_of_a_character_are_named_by_their_bytes(tokenizer: TokenizerWrapper) -> None:
    assert "".join(pieces_of(tokenizer, "é")).endswith("<0xC3><0xA9>")


def test_every_token_has_a_piece_that_takes_room_and_holds_no_space(
    tokenizer: TokenizerWrapper,
) -> None:
    pieces = Pieces(tokenizer)
    for token in [*range(len(tokenizer)), len(tokenizer), 10**6]:
        assert cell_len(pieces[token]) > 0
        assert not set(" \t\n\r\x1b") & set(pieces[token])
    assert pieces[10**6] == "<1000000>"


def test_a_text_stays_readable_on_one_line(tokenizer: TokenizerWrapper) -> None:
    text = "say é:\n    a\x1b[2J\u202e"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert Pieces(tokenizer).text(tokens).strip() == "say é:↵    a␛[2J�"


@pytest.mark.parametrize("text", ["x" * 30, "語" * 15, "a語" * 10])
@pytest.mark.parametrize("width", [8, 9, 24, 100])
def test_shortened_texts_fit_and_say_that_something_is_missing(text: str, width: int) -> None:
    for short, kept in (
        (shortened(text, width), text.startswith),
        (shortened_from_left(text, width), text.endswith),
    ):
        assert cell_len(short) <= width
        if cell_len(text) <= width:
            assert short == text
        else:
            assert "…" in short
            assert kept(short.strip("…"))
            assert cell_len(short) >= width - 1
