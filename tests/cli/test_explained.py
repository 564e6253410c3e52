"""Parts of explained steps: outcomes of nodes and styles of tokens."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len

from mlxspec import load
from mlxspec.cli.explain import (
    _piece,
    _text_of,
    fates_of,
)
from tests.support.explained_steps import lookahead_step


def test_a_rejected_node_is_one_that_the_target_could_have_chosen_and_did_not() -> None:
    step = lookahead_step()
    tokens = map(chr, (*step.tree.tokens, step.tokens[-1]))
    fate = dict(zip(tokens, fates_of(step), strict=True))
    assert fate["a"] == "emitted before"
    assert {letter for letter in fate if fate[letter] == "accepted"} == set("bc")
    assert {letter for letter in fate if fate[letter] == "rejected"} == set("dmx")
    assert {letter for letter in fate if fate[letter] == "not reached"} == set("nyozp")


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load("demo")[1]


def pieces_of(tokenizer: TokenizerWrapper, text: str) -> list[str]:
    text_of = _text_of(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return [_piece(token, text_of) for token in tokens]


def test_the_pieces_of_a_text_join_to_it_with_its_white_space_in_signs(
    tokenizer: TokenizerWrapper,
) -> None:
    pieces = pieces_of(tokenizer, "def f(a):\n    return\ta\r\n")
    assert "".join(pieces) == "·def·f(a):↵····return⇥a␍↵"


def test_parts_of_a_character_are_numbers(tokenizer: TokenizerWrapper) -> None:
    parts = tokenizer.encode("é", add_special_tokens=False)[-2:]
    assert pieces_of(tokenizer, "é")[-2:] == [f"<{token}>" for token in parts]


def test_every_token_has_a_piece_that_takes_room_and_holds_no_space(
    tokenizer: TokenizerWrapper,
) -> None:
    text_of = _text_of(tokenizer)
    for token in [*range(len(tokenizer)), len(tokenizer), 10**6]:
        piece = _piece(token, text_of)
        assert cell_len(piece) > 0
        assert not set(" \t\n\r\x1b") & set(piece)
    assert piece == "<1000000>"


def test_a_text_stays_readable_on_one_line(tokenizer: TokenizerWrapper) -> None:
    text = "say é:\n    a\x1b[2J\u202e"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert _text_of(tokenizer)(tokens).strip() == "say é:↵    a␛[2J�"
