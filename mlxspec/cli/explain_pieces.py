"""Tokens as pieces that can be read on one line, and that a terminal does not obey."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.cells import cell_len, set_cell_size

from ..loading.detokenizer import detokenizer_of
from ..terminal import visible

SPACE, NEWLINE, TAB = "·", "↵", "⇥"
_REPLACEMENT = "\ufffd"
_SIGNS = str.maketrans({"\n": NEWLINE, "\t": TAB, "\r": "␍", "\u2028": NEWLINE, "\u2029": NEWLINE})


class Pieces:
    """What tokens look like.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __getitem__(self, token: int) -> str:
        """One token, its white space in signs; never empty and without spaces."""
        if token not in self._known:
            self._known[token] = self._piece(token)
        return self._known[token]

    def text(self, tokens: Sequence[int]) -> str:
        """Successive tokens on one line: spaces stay, other white space becomes signs."""
        return _readable(self._decode(tokens))

    def _piece(self, token: int) -> str:
        text = self._decode([token])
        if text and unicodedata.combining(text[0]):
            text = f"◌{text}"  # or it would change the sign before it
        elif not text.strip(_REPLACEMENT) or cell_len(_readable(text)) == 0:
            # A part of a character, or nothing that has a text of its own.
            name = self._tokenizer.convert_ids_to_tokens(token)
            text = name if isinstance(name, str) and name.startswith("<0x") else f"<{token}>"
        return _readable(text).replace(" ", SPACE)

    def _decode(self, tokens: Sequence[int]) -> str:
        detokenizer = detokenizer_of(self._tokenizer)
        for token in tokens:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text


def shortened(piece: str, width: int) -> str:
    """At most so many cells of a terminal, the last of them "…" where something is left out."""
    if cell_len(piece) <= width:
        return piece
    return set_cell_size(piece, width - 1).rstrip() + "…"


def shortened_from_left(text: str, width: int) -> str:
    """The end of a text, at most so many cells of a terminal wide."""
    if cell_len(text) <= width:
        return text
    kept = ""
    for sign in reversed(text):
        if cell_len(sign + kept) > width - 1:
            break
        kept = sign + kept
    return "…" + kept


def _readable(text: str) -> str:
    return visible(text.translate(_SIGNS))
