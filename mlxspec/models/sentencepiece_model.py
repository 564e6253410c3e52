"""Reading a SentencePiece ``tokenizer.model``: its pieces, its settings, what it cannot be."""

from __future__ import annotations

import re
from collections import Counter
from enum import IntEnum
from pathlib import Path
from typing import Any

from ..errors import LoadError

SPACE = "▁"  # what SentencePiece writes for a space
REMEDY = "use a version of the model that has a tokenizer.json"

_BPE = 2  # TrainerSpec.ModelType
# Their order is checked pair by pair; Llama's runs of spaces are 16 of one score.
_MOST_OF_ONE_SCORE = 256
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


class PieceType(IntEnum):
    """SentencePiece's ``ModelProto.SentencePiece.Type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_model(path: Path) -> Any:
    """The ``ModelProto`` in ``path``, of a kind that can be reproduced outside SentencePiece.

    Raises:
        LoadError: ``path`` is no SentencePiece model, or one of another kind.
    """
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    try:
        content = path.read_bytes()
        if _TIKTOKEN_LINE.match(content):
            raise LoadError(f"{path}: a tiktoken vocabulary, no SentencePiece model; {REMEDY}")
        SentencePieceProcessor(model_proto=content)
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror})") from error
    except RuntimeError as error:
        raise LoadError(f"{path}: no SentencePiece model, or a damaged one") from error
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
        pieces = [piece.piece for piece in model.pieces]
    except Exception as error:  # protobuf's own, or one of its implementation's
        raise LoadError(f"{path}: no SentencePiece model, or a damaged one") from error
    if not pieces:  # an empty file is a valid protocol buffer
        raise LoadError(f"{path}: no SentencePiece model, or a damaged one")
    if not all(isinstance(piece, str) for piece in pieces):  # SentencePiece does not mind
        raise LoadError(f"{path}: a piece of it is not UTF-8 text; {REMEDY}")
    if obstacle := _obstacle(model):
        raise LoadError(f"{path}: {obstacle} cannot be reproduced exactly; {REMEDY}")
    return model


def piece_names(model: Any, kind: PieceType) -> list[str]:
    """The names of all pieces of a kind, by ascending id."""
    return [piece.piece for piece in model.pieces if piece.type == kind]


def processor(model: Any) -> Any:
    """SentencePiece itself with this model."""
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_proto=model.SerializeToString())


def verbatim_processor(model: Any) -> Any:
    """SentencePiece without anything that it does to a text's start, end and spaces."""
    verbatim = type(model)()
    verbatim.CopyFrom(model)
    verbatim.normalizer_spec.add_dummy_prefix = False
    verbatim.normalizer_spec.remove_extra_whitespaces = False
    return processor(verbatim)


def _obstacle(model: Any) -> str | None:
    """What in the model has no exact counterpart in ``tokenizers``."""
    normalizer = model.normalizer_spec
    if model.trainer_spec.model_type != _BPE:
        return "a SentencePiece model other than BPE"
    if model.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return f"SentencePiece whitespace that is not a leading {SPACE}"
    if normalizer.precompiled_charsmap or model.denormalizer_spec.precompiled_charsmap:
        return f"the SentencePiece normalisation {normalizer.name!r}"
    if unused := piece_names(model, PieceType.UNUSED):
        return f"the unused SentencePiece piece {unused[0]!r}"
    normal = piece_names(model, PieceType.NORMAL)
    known = {*normal, *piece_names(model, PieceType.USER_DEFINED)}
    for name in normal:
        if not known.issuperset(name):
            return f"the SentencePiece piece {name!r}, whose characters are no pieces,"
    scores = Counter(p.score for p in model.pieces if p.type == PieceType.NORMAL)
    if scores and scores.most_common(1)[0][1] > _MOST_OF_ONE_SCORE:
        return f"the order of more than {_MOST_OF_ONE_SCORE} SentencePiece pieces of one score"
    return None
