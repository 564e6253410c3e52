"""The identity of the tokenizer that made some token ids."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from ..errors import StoreError
from .suffix_array import TOKEN_BITS

_HUB_SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")
_MAX_VOCABULARY = (1 << TOKEN_BITS) - 1


@dataclass(frozen=True)
class TokenizerIdentity:
    """The identity of a tokenizer.

    Attributes:
        name: a model's name without its path, to show to people.
        vocab_size: all ids are below it.
        fingerprint: SHA-256 of the vocabulary, 32 bytes. It is equal for tokenizers whose ids mean
            the same, even if they split texts differently. A store of texts that were split
            differently is still right, if less useful.
    """

    name: str
    vocab_size: int
    fingerprint: bytes

    @property
    def key(self) -> str:
        """16 hexadecimal digits that identify it in file names and settings."""
        return self.fingerprint.hex()[:16]

    def __str__(self) -> str:
        return f"{self.name} ({self.vocab_size:,} tokens, {self.fingerprint.hex()[:8]})"


def identify(tokenizer: Any) -> TokenizerIdentity:
    """The identity of a tokenizer, from its whole vocabulary, added tokens included.

    Args:
        tokenizer: one of mlx-lm, transformers or tokenizers, or any with ``get_vocab``.

    Raises:
        StoreError: the tokenizer has no tokens, or ids that no store can hold.
    """
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    name = _short_name(getattr(tokenizer, "name_or_path", None) or "unnamed")
    if not vocabulary or not 0 <= vocabulary[0][0] <= vocabulary[-1][0] < _MAX_VOCABULARY:
        raise StoreError(
            f"the tokenizer {name} has ids that no store can hold: use one with ids from 0 to "
            f"{_MAX_VOCABULARY - 1:,}"
        )
    fingerprint = hashlib.sha256(json.dumps(vocabulary).encode()).digest()
    return TokenizerIdentity(name, vocabulary[-1][0] + 1, fingerprint)


def _short_name(path: str) -> str:
    """``owner/name`` for a copy from the Hub, the last part of the path for other directories."""
    if snapshot := _HUB_SNAPSHOT.search(path):
        return f"{snapshot[1]}/{snapshot[2]}"
    if os.path.isabs(path) or os.path.isdir(path):
        return os.path.basename(os.path.abspath(path)) or "unnamed"
    return path
