"""What kind of text a token is: a few classes that tell how predictable it is."""

from __future__ import annotations

from collections.abc import Container, Iterable
from enum import IntEnum


class TokenClass(IntEnum):
    """The kinds; how easily a token is foreseen differs between them."""

    WORD_START = 0
    CONTINUATION = 1
    PUNCTUATION = 2
    DIGIT = 3
    BYTE_OR_NEWLINE = 4
    SPECIAL = 5
    SPACED_PUNCTUATION = 6
    UNKNOWN = 7


def token_classes(pieces: Iterable[str], special: Container[int]) -> bytes:
    """Classify a vocabulary.

    Args:
        pieces: each token's piece in order of the ids, as SentencePiece (``▁the``, ``<0x0A>``)
            or byte-level BPE (``Ġthe``, ``Ċ``) writes it.
        special: ids of control tokens.

    Returns:
        one :class:`TokenClass` per token id.
    """
    return bytes(
        TokenClass.SPECIAL if token in special else _class_of(piece)
        for token, piece in enumerate(pieces)
    )


def _class_of(piece: str) -> TokenClass:
    if piece.startswith("<0x") and piece.endswith(">"):
        return TokenClass.BYTE_OR_NEWLINE
    text = piece.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t")
    word = text.lstrip(" ")
    if "\n" in text or "\t" in text:
        return TokenClass.BYTE_OR_NEWLINE
    if not word:
        return TokenClass.WORD_START
    if word != text:
        return TokenClass.WORD_START if word[0].isalnum() else TokenClass.SPACED_PUNCTUATION
    if word.isdigit():
        return TokenClass.DIGIT
    return TokenClass.CONTINUATION if word[0].isalpha() else TokenClass.PUNCTUATION
