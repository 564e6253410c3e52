"""Adding a process's outputs to a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import OptionError, StoreError
from ..files import check_writable, sole_writer
from .store import check_tokenizer
from .store_file import (
    EMPTY,
    Vocabulary,
    as_texts,
    divided,
    identify,
    joined,
    newest,
    read_store_file,
    write_store_file,
)

LEARNED_TOKENS = 250_000
"""Tokens of outputs that a store keeps; of more, the oldest outputs go."""


class Learner:
    """Collects outputs and adds them to a store at the end of the ``with`` block.

    They are added whatever ended the block, an interrupt included. Several processes may learn
    into one store at a time: each adds its outputs to what the others have written. Threads may
    share a learner. An output
    that the store has learned before is kept once, as the newest.

    The outputs are merged and the file is written anew, which takes time in proportion to its
    size (0.4 s for ten million tokens), so it is done once and not for every output.

    Args:
        path: the store. If there is none, one is made.
        tokenizer: the model's.
        max_tokens: how many tokens of outputs the store keeps, first in, first out; what was
            built into it is not counted and stays.

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
        if max_tokens < 2:
            raise OptionError(f"max_tokens is {max_tokens}: learn at least 2 tokens")
        self._path = Path(os.path.abspath(path))
        self._identity = identify(tokenizer)
        self._max_tokens = max_tokens
        self._outputs: dict[bytes, None] = {}
        self._lock = threading.Lock()
        check_writable(self._path, StoreError)
        if self._path.exists() and self._path.stat().st_size > 0:
            check_tokenizer(path, read_store_file(self._path).identity, self._identity)

    def add(self, output: Sequence[int]) -> None:
        """Remember an output's token ids, in memory, until :meth:`save`."""
        with self._lock:
            _append(self._outputs, as_texts(output, self._identity.vocab_size))
            self._outputs = dict.fromkeys(newest(self._outputs, self._max_tokens))

    def save(self) -> None:
        """Add the remembered outputs to the store now.

        Raises:
            StoreError: it cannot be written; the outputs are still remembered.
        """
        with self._lock:
            if self._outputs:
                self._save()

    def _save(self) -> None:
        with sole_writer(self._path, StoreError, create=True):
            identity, built, learned = self._identity, EMPTY, EMPTY
            if self._path.stat().st_size > 0:
                file = read_store_file(self._path)
                check_tokenizer(self._path, file.identity, self._identity)
                identity, built, learned = file.identity, file.built, file.learned
            texts = dict.fromkeys(divided(learned.tokens))
            _append(texts, self._outputs)
            learned = joined(newest(texts, self._max_tokens))
            write_store_file(self._path, identity, built, learned)
        self._outputs = {}

    def __enter__(self) -> Learner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.save()


def _append(texts: dict[bytes, None], new: Iterable[bytes]) -> None:
    """Put texts at the end of others; those that were among them move there."""
    for text in new:
        texts.pop(text, None)
        texts[text] = None
