"""Adding a process's outputs to a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import StoreError
from ..files import check_writable, sole_writer
from .store import Store, check_max_tokens, read_store, write_store
from .suffix_array import TOKEN_BYTES, SuffixArray, encode_texts
from .tokenizer_identity import Vocabulary, identify

LEARNED_TOKENS = 250_000
"""Tokens of outputs that a store keeps; of more, the oldest outputs go."""


class Learner:
    """Collects outputs and adds them to a store at the end of the ``with`` block.

    They are added whatever ended the block, an interrupt included. Several processes may learn
    into one store at a time: each adds its outputs to what the others have written. Threads may
    share a learner. An output that the store has learned before is kept once, as the newest.

    Adding outputs writes the file anew, which takes time in proportion to its size (0.4 s for
    ten million tokens), so it is done once and not for every output.

    Args:
        path: the store. If there is none, one is made.
        tokenizer: the model's.
        max_tokens: how many tokens of outputs the store keeps, first in, first out. What was
            built into it does not count and stays.

    Raises:
        OptionError: ``max_tokens`` is below 2.
        StoreError: ``path`` is no store, another tokenizer's, or in a directory that cannot be
            written. This is found out before anything is generated.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: Vocabulary,
        max_tokens: int = LEARNED_TOKENS,
    ) -> None:
        check_max_tokens(max_tokens)
        self._path = Path(os.path.abspath(path))
        self._identity = identify(tokenizer)
        self._max_tokens = max_tokens
        self._outputs: dict[bytes, None] = {}
        self._lock = threading.Lock()
        check_writable(self._path, StoreError)
        if self._path.exists():
            self._read()

    def add(self, output: Sequence[int]) -> None:
        """Remember an output's token ids, in memory, until :meth:`save`."""
        with self._lock:
            texts = encode_texts(output, self._identity.vocab_size)
            self._outputs = self._newest(self._outputs, texts)

    def save(self) -> None:
        """Add the remembered outputs to the store now.

        Raises:
            StoreError: it cannot be written; the outputs are still remembered.
        """
        with self._lock:
            if not self._outputs:
                return
            with sole_writer(self._path, StoreError, create=True):
                store = self._read()
                if store:
                    store.verify()
                identity = store.identity if store else self._identity
                built = store.built if store else SuffixArray.of([])
                texts = self._newest(store.learned.texts if store else [], self._outputs)
                write_store(self._path, identity, built, SuffixArray.of(texts))
            self._outputs = {}

    def _read(self) -> Store | None:
        """The store as it is now; None where an empty file is to become one."""
        if self._path.stat().st_size == 0:
            return None
        return read_store(self._path, self._identity)

    def _newest(self, texts: Iterable[bytes], newer: Iterable[bytes]) -> dict[bytes, None]:
        """The last texts that fit into ``max_tokens``, each once; of one that is too long its end.

        A dictionary keeps the order in which its keys were put in.
        """
        ordered = dict.fromkeys(texts)
        for text in newer:
            ordered.pop(text, None)
            ordered[text] = None
        kept: list[bytes] = []
        room = self._max_tokens * TOKEN_BYTES
        for text in reversed(ordered):
            if len(text) > room:
                if not kept:
                    kept.append(text[-room:])
                break
            kept.append(text)
            room -= len(text)
        return dict.fromkeys(reversed(kept))

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()
