"""Token classes in the spelling of SentencePiece and of byte-level BPE."""

import pytest

from mlxspec.plan.p_accept import TokenClass, token_classes

_EXPECTED = {
    "▁the": TokenClass.WORD_START,
    "Ġthe": TokenClass.WORD_START,
    "▁": TokenClass.WORD_START,
    "ing": TokenClass.CONTINUATION,
    "7": TokenClass.DIGIT,
    ").": TokenClass.PUNCTUATION,
    "▁(": TokenClass.SPACED_PUNCTUATION,
    "<0x0A>": TokenClass.BYTE_OR_NEWLINE,
    "Ċ": TokenClass.BYTE_OR_NEWLINE,
    "ĊĊ": TokenClass.BYTE_OR_NEWLINE,
    "": TokenClass.WORD_START,
}


@pytest.mark.parametrize("piece", _EXPECTED)
def test_pieces_are_classified_in_either_spelling(piece: str) -> None:
    assert token_classes([piece], special=()) == bytes([_EXPECTED[piece]])


def test_special_tokens_go_by_their_id() -> None:
    assert token_classes(["</s>", "a"], special={0}) == bytes(
        [TokenClass.SPECIAL, TokenClass.CONTINUATION]
    )
