"""A SentencePiece ``tokenizer.model`` as a ``tokenizers.Tokenizer`` with the same ids.

SentencePiece's BPE joins, over and over, the two neighbouring symbols that make the piece with
the highest score, the leftmost first among equals. A ``tokenizers`` BPE ranks pairs instead of
pieces, so each way to split a piece becomes a pair, in the order in which SentencePiece would
come to it. What cannot be carried over exactly is refused by name, and every tokenizer is
compared with SentencePiece itself on probe texts before it is handed out.

Control pieces (``<s>``, Mistral's ``[INST]``) have no text in SentencePiece. Here their names in
a text mean the piece, as in Hugging Face's tokenizers, and the text after one of them is a text
of its own, as in Mistral's: SentencePiece's ids of ``Hello`` follow in ``[INST] Hello`` and in
``[INST]Hello`` alike, since the one space is what SentencePiece puts before every text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ..errors import LoadError
from .instruct_templates import instruct_template
from .sentencepiece_model import (
    REMEDY,
    SPACE,
    PieceType,
    piece_names,
    processor,
    read_model,
    verbatim_processor,
)
from .sentencepiece_probe import probe_texts


def build_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer with SentencePiece's ids for the BPE model in ``path``.

    It adds the BOS piece when asked for special tokens, and never EOS. See the module's page
    for what the names of control pieces mean.

    Raises:
        LoadError: no SentencePiece model, or one whose ids cannot be reproduced exactly.
    """
    model = read_model(path)
    reference = processor(model)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece.piece: index for index, piece in enumerate(model.pieces)},
            merges=_merges(model),
            unk_token=reference.id_to_piece(reference.unk_id()),
            fuse_unk=True,
            byte_fallback=model.trainer_spec.byte_fallback,
            # A user-defined piece is cut out of the text and then found as a whole.
            ignore_merges=bool(piece_names(model, PieceType.USER_DEFINED)),
        )
    )
    tokenizer.normalizer = _normalizer(model.normalizer_spec)
    tokenizer.pre_tokenizer = _pre_tokenizer(model, path)
    tokenizer.decoder = _decoder(model.normalizer_spec)
    # normalized=True: the normalizer sees the whole text and so knows where it starts.
    control = piece_names(model, PieceType.CONTROL)
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=True) for c in control])
    if reference.bos_id() >= 0:
        bos = reference.id_to_piece(reference.bos_id())
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, reference.bos_id())]
        )
    for text in probe_texts(model):
        if tokenizer.encode(text, add_special_tokens=False).ids != reference.encode(text):
            raise LoadError(
                f"{path}: SentencePiece's ids cannot be reproduced exactly (they differ on "
                f"{text[:40]!r}); {REMEDY}"
            )
    return tokenizer


def tokenizer_config(path: Path) -> dict[str, Any]:
    """The content of ``tokenizer_config.json`` beside the ``tokenizer.json`` of ``path``.

    Names BOS and EOS, and a chat template where the pieces show the instruct format. The
    unknown piece is left out: transformers would take its name in a text for the piece, which
    SentencePiece does not.

    Raises:
        LoadError: no SentencePiece model, or one whose ids cannot be reproduced exactly.
    """
    model = read_model(path)
    reference = processor(model)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, index in (("bos_token", reference.bos_id()), ("eos_token", reference.eos_id())):
        if index >= 0:
            config[key] = reference.id_to_piece(index)
    template = instruct_template(
        control=piece_names(model, PieceType.CONTROL),
        user_defined=piece_names(model, PieceType.USER_DEFINED),
    )
    if template is not None:
        config["chat_template"] = template
    return config


def _merges(model: Any) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, in SentencePiece's order.

    Among pieces of equal score (Llama's runs of spaces) the longer goes first, and so does the
    split with the longer left part: SentencePiece takes the leftmost pair there, which is the
    one that lets a run grow from its left end.
    """
    scores = {p.piece: p.score for p in model.pieces if p.type == PieceType.NORMAL}
    ranked = [
        (-score, -len(name), -cut, name[:cut], name[cut:])
        for name, score in scores.items()
        for cut in range(1, len(name))
        if name[:cut] in scores and name[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """What is done to the whole text, control pieces included."""
    steps = []
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.add_dummy_prefix:
        # Metaspace, below, puts the prefix before any text that does not start with a space.
        # At the start of the whole text SentencePiece does so in that case, too.
        steps.append(normalizers.Replace(Regex(rf"\A(?={SPACE})"), SPACE))
    return normalizers.Sequence(steps)


def _pre_tokenizer(model: Any, path: Path) -> pre_tokenizers.PreTokenizer | None:
    """What is done to each stretch of text between control pieces."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False))
        # A lone space behind a control piece is the prefix of an empty text: no piece at all.
        steps.append(pre_tokenizers.Split(Regex(rf"\A{SPACE}\z"), behavior="removed"))
    if model.normalizer_spec.remove_extra_whitespaces:
        steps.append(pre_tokenizers.Split(Regex(rf"{SPACE}+\z"), behavior="removed"))
    if user_defined := piece_names(model, PieceType.USER_DEFINED):
        longest_first = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
        steps.append(pre_tokenizers.Split(Regex(longest_first), behavior="isolated"))
        if heads := _heads_of_split_names(model, path):
            steps.append(pre_tokenizers.Split(Regex(heads), behavior="isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _heads_of_split_names(model: Any, path: Path) -> str:
    r"""A pattern for texts that are a piece's name, but that SentencePiece takes apart.

    Such are ``<0x0A>``, ``<unk>`` and pieces that no sequence of joins reaches; with
    ``ignore_merges`` the tokenizer would find them as a whole. The pattern matches the first of
    the pieces that SentencePiece makes of them, so that the text is cut behind it.
    """
    kinds = (PieceType.NORMAL, PieceType.BYTE, PieceType.UNKNOWN)
    names = [name for kind in kinds for name in piece_names(model, kind)]
    split = verbatim_processor(model).encode(names, out_type=str)
    heads = {name: pieces[0] for name, pieces in zip(names, split, strict=True) if pieces != [name]}
    for name, head in heads.items():
        if head in heads or name.removeprefix(head) in heads:
            raise LoadError(f"{path}: the piece {name!r} cannot be reproduced exactly; {REMEDY}")
    alternatives = (
        rf"{re.escape(head)}(?={re.escape(name.removeprefix(head))}\z)"
        for name, head in heads.items()
    )
    return rf"\A(?:{'|'.join(alternatives)})" if heads else ""


def _decoder(spec: Any) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
