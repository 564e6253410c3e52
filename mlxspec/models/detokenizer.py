"""Detokenizers: turn token ids into pieces of text as they arrive.

A loaded tokenizer has one of them besides mlx-lm's own. (The functions that replace mlx-lm's use
mlx-lm's own.) They hold a character back until all of its tokens have come, and drop no space.

An output always follows a prompt, if only a BOS token. So they keep the space that a SentencePiece
decoder strips from the start of a text. The text of a special token is its name. An id beyond the
vocabulary, which a padded output layer can produce, has no text.
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
    StreamingDetokenizer,
    TokenizerWrapper,
    _is_bpe_decoder,
    _is_spm_decoder,
    _is_spm_decoder_no_space,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


class ByteDetokenizer(StreamingDetokenizer):
    """Collects the text of tokens that stand for the same bytes in every context.

    Bytes that are not UTF-8 become U+FFFD, as in ``bytes.decode("utf-8", "replace")``.

    Args:
        bytes_of: the bytes of a single token; none for an id beyond the vocabulary.
        prefix_space: whether the tokenizer puts a space before every text. Then an output that is
            a separate text, such as an answer in a chat, starts with a spurious space.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], prefix_space: bool = False) -> None:
        self.token_bytes = bytes_of
        self.prefix_space = prefix_space
        self.reset()

    def reset(self) -> None:
        """Forget all tokens and their text."""
        self.tokens: list[int] = []
        self.text = ""
        self.offset = 0  # of the text that was read
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add_token(self, token: int) -> None:
        """Take the next token; its text may wait for the tokens after it."""
        self.tokens.append(token)
        self.text += self._next_text(token)

    def finalize(self) -> None:
        """Release the text held back, with U+FFFD for an incomplete character."""
        self.text += self._remaining_text()

    def _next_text(self, token: int) -> str:
        return self._decoder.decode(self.token_bytes(token))

    def _remaining_text(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(ByteDetokenizer):
    """Finds a token's text, with any tokenizer, as the difference between two decodings."""

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
        text = self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]
        if text.endswith("\ufffd"):
            return ""
        self._before, self._waiting = self._waiting, []
        return text

    def _remaining_text(self) -> str:
        return self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]


# --- which one a tokenizer gets ---

_BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}  # GPT-2's alphabet
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def wrap(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> TokenizerWrapper:
    """Wrap a tokenizer as mlx-lm does, with mlx-lm's choice of detokenizer and with ours."""
    decoder = _decoder_of(tokenizer)
    kind: Any = NaiveStreamingDetokenizer
    if _is_spm_decoder(decoder):
        kind = SPMStreamingDetokenizer
    elif _is_spm_decoder_no_space(decoder):
        kind = partial(SPMStreamingDetokenizer, trim_space=False)
    elif _is_bpe_decoder(decoder):
        kind = BPEStreamingDetokenizer
    return with_own_detokenizer(TokenizerWrapper(tokenizer, kind, **settings))


def with_own_detokenizer(wrapper: TokenizerWrapper) -> TokenizerWrapper:
    """Add our detokenizer to a wrapper of mlx-lm, in addition to its own."""
    wrapper._mlxspec_detokenizer = streaming_detokenizer(wrapper._tokenizer)
    return wrapper


def detokenizer_of(wrapper: TokenizerWrapper) -> Any:
    """A detokenizer for a new text: ours, or mlx-lm's if mlx-lm has loaded the tokenizer."""
    own = getattr(wrapper, "_mlxspec_detokenizer", None)
    if own is None:
        return wrapper.detokenizer
    fresh = copy.copy(own)
    fresh.reset()
    return fresh


def token_bytes(wrapper: TokenizerWrapper, token: int) -> bytes:
    """The bytes of a single token, with a leading space and incomplete characters.

    Decoding a single token would drop both.
    """
    own = getattr(wrapper, "_mlxspec_detokenizer", None) or getattr(wrapper, "_mlxspec_bytes", None)
    if own is None:
        tokenizer = wrapper._tokenizer
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return str(wrapper.decode([token])).encode()
        own = streaming_detokenizer(tokenizer)
        wrapper._mlxspec_bytes = own  # for bytes only: mlx-lm's detokenizer makes the output's text
    return bytes(own.token_bytes(token))


def streaming_detokenizer(tokenizer: PreTrainedTokenizerBase) -> ByteDetokenizer:
    """The detokenizer for a transformers tokenizer, chosen by the kind of its decoder."""
    decoder = _decoder_of(tokenizer)
    prefix_space = _is_spm_decoder(decoder)
    to_bytes = None
    if _is_bpe_decoder(decoder):
        to_bytes = _byte_level_bytes
    elif prefix_space or _is_spm_decoder_no_space(decoder):
        to_bytes = _sentencepiece_bytes
    if to_bytes:

        @cache
        def bytes_of(token: int) -> bytes:
            name = tokenizer.backend_tokenizer.id_to_token(token)
            return b"" if name is None else to_bytes(name)

        return ByteDetokenizer(bytes_of, prefix_space)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    first = tokenizer.bos_token_id
    if first is None:
        first = tokenizer.eos_token_id or 0
    return WindowDetokenizer(decode, len(tokenizer), first)


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The decoder in the form of ``tokenizer.json``; None for a class with its own decoding."""
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain):
        return None
    if (kind.decode, kind._decode) != (plain.decode, plain._decode):
        return None
    decoder = tokenizer.backend_tokenizer.decoder
    return json.loads(decoder.__getstate__()) if decoder is not None else None


def _sentencepiece_bytes(name: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()


def _byte_level_bytes(name: str) -> bytes:
    # A name with a character outside GPT-2's alphabet belongs to an added token: plain text.
    try:
        return bytes(_BYTES[sign] for sign in name)
    except KeyError:
        return name.encode()
