"""Text from token ids as they arrive, in pieces that join to the text of all of them.

The detokenizers have the interface of mlx-lm's ``StreamingDetokenizer`` (``reset``,
``add_token``, ``finalize``, ``text``, ``last_segment``, ``tokens``). A loaded tokenizer carries
one of them besides mlx-lm's own, which serves the functions that stand in for mlx-lm's. They keep
two promises: a character whose bytes come in several tokens is held back until it is complete,
and no space is dropped.

An output is a continuation: it always follows a prompt, if only a BOS token. So the space that a
SentencePiece decoder strips from the start of a text is kept here, and the text of prompt and
output together starts with the text of the prompt alone. Special tokens have their name as text;
an id beyond the vocabulary, as the padding of a model's output layer can give, has none.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"


class ByteDetokenizer:
    """Collects the text of tokens that each stand for the same bytes wherever they are.

    A token takes O(1). Bytes that are not UTF-8 become U+FFFD as in ``bytes.decode("utf-8",
    "replace")``.

    Args:
        bytes_of: what a token stands for, alone; nothing for an id beyond the vocabulary.
        prefix_space: whether the tokenizer puts a space before every text: then an output that is a
            text of its own, such as an answer in a chat, starts with a spurious space.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], prefix_space: bool = False) -> None:
        self.token_bytes = bytes_of
        self.prefix_space = prefix_space
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and their text."""
        self.tokens: list[int] = []
        self._segments: list[str] = []
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add_token(self, token: int) -> None:
        """Take the next token; its text may wait for the tokens after it."""
        self.tokens.append(token)
        self._segments.append(self._next_text(token))

    def finalize(self) -> None:
        """Give out what is held back, with U+FFFD for a character that was not completed."""
        self._segments.append(self._remaining_text())

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._segments)

    @property
    def last_segment(self) -> str:
        """The text given out since this property was last read."""
        segment = "".join(self._segments[self._read :])
        self._read = len(self._segments)
        return segment

    def _next_text(self, token: int) -> str:
        return self._decoder.decode(self.token_bytes(token))

    def _remaining_text(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(ByteDetokenizer):
    """For any other tokenizer: the difference between two decodings of the last few tokens."""

    def __init__(self, decode: Callable[[list[int]], str], vocabulary_size: int, first: int):
        """``first`` is the token that stands in for the prompt."""
        self._decode = decode
        self._vocabulary_size = vocabulary_size
        self._first = first
        super().__init__(self._bytes_alone)

    def reset(self) -> None:
        super().reset()
        self._before = [self._first]
        self._waiting: list[int] = []

    def _bytes_alone(self, token: int) -> bytes:
        if token >= self._vocabulary_size:
            return b""
        return self._decode([self._first, token])[len(self._decode([self._first])) :].encode()

    def _next_text(self, token: int) -> str:
        if token >= self._vocabulary_size:
            return ""
        self._waiting.append(token)
        text = self._text_of_waiting()
        return "" if text.endswith(_REPLACEMENT) else self._give_out(text)

    def _remaining_text(self) -> str:
        return self._give_out(self._text_of_waiting()) if self._waiting else ""

    def _text_of_waiting(self) -> str:
        return self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]

    def _give_out(self, text: str) -> str:
        self._before, self._waiting = self._waiting, []
        return text


# --- which one a tokenizer gets ---

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A decoder's steps, as ``tokenizer.json`` has them; the first space of a text is stripped or not.
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIPPED_SENTENCEPIECE = [
    *_SENTENCEPIECE,
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def wrap(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> TokenizerWrapper:
    """A tokenizer in mlx-lm's wrapper, with the detokenizer that mlx-lm would choose, and ours."""
    steps = _decoder_steps(tokenizer)
    kind: Any = NaiveStreamingDetokenizer
    if steps == _STRIPPED_SENTENCEPIECE:
        kind = SPMStreamingDetokenizer
    elif steps == _SENTENCEPIECE:
        kind = partial(SPMStreamingDetokenizer, trim_space=False)
    elif _is_byte_level(steps):
        kind = BPEStreamingDetokenizer
    return with_own_detokenizer(TokenizerWrapper(tokenizer, kind, **settings))


def with_own_detokenizer(wrapper: TokenizerWrapper) -> TokenizerWrapper:
    """Add our detokenizer to a wrapper of mlx-lm, besides its own."""
    wrapper._mlxspec_detokenizer = streaming_detokenizer(wrapper._tokenizer)
    return wrapper


def detokenizer_of(wrapper: TokenizerWrapper) -> Any:
    """A detokenizer, ready for a text: ours, or mlx-lm's if mlx-lm has loaded the tokenizer."""
    own = getattr(wrapper, "_mlxspec_detokenizer", None)
    if own is None:
        return wrapper.detokenizer
    fresh = copy.copy(own)
    fresh.reset()
    return fresh


def token_bytes(wrapper: TokenizerWrapper, token: int) -> bytes:
    """What a token stands for, alone: a space in front and a part of a character, too.

    (Decoding a token by itself drops both.)
    """
    own = getattr(wrapper, "_mlxspec_detokenizer", None) or getattr(wrapper, "_mlxspec_bytes", None)
    if own is None:
        tokenizer = wrapper._tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return str(wrapper.decode([token])).encode()
        own = streaming_detokenizer(tokenizer)
        wrapper._mlxspec_bytes = own  # which does not write the output's text
    return bytes(own.token_bytes(token))


def streaming_detokenizer(tokenizer: PreTrainedTokenizerBase) -> ByteDetokenizer:
    """The detokenizer for a tokenizer of transformers, by the kind of its decoder."""
    steps = _decoder_steps(tokenizer)
    byte_level = _is_byte_level(steps)
    if byte_level or steps in (_SENTENCEPIECE, _STRIPPED_SENTENCEPIECE):
        to_bytes = _byte_level_reader() if byte_level else _sentencepiece_bytes

        @cache
        def bytes_of(token: int) -> bytes:
            name = tokenizer.backend_tokenizer.id_to_token(token)
            return b"" if name is None else to_bytes(name)

        return ByteDetokenizer(bytes_of, prefix_space=steps == _STRIPPED_SENTENCEPIECE)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    first = tokenizer.bos_token_id
    if first is None:
        first = tokenizer.eos_token_id or 0
    return WindowDetokenizer(decode, len(tokenizer), first)


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """What the tokenizer's decoder does, step by step; nothing for a class that has its own."""
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain):
        return []
    if (kind.decode, kind._decode) != (plain.decode, plain._decode):
        return []
    decoder = tokenizer.backend_tokenizer.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return state.get("decoders", [state])


def _is_byte_level(steps: list[dict[str, Any]]) -> bool:
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _sentencepiece_bytes(name: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()


def _byte_level_reader() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 is itself, the other bytes follow from U+0100 on."""
    alphabet = set(ByteLevel.alphabet())
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    table = str.maketrans({chr(256 + index): chr(byte) for index, byte in enumerate(others)})

    def to_bytes(name: str) -> bytes:
        # A name with a sign from outside the alphabet is that of an added token: plain text.
        return (
            name.translate(table).encode("latin-1") if alphabet.issuperset(name) else name.encode()
        )

    return to_bytes
