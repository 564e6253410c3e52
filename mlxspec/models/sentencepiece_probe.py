"""Texts on which a rebuilt tokenizer is compared with SentencePiece itself."""

import random
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

from .sentencepiece_model import SPACE, PieceType, piece_names

_SAMPLES = (
    "",
    " ",
    "  two before",
    "two after  ",
    "\n\ta\r\n\n",
    "é e\u0301 漢字 한국 👩‍🚀 \u3000\x7f",
    "<0x41><unk>",
)
_PIECES_A_TEXT = 64


def probe_texts(model: Any) -> Iterator[str]:
    """Samples, the texts in which the order of joins matters most, and every piece in disorder.

    Texts with the name of a control piece in them are left out: it means the piece in the
    tokenizer, and nothing in SentencePiece.
    """
    control = piece_names(model, PieceType.CONTROL)
    user_defined = piece_names(model, PieceType.USER_DEFINED)
    names = piece_names(model, PieceType.NORMAL) + user_defined
    for text in (*_SAMPLES, *_overlaps(model), *user_defined, *_shuffled(names)):
        text = text.replace(SPACE, " ")
        if not any(name in text for name in control):
            yield text


def _overlaps(model: Any) -> Iterator[str]:
    """Texts in which two joins of equal score share a part: twice ``ana`` in ``anana``."""
    by_score: dict[float, list[str]] = {}
    for piece in model.pieces:
        if piece.type == PieceType.NORMAL:
            by_score.setdefault(piece.score, []).append(piece.piece)
    for names in by_score.values():
        for first, second in product(names, names):
            for shared in range(1, min(len(first), len(second))):
                if first.endswith(second[:shared]):
                    yield first + second[shared:]
                    yield first[:-shared] + second + first[shared:]
    longest_run: dict[str, int] = {}
    for name in chain.from_iterable(by_score.values()):
        if len(set(name)) == 1:
            longest_run[name[0]] = max(len(name), longest_run.get(name[0], 0))
    for character, longest in longest_run.items():
        for length in range(2, 3 * longest if longest > 1 else 0):
            yield f"x{character * length}y"


def _shuffled(names: list[str]) -> Iterator[str]:
    names = names.copy()
    random.Random(0).shuffle(names)
    for start in range(0, len(names), _PIECES_A_TEXT):
        yield "".join(names[start : start + _PIECES_A_TEXT])
