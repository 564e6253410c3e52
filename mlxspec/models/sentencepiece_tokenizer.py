"""A tokenizer with exactly the ids of a SentencePiece ``tokenizer.model``.

A tokenizer of the library ``tokenizers`` is built from the BPE model's pieces. It must agree with
SentencePiece on texts that reveal differences; otherwise the model is refused. One difference is
intended: the name of a control piece (``<s>``, Mistral's ``[INST]``) in a text means the piece, as
in Mistral's own tokenizer. Plain SentencePiece splits the name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ..errors import LoadError
from .chat_template import instruct_template

_SPACE = "▁"  # what SentencePiece writes for a space
_REMEDY = "use a version of the model that has a tokenizer.json"

_BPE = 2  # TrainerSpec.ModelType
_BEGINS_A_NAME = r"\A<(?=(?:unk|0x[0-9A-F]{2})>\z)"
# ModelProto.SentencePiece.Type
_NORMAL, _, _CONTROL, _USER_DEFINED = range(1, 5)


def build_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the tokenizer with SentencePiece's ids for the BPE model in ``path``.

    The only special token that it adds to texts is BOS, never EOS.

    Returns:
        the tokenizer, and its ``tokenizer_config.json``. It names BOS and EOS, and has a chat
        template if the pieces show an instruct format. It leaves out the unknown piece: unlike
        SentencePiece, transformers would turn the piece's name in a text into the piece.

    Raises:
        LoadError: the file is not a SentencePiece model, or its ids cannot be reproduced exactly.
    """
    model, reference = _read_model(path)
    control, user_defined = _piece_names(model, _CONTROL), _piece_names(model, _USER_DEFINED)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece.piece: index for index, piece in enumerate(model.pieces)},
            merges=_merges(model),
            unk_token=reference.id_to_piece(reference.unk_id()),
            fuse_unk=True,
            byte_fallback=model.trainer_spec.byte_fallback,
            # User-defined pieces are cut out of the text, and must then be found whole.
            ignore_merges=bool(user_defined),
        )
    )
    tokenizer.normalizer = _normalizer(model.normalizer_spec)
    tokenizer.pre_tokenizer = _pre_tokenizer(model)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    # normalized=True, so that the normalizer sees the whole text, and finds its start.
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=True) for c in control])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, index in (("bos_token", reference.bos_id()), ("eos_token", reference.eos_id())):
        if index >= 0:
            config[key] = reference.id_to_piece(index)
    if bos := config.get("bos_token"):
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, reference.bos_id())]
        )
    if template := instruct_template(control, user_defined):
        config["chat_template"] = template
    for text in _probe_texts(model):
        if tokenizer.encode(text, add_special_tokens=False).ids != reference.encode(text):
            raise LoadError(
                f"{path}: SentencePiece's ids cannot be reproduced exactly (they differ on "
                f"{text[:40]!r}); {_REMEDY}"
            )
    return tokenizer, config


# --- the parts of a tokenizer ---


def _merges(model: Any) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, in SentencePiece's order.

    Among pieces with equal scores (Llama's runs of spaces), longer pieces come first, as do splits
    with a longer left part: there SentencePiece joins the leftmost pair, so a run grows from its
    left end.
    """
    scores = {p.piece: p.score for p in model.pieces if p.type == _NORMAL}
    ranked = [
        (-score, -len(name), -cut, name[:cut], name[cut:])
        for name, score in scores.items()
        for cut in range(1, len(name))
        if name[:cut] in scores and name[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """The normalizer of the whole text, including control pieces."""
    steps = []
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", _SPACE))
    if spec.add_dummy_prefix:
        # Metaspace, below, puts the prefix before any text that does not start with a space. At
        # the start of the whole text, SentencePiece also puts it before a space.
        steps.append(normalizers.Replace(Regex(rf"\A(?={_SPACE})"), _SPACE))
    return normalizers.Sequence(steps)


def _pre_tokenizer(model: Any) -> pre_tokenizers.PreTokenizer | None:
    """The pre-tokenizer of each stretch of text between control pieces."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always", split=False))
        # A single space after a control piece is the prefix of an empty text, not a piece.
        steps.append(pre_tokenizers.Split(Regex(rf"\A{_SPACE}\z"), behavior="removed"))
    if model.normalizer_spec.remove_extra_whitespaces:
        steps.append(pre_tokenizers.Split(Regex(rf"{_SPACE}+\z"), behavior="removed"))
    if user_defined := _piece_names(model, _USER_DEFINED):
        longest_first = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
        steps.append(pre_tokenizers.Split(Regex(longest_first), behavior="isolated"))
        # SentencePiece splits the names of other pieces, which ignore_merges would find whole.
        steps.append(pre_tokenizers.Split(Regex(_BEGINS_A_NAME), behavior="isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


# --- the model ---


def _read_model(path: Path) -> tuple[Any, Any]:
    """The ``ModelProto`` in ``path``, and a SentencePiece processor for it."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    content = path.read_bytes()
    try:
        reference = SentencePieceProcessor(model_proto=content)
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
        "".join(piece.piece for piece in model.pieces)  # fails if any is not UTF-8
    except Exception as error:  # from SentencePiece, protobuf, or protobuf's implementation
        raise LoadError(
            f"{path}: damaged, or not a SentencePiece model but tiktoken's; {_REMEDY}"
        ) from error
    normalizations = (model.normalizer_spec, model.denormalizer_spec)
    if model.trainer_spec.model_type != _BPE or any(n.precompiled_charsmap for n in normalizations):
        raise LoadError(f"{path}: not a BPE model that can be reproduced exactly; {_REMEDY}")
    return model, reference


def _piece_names(model: Any, *kinds: int) -> list[str]:
    """The names of all pieces of these kinds, by ascending id."""
    return [piece.piece for piece in model.pieces if piece.type in kinds]


# --- texts that show differences ---

_SAMPLES = (
    "",
    " ",
    "  two before",
    "two after  ",
    "\n\ta\r\n\n",
    "é e\u0301 漢字 한국 👩‍🚀 \u3000\x7f",
    "<0x41><unk>",
    *(f"x{character * length}y" for character in " \n\t-=" for length in range(2, 48)),
)
_PIECES_A_TEXT = 64


def _probe_texts(model: Any) -> Iterator[str]:
    """Samples, and all pieces in a random order."""
    control = _piece_names(model, _CONTROL)
    names = _piece_names(model, _NORMAL, _USER_DEFINED)
    random.Random(0).shuffle(names)
    starts = range(0, len(names), _PIECES_A_TEXT)
    shuffled = ("".join(names[start : start + _PIECES_A_TEXT]) for start in starts)
    user_defined = _piece_names(model, _USER_DEFINED)
    names_after = (f"{piece}{name}" for piece in user_defined for name in ("", "<unk>", "<0x41>"))
    for text in (*_SAMPLES, *names_after, *shuffled):
        text = text.replace(_SPACE, " ")
        if not any(name in text for name in control):  # these differ intentionally
            yield text
