"""The memory of earlier answers and added texts, from which all generations of a process draft.

The texts are rows of a database (:mod:`answers`). Look-ups search two indexes of these rows: a
suffix index of the newest ones, and a suffix array of all others, the segment. When there are many
new rows, they are sorted and merged into the segment. For kept answers, the segment is a file next
to the database. It is rebuilt from the rows after one was deleted, or if the file is missing.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..errors import FileError, OptionError
from ..files import replaced
from .answers import (
    INDEX_FORMAT,
    KEPT_TOKENS,
    KeptAnswers,
    TokenizerIdentity,
    errors_of,
    identify,
)
from .suffix_index import (
    EXCERPT_TOKENS,
    MAX_VOCABULARY,
    SEPARATOR,
    Excerpts,
    SuffixArray,
    SuffixIndex,
    encode_texts,
    excerpts,
    merged_order,
    write_index,
)

_log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
"""The default size, in tokens, of a memory without kept answers. So many tokens take 13 MB."""

LIVE_TOKENS, MOST_LIVE_TOKENS = 1 << 14, 1 << 18
"""Bounds of the number of tokens at which the newest answers are sorted, and so leave the suffix
index. Between them, the number is a sixteenth of the sorted tokens.
"""

LEADING_TOKENS = 8
"""The number of a prompt's last tokens by which an answer's opening is found; see "Openings" in
notes/planner.md.
"""

_SORTED_TOKENS = 1 << 20  # sorted at once, which takes 90 bytes per token
_PIECE = 1 << 18  # tokens copied at a time
_INDEXED_TOKENS = 256  # indexed at a time; between batches, other threads can run
_EXIT_SECONDS = 5.0  # the longest wait for the thread when the process ends

_IN_MEMORY = TokenizerIdentity("any", MAX_VOCABULARY, b"")


class AnswerIndex:
    """Earlier answers and added texts, in which the end of a context is looked up.

    The memory's own thread adds and sorts answers. Look-ups and additions never block, and may be
    made in any thread, even by a finaliser that interrupts a method of the memory.

    A memory changes only the speed of generations, never their output. If the disk fails, it logs a
    warning, and from then on remembers answers only until the process ends. Several decoders may
    share a memory if they have the same tokenizer. Equal answers are remembered once. A full memory
    drops the answers that were given longest ago.

    Args:
        max_tokens: how many tokens of answers to remember, 0 for none. The default is KEPT_TOKENS
            with ``kept``, and MAX_TOKENS without.
        kept: the database that keeps the answers, which the memory closes. Without one, answers are
            lost when the process ends.

    Attributes:
        kept: the database. Do not call its methods, as the memory's thread uses it.

    Raises:
        OptionError: ``max_tokens`` is negative or not a whole number.
        FileError: the kept answers cannot be read.
    """

    def __init__(self, max_tokens: int | None = None, *, kept: KeptAnswers | None = None) -> None:
        if max_tokens is None:
            max_tokens = KEPT_TOKENS if kept else MAX_TOKENS
        if type(max_tokens) is not int or max_tokens < 0:
            raise OptionError(f"max_tokens is {max_tokens!r}: give a whole number, at least 0")
        self.kept = kept
        answers = kept or KeptAnswers(None, _IN_MEMORY)
        self._worker = _MemoryWorker(answers, max_tokens)
        self._thread = threading.Thread(target=self._worker.run, name="mlxspec memory", daemon=True)
        self._thread.start()
        _open.add(self)
        weakref.finalize(self, self._worker.requests.put, None).atexit = False

    @classmethod
    def kept_in(
        cls,
        directory: str | os.PathLike[str],
        tokenizer: Any,
        *,
        max_tokens: int = KEPT_TOKENS,
    ) -> AnswerIndex:
        """A memory on disk, which several processes may open at once.

        Args:
            directory: the directory with the answers of all tokenizers. The command ``mlxspec``
                uses it, too, if the environment variable MLXSPEC_MEMORY names it.

        Raises:
            OptionError: as for the class.
            FileError: the directory cannot be made or written.
        """
        model = str(getattr(tokenizer, "name_or_path", ""))
        kept = KeptAnswers(Path(directory), identify(tokenizer), model)
        return cls(max_tokens, kept=kept)

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = EXCERPT_TOKENS) -> Excerpts:
        """Find the tokens after earlier occurrences of a context's end.

        Args:
            tail: the context's last tokens; up to 64 are compared.
            depth: the most tokens of an excerpt.
        """
        return excerpts(self._worker.searched, tail, limit, depth, self._worker.vocab_size)

    def add(
        self,
        output: Sequence[int],
        earned: Mapping[str, int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """Queue an answer to be remembered; this never blocks.

        Args:
            output: the answer's tokens. If there are too many, only the last are remembered.
            earned: the figures of its generation, by the names in :data:`EARNED`.
            prompt: the prompt's tokens. While the answer is among the newest, its opening is
                drafted after prompts with the same last eight tokens. The prompt is not kept.

        Raises:
            TypeError: ``output`` or ``prompt`` has an item that is not a token id.
        """
        tokens = [index(token) for token in output]
        leading = [index(token) for token in prompt[-LEADING_TOKENS:]]
        if self._thread.is_alive():  # otherwise nothing would read the queue
            take = partial(self._worker.take, tokens, dict(earned or {}), leading)
            self._worker.requests.put(take)

    @property
    def nbytes(self) -> int:
        """The bytes of the indexes in memory, not counting index files, which are mapped."""
        return sum(index.nbytes for index in self._worker.searched)

    def refresh(self) -> None:
        """Queue an update from the database.

        It indexes the answers that other processes have added, and drops those that they deleted.
        """
        if self.kept:
            self._worker.requests.put(self._worker.refresh)

    def settle(self) -> None:
        """Wait until look-ups find everything that was added.

        The memory then holds at most ``max_tokens``. Unless several processes share it, look-ups
        then depend only on the added answers.
        """
        done = threading.Event()
        self._worker.requests.put(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def close(self, patience: float | None = None) -> None:
        """Finish keeping what was added. Answers that are added later are not remembered.

        Args:
            patience: the most seconds to spend on sorting; None for no limit. The next process that
                opens the directory sorts the rest.
        """
        self._worker.requests.put(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._worker.hurries = True
            self._thread.join(_EXIT_SECONDS)


_open: weakref.WeakSet[AnswerIndex] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Keep the answers that were added last, before the process ends."""
    for memory in [*_open]:
        memory.close(patience=0)


class _MemoryWorker:
    """Runs a memory's thread, and provides the indexes to search.

    Attributes:
        searched: the indexes to search, the newest first.
        requests: functions for the thread to call; None ends it.
        hurries: whether sorting should stop.
    """

    def __init__(self, answers: KeptAnswers, max_tokens: int) -> None:
        self.vocab_size = answers.identity.vocab_size
        self.requests: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.hurries = False
        self._answers = answers
        self._max_tokens = max_tokens
        self._prompts: dict[int, Sequence[int]] = {}  # prompts' last tokens, by the answers' rows
        self._start_over()

    def run(self) -> None:
        """Handle requests until the end."""
        try:
            self._handle(self.refresh)
            while (request := self.requests.get()) is not None:
                self._handle(request)
        finally:
            self._answers.close()

    def _handle(self, request: Callable[[], object]) -> None:
        """Handle a request; if the disk fails, keep answers only in memory from then on."""
        try:
            with errors_of(self._answers.directory):
                request()
        except FileError as error:
            _log.warning("%s; answers are only remembered until this process ends", error)
            self._answers.close()
            self._answers = KeptAnswers(None, self._answers.identity)
            self._stamp, self._last = self._answers.stamp(), 0
            request()
        except (ValueError, OverflowError):  # numbers that do not fit into a token or a figure
            _log.warning("an answer is not remembered", exc_info=True)

    def _start_over(self) -> None:
        """Drop the indexes, and open the index file; :meth:`refresh` adds the rows it lacks."""
        self._stamp = self._answers.stamp()
        self._publish(self._open_file())

    def _open_file(self) -> SuffixArray:
        """The sorted answers in the index file; none if it is missing, damaged or outdated."""
        if self._answers.index_file:
            with suppress(OSError, ValueError):
                segment = SuffixArray.open(self._answers.index_file, INDEX_FORMAT)
                if segment.header.get("stamp") == self._stamp:
                    return segment
        return SuffixArray(np.empty(0, np.int32), np.empty(0, np.int32))

    def _publish(self, segment: SuffixArray) -> None:
        """Let other threads search the sorted answers and a new, empty index of the newest ones."""
        self._segment, self._last = segment, int(segment.header.get("last", 0))
        self._added = int(segment.header.get("added", 0))  # tokens of added texts
        self._live, self._live_texts = SuffixIndex(), list[bytes]()
        self.searched: tuple[SuffixIndex | SuffixArray, ...] = (self._live, segment)

    @property
    def _most_live(self) -> int:
        """The number of tokens at which the newest answers are sorted."""
        limit = min(max(LIVE_TOKENS, len(self._segment.tokens) // 16), MOST_LIVE_TOKENS)
        return max(1, min(limit, self._max_tokens // 8))

    def take(
        self, output: Sequence[int], earned: Mapping[str, int], leading: Sequence[int]
    ) -> None:
        """Keep an answer, and index the database's new rows."""
        remaining = self._max_tokens * 3 // 4  # tokens left after an eviction
        for text in encode_texts(output[max(0, len(output) - remaining) :], self.vocab_size):
            self._prompts[self._answers.add(text, earned)] = leading
            earned, leading = {}, ()
        self.refresh()
        self._prompts.clear()

    def refresh(self) -> None:
        """Index new rows; if rows were deleted, rebuild the indexes."""
        while not self.hurries:
            try:
                if self._answers.stamp() != self._stamp:
                    self._start_over()
                self._index_new()
                room = self._max_tokens + self._added - self._most_live - len(self._segment.tokens)
                if room >= 0 or not self._answers.evict(self._max_tokens * 3 // 4):
                    return
            except (IndexError, ValueError):  # rows were deleted, or the file is damaged
                if self._answers.index_file:
                    self._answers.index_file.unlink(missing_ok=True)
                self._start_over()

    def _index_new(self) -> None:
        """Index the new rows among the newest answers, or sort them if there are too many."""
        added = array("i")
        for row, tokens, _, name in self._answers.read(self._last):
            self._last = row
            self._added += 0 if name is None else len(tokens) + 1
            added.extend(self._prompts.get(row, ()))
            added.frombytes(tokens.tobytes())
            added.append(SEPARATOR)
            self._live_texts.append(tokens.tobytes())
            if len(added) > _SORTED_TOKENS:
                self._sort()
                added = array("i")
        if len(self._live) + len(added) >= self._most_live:
            self._sort()
            return
        for start in range(0, len(added), _INDEXED_TOKENS):
            self._live.extend(added[start : start + _INDEXED_TOKENS])
            time.sleep(0)  # lets drafting threads run

    def _sort(self) -> None:
        """Sort the newest answers, and merge them into the segment.

        If the process ends meanwhile, the index file stays as it was.

        Raises:
            ValueError, IndexError: the index is damaged or outdated.
            OSError, FileError: its file cannot be written.
        """
        old, new = self._segment, SuffixArray.of(self._live_texts)
        if not old.is_intact():
            raise ValueError("damaged")
        tokens = chain(np.array_split(old.tokens, len(old.tokens) // _PIECE + 1), [new.tokens])
        header = {"format": INDEX_FORMAT, "stamp": self._stamp}
        header |= {"last": self._last, "added": self._added}
        path = self._answers.index_file
        with suppress(CancelledError):
            if path is None:
                orders = [*map(self._let_others_run, merged_order(old, new))]
                segment = SuffixArray(np.concatenate([*tokens]), np.concatenate(orders))
                segment.header = header
            else:
                lengths = len(old.tokens) + len(new.tokens), len(old.order) + len(new.order)
                pieces = chain(tokens, merged_order(old, new))
                with ExitStack() as locked, replaced(path) as file:
                    write_index(file, header, lengths, map(self._let_others_run, pieces))
                    if locked.enter_context(self._answers.locked()) != self._stamp:
                        raise ValueError("rows were deleted")
                segment = self._open_file()
                if segment.header.get("last") != self._last:
                    raise ValueError("another process has replaced or removed the file")
            self._publish(segment)

    def _let_others_run(self, piece: np.ndarray) -> np.ndarray:
        """Yield to other threads between two pieces of a long task; cancel it if it should stop."""
        if self.hurries:
            raise CancelledError
        time.sleep(0)
        return piece
