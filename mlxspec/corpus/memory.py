"""The memory of earlier answers, which all generations of a process draft from.

The answers are rows of a database (:mod:`answers`). They are searched in indexes derived from it,
a log-structured merge tree (O'Neil et al., 1996): the newest answers are in a suffix index, the
others in sorted segments, which are merged so that there are few. Segments of kept answers are
files next to the database. They may be deleted at any time, and are made again from the rows.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..errors import OptionError, StoreError
from ..files import remove_leftovers, replaced
from .answers import INDEX, INDEX_FORMAT, KEPT_TOKENS, KeptAnswers, OnTrouble
from .suffix_array import (
    TOKEN_BITS,
    SuffixArray,
    encode_texts,
    is_intact,
    merged_order,
    read_arrays,
    write_arrays,
)
from .suffix_index import (
    EXCERPT_TOKENS,
    SEPARATOR,
    Excerpts,
    SuffixIndex,
    excerpts,
)
from .tokenizer_identity import TokenizerIdentity, identify

_log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
"""Tokens that a memory holds by default where nothing is kept: 13 MB."""

LIVE_TOKENS = 16_384
"""Tokens of the newest answers, beyond which they are sorted."""

LEADING_TOKENS = 8
"""Of a prompt, by which the opening of its answer is found: notes/planner.md, "Openings"."""

RATIO = 8
"""A segment is merged into the next larger one unless that is this many times as large."""

_SORTED_TOKENS = 1 << 20  # that are sorted at once where segments are missing; takes 90 bytes each
_PIECE = 1 << 18  # tokens that are copied at a time
_INDEXED_TOKENS = 256  # of the newest answer, between which other threads get the interpreter
_MANY_SEGMENTS = 8  # beyond which answers wait for merging
_MOST_TOKENS = 2**31 - 1  # of a segment: positions are int32
_EXIT_SECONDS = 5.0  # to wait at the process's end

_IN_MEMORY = TokenizerIdentity("any", (1 << TOKEN_BITS) - 1, b"")

Arrays = Mapping[str, tuple[int, Iterable[np.ndarray]]]
"""The arrays of a segment: by name, the length and the pieces."""


class Memory:
    """Earlier answers, in which the end of a context is looked up.

    A thread of its own adds, sorts and merges. Look-ups wait for nothing and may be made in any
    thread; so may additions, also by a finaliser that interrupts a method of the memory.

    A memory can only change how fast outputs come, never what they are. Several decoders of one
    tokenizer may share it. Equal answers are remembered once. When the memory is full, those go
    that were neither given nor drafted from with success for the longest time, by days.

    Args:
        max_tokens: how much is remembered; 0 remembers nothing. By default what ``kept`` says, or
            MAX_TOKENS.
        kept: where answers are kept over runs. Without it they end with the process. The memory
            closes it.
        on_trouble: called with one line about what could not be done, in the memory's thread. The
            memory goes on without it.

    Attributes:
        kept: as given; only its attributes may be used.

    Raises:
        OptionError: ``max_tokens`` is not a whole number from 0 on.
        StoreError: what is kept cannot be read.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        kept: KeptAnswers | None = None,
        on_trouble: OnTrouble = lambda line: None,
    ) -> None:
        if max_tokens is None:
            max_tokens = kept.max_tokens if kept else MAX_TOKENS
        if type(max_tokens) is not int or max_tokens < 0:
            raise OptionError(f"a memory of {max_tokens!r} tokens: give a whole number from 0 on")
        self.kept = kept
        answers = kept or KeptAnswers(None, _IN_MEMORY)
        self._worker = _MemoryWorker(answers, max_tokens, on_trouble)
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
        on_trouble: OnTrouble = _log.warning,
    ) -> Memory:
        """A memory that is kept over runs, and shared with other processes that open it.

        Args:
            directory: where; answers of several tokenizers may be kept in it. The commands use it
                where the variable MLXSPEC_MEMORY names it.
            tokenizer: the tokenizer of the answers.
            max_tokens: how much is kept.
            on_trouble: as for the class; by default the line is logged as a warning.

        Raises:
            OptionError: as for the class.
            StoreError: the directory cannot be made or written.
        """
        model = str(getattr(tokenizer, "name_or_path", ""))
        kept = KeptAnswers(Path(directory), identify(tokenizer), model, max_tokens)
        return cls(kept=kept, on_trouble=on_trouble)

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = EXCERPT_TOKENS) -> Excerpts:
        """Find what followed where a context's end occurs.

        Args:
            tail: the context's last tokens; 64 are compared.
            limit: how many excerpts to return at most.
            depth: how many tokens an excerpt has at most.
        """
        worker = self._worker
        return excerpts(
            worker.searched, tail, limit, depth, worker.vocab_size, worker.report_damage
        )

    def add(
        self,
        output: Sequence[int],
        earned: Mapping[str, int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """Remember an answer, soon. This waits for nothing, wherever it is called.

        Args:
            output: its tokens. If it is too long, its end is remembered.
            earned: the figures of its generation, by the names of :data:`EARNED`.
            prompt: the tokens that it answers, of which the last eight count. While the answer is
                among the newest, its opening is found where a prompt ends alike. They are not
                kept.

        Raises:
            OptionError: these are not token ids.
        """
        try:
            tokens = [index(token) for token in output]
            leading = [index(token) for token in prompt[-LEADING_TOKENS:]]
        except TypeError as error:
            raise OptionError(f"an answer must be token ids: {error}") from error
        if self._thread.is_alive():  # otherwise it would never be taken
            take = partial(self._worker.take, tokens, dict(earned or {}), leading)
            self._worker.requests.put(take)

    def used(self, source: tuple[object, int]) -> None:
        """Note that a drafted token of an excerpt was accepted.

        Args:
            source: the excerpt's.
        """
        segment, position = source
        if isinstance(segment, Segment):
            self._worker.used.add(segment.row_at(position))

    def refresh(self) -> None:
        """See, soon, what other processes have kept or forgotten."""
        if self.kept:
            self._worker.requests.put(self._worker.take)

    def settle(self, *, tidy: bool = False) -> None:
        """Wait until all that was added can be looked up.

        Args:
            tidy: wait for all merging, too. Then no more than ``max_tokens`` are held, and unless
                they are kept for several processes, lookups depend only on what was
                added.
        """
        done = threading.Event()
        if tidy:
            self._worker.requests.put(self._worker.tidy)
        self._worker.requests.put(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def close(self, patience: float | None = None) -> None:
        """Keep all that was added, and merge what there is to merge.

        Nothing is remembered from then on.

        Args:
            patience: for how many seconds to merge; None merges to the end. The rest is left
                for the next process that opens the directory.
        """
        self._worker.requests.put(self._worker.tidy)
        self._worker.requests.put(None)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._worker.hurries = True
            self._thread.join(_EXIT_SECONDS)


_open: weakref.WeakSet[Memory] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Let what was added last be kept before the process ends."""
    for memory in [*_open]:
        memory._worker.hurries = True
        memory._worker.requests.put(None)
        memory._thread.join(_EXIT_SECONDS)


class _MemoryWorker:
    """The work of a memory's thread, and what it has made ready to be searched.

    Attributes:
        searched: the indexes to be searched, the newest first.
        used: rows from which drafts were accepted; any thread adds to it.
        requests: functions to be called by the thread; None ends it.
        hurries: whether not to merge any more.
    """

    def __init__(self, answers: KeptAnswers, max_tokens: int, on_trouble: OnTrouble) -> None:
        self.vocab_size = answers.identity.vocab_size
        self.used: set[int] = set()
        self.requests: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.hurries = False
        self._answers = answers
        self._max_tokens = max_tokens
        self._live_tokens = max(1, min(LIVE_TOKENS, max_tokens // 8))
        self._on_trouble = on_trouble
        self._lines: set[str] = set()
        self._unkept = 0  # answers that could not be kept have rows below 0
        self._state: tuple[int, int] | None = None
        """Of the database, when its rows were last compared with the indexed ones."""
        self._last = 0
        """All rows up to here were read."""
        self._untidy = False  # whether there may be something to merge
        self._live, self._live_texts = SuffixIndex(), dict[int, tuple[bytes, list[int]]]()
        self._segments = self._files()
        self._publish()

    def run(self) -> None:
        """Do what is asked for until the end, and merge whenever nothing is."""
        try:
            self._try(self.refresh)
            while True:
                while self.requests.empty() or len(self._segments) > _MANY_SEGMENTS:
                    if not self._merge():
                        break
                if (request := self.requests.get()) is None:
                    return
                self._try(request)
        finally:
            self._try(self._save_used)
            self._answers.close()

    def tidy(self) -> None:
        """Merge until there is nothing to merge, or the process ends."""
        while self._merge():
            pass

    def _try(self, action: Callable[[], object]) -> None:
        """Do something; report once if it fails."""
        try:
            action()
        except (OSError, StoreError) as error:
            self._report(f"{error}; answers are remembered until this process ends")

    def _report(self, line: str) -> None:
        if line not in self._lines:
            self._lines.add(line)
            self._on_trouble(line)

    def _publish(self) -> None:
        """Let others search what there is now."""
        self.searched: tuple[SuffixIndex | SuffixArray, ...] = (self._live, *self._segments)

    # Answers, until they are sorted.

    def take(
        self,
        output: Sequence[int] = (),
        earned: Mapping[str, int] | None = None,
        leading: Sequence[int] = (),
    ) -> None:
        """Keep an answer if one is given, and index what is new in the database."""
        most = self._max_tokens * 3 // 4  # what is left when the memory has become too full
        # What is left out would let another text begin behind the prompt.
        first = (*leading, *output[:2])
        if len(output) > most or not all(0 <= token < self.vocab_size for token in first):
            leading = ()
        self._try(self._save_used)
        kept: dict[int, Sequence[int]] = {}
        for text in encode_texts(output[max(0, len(output) - most) :], self.vocab_size):
            row = self._keep(text, earned or {})
            kept[row] = leading
            if row < 0:
                self._index(row, text, leading)
            earned, leading = None, ()
        self._try(partial(self.refresh, kept))
        if len(self._live) >= self._live_tokens:
            self._sort()

    def _keep(self, text: bytes, earned: Mapping[str, int]) -> int:
        """Write an answer to the database; its row, below 0 if that is not possible."""
        for _ in range(2):  # a damaged database has been replaced by the second time
            with suppress(StoreError):
                return self._answers.add(text, earned)
        self._try(lambda: self._answers.add(text, earned))
        self._unkept -= 1
        return self._unkept

    def _index(self, row: int, text: bytes, leading: Sequence[int] = ()) -> None:
        """Add an answer to the newest ones."""
        tokens = [*leading, *np.frombuffer(text, np.int32).tolist()]
        for start in range(0, len(tokens), _INDEXED_TOKENS):
            self._live.extend(tokens[start : start + _INDEXED_TOKENS])
            time.sleep(0)  # lets threads that draft have the interpreter
        self._live.extend([SEPARATOR])
        self._live_texts[row] = text, [*leading]

    def _sort(self) -> None:
        """Make a segment of the newest answers, and evict old ones where there are too many."""
        if self._live_texts:
            self._add_segment([(row, text) for row, (text, _) in self._live_texts.items()])
        self._live, self._live_texts = SuffixIndex(), {}
        if sum(map(len, self._segments)) > self._max_tokens - self._live_tokens:
            self._try(lambda: self._answers.evict(self._max_tokens * 3 // 4))
            self._try(lambda: self._compare(drop_unkept=True))
        self._publish()

    def _add_segment(self, texts: Sequence[tuple[int, bytes]]) -> None:
        self._segments = [Segment.of(texts), *self._segments]
        self._untidy = True

    def _save_used(self) -> None:
        if self.used:
            rows, self.used = self.used, set()
            self._answers.use(rows)

    # What other processes do, and what is on disk.

    def _files(self) -> list[Segment]:
        """The segments in files, the newest first. Files that are of no use are removed."""
        directory, (database, _) = self._answers.directory, self._answers.state()
        found, segments, taken = list[Segment](), list[Segment](), np.empty(0, np.int32)
        for path in self._answers.index_files():
            try:
                found.append(Segment.open(path, database))
            except (OSError, ValueError):
                path.unlink(missing_ok=True)
        for segment in sorted(found, key=len, reverse=True):
            if np.isin(segment.rows, taken).any():
                segment.remove_file()
            else:
                segments.append(segment)
                taken = np.append(taken, segment.rows)
        for leftover in directory.glob(f".*{INDEX}.*") if directory else ():
            remove_leftovers(leftover.with_name(leftover.name[1:].partition(INDEX)[0] + INDEX))
        return sorted(segments, key=lambda segment: int(segment.rows[-1]), reverse=True)

    def refresh(self, leading: Mapping[int, Sequence[int]] | None = None) -> None:
        """Index the rows that are new, and drop those that were deleted.

        Args:
            leading: what leads to the answers in some rows.
        """
        if self._answers.state() != self._state:
            self._compare()
        self._last = max(self._last, self._index_all(self._answers.read(self._last), leading or {}))
        self._publish()

    def _compare(self, *, drop_unkept: bool = False) -> None:
        """Compare what is indexed with all rows: drop what is gone, and index what is missing."""
        state, there = self._answers.state(), self._answers.rows()
        if self._state and state[0] != self._state[0]:  # another database, which counts anew
            self._keep_only(np.empty(0, np.int64), drop_unkept)
        self._keep_only(there, drop_unkept)
        indexed = [np.array([*self._live_texts], np.int64), *(one.rows for one in self._segments)]
        missing = {*np.setdiff1d(there, np.concatenate(indexed)).tolist()}
        if missing:
            answers = self._answers.read(min(missing) - 1)
            self._index_all((one for one in answers if one[0] in missing), {})
        self._last, self._state = max(there.tolist()[-1:], default=0), state
        self._publish()

    def _index_all(
        self, answers: Iterable[tuple[int, np.ndarray, int]], leading: Mapping[int, Sequence[int]]
    ) -> int:
        """Index answers: sort them, or add them to the newest ones if they are few.

        Returns:
            the last row, 0 if there is none.
        """
        texts, size, last = list[tuple[int, bytes]](), 0, 0
        for last, tokens, _ in answers:
            texts.append((last, tokens.tobytes()))
            size += len(tokens)
            if size > _SORTED_TOKENS:
                self._add_segment(texts)
                texts, size = [], 0
        if size >= self._live_tokens and len(texts) > 1:
            self._add_segment(texts)
        else:
            for row, text in texts:
                self._index(row, text, leading.get(row, ()))
        return last

    def _keep_only(self, there: np.ndarray, drop_unkept: bool) -> None:
        """Search only answers in these rows from now on, and leave no others in files."""
        live = {*there.tolist()} if self._live_texts else set()
        gone = {r for r in self._live_texts if r not in live and (r > 0 or drop_unkept)}
        if gone:
            texts, self._live, self._live_texts = self._live_texts, SuffixIndex(), {}
            for row, (text, leading) in texts.items():
                if row not in gone:
                    self._index(row, text, leading)
        for segment in self._segments.copy():
            stays = np.isin(segment.rows, there)
            if not drop_unkept:
                stays |= segment.rows < 0
            if not stays.all():
                self._untidy = True
                at = self._segments.index(segment)
                self._segments[at : at + 1] = [segment.only(stays)] if stays.any() else []
                segment.remove_file()

    def report_damage(self, index: object) -> None:
        """Have a segment made again that has proved to be damaged."""
        self.requests.put(partial(self.drop_segment, index))

    def drop_segment(self, index: object) -> None:
        """Make a damaged segment again from its rows."""
        dropped = [segment for segment in self._segments if segment is index]
        for segment in dropped:
            self._report(f"{segment.path}: is damaged; it is made again")
            segment.remove_file()
        if dropped:
            self._segments = [segment for segment in self._segments if segment is not index]
            self._compare()

    # Merging.

    def _merge(self) -> bool:
        """Merge two segments, or write one to a file; whether there was anything to do."""
        chosen = self._choice() if self._untidy and not self.hurries else []
        self._untidy = bool(chosen)
        try:
            for segment in chosen:
                if not segment.is_intact():
                    self.drop_segment(segment)
                    return True
            if chosen:
                self._replace(chosen)
        except (IndexError, ValueError):  # files with right checksums and impossible numbers
            for segment in [one for one in self._segments if one.path]:
                self._try(partial(self.drop_segment, segment))
        except (OSError, StoreError) as error:
            if isinstance(error.__cause__ or error, FileNotFoundError):
                self._try(self.refresh)  # other processes have deleted rows, or the new file
            else:
                self._untidy = False
                if not self.hurries:
                    self._report(f"{error}; answers are remembered until this process ends")
        return self._untidy

    def _choice(self) -> list[Segment]:
        """The two segments to merge, or the one to write to a file."""
        for segment in self._segments:
            if self._goes_to_file(segment) and segment.path is None:
                return [segment]
        total = 0  # tokens of newer segments
        for segment in self._segments:
            if len(segment) < RATIO * total and total + len(segment) <= _MOST_TOKENS:
                return self._segments[:2]
            total += len(segment)
        return []

    def _goes_to_file(self, segment: Segment) -> bool:
        return self._answers.directory is not None and int(segment.rows.min()) > 0

    def _replace(self, chosen: list[Segment]) -> None:
        """Replace one or two segments with a single new one.

        Raises:
            OSError, StoreError: the new file cannot be written, or rows were deleted meanwhile.
        """
        arrays = _joined(*chosen) if len(chosen) > 1 else chosen[0].arrays()
        if all(map(self._goes_to_file, chosen)):
            assert self._state
            path, database = self._answers.new_index_file(), self._state[0]
            header = {"format": INDEX_FORMAT[0], "database": database}
            with ExitStack() as locked, replaced(path, StoreError) as file:
                write_arrays(file, header, {n: (k, self._taken(a)) for n, (k, a) in arrays.items()})
                if locked.enter_context(self._answers.locked()) != self._state:
                    raise FileNotFoundError("rows were deleted")
            merged = Segment.open(path, database)
        else:
            rows, ends, tokens, order = (
                np.concatenate([*self._taken(pieces)]) for _, pieces in arrays.values()
            )
            merged = Segment(rows, ends, tokens, order)
        remaining = [one for one in self._segments if one not in chosen]
        self._segments = sorted([*remaining, merged], key=lambda one: -int(one.rows[-1]))
        self._publish()
        for segment in chosen:
            segment.remove_file()

    def _taken(self, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Pieces of an array, as long as the process does not end."""
        for piece in pieces:
            if self.hurries:
                raise InterruptedError
            yield piece
            time.sleep(0)  # lets threads that draft have the interpreter


class Segment(SuffixArray):
    """Sorted answers.

    Args:
        rows: (texts,) of int32, the rows of the answers.
        ends: (texts,) of int32, where each text's SEPARATOR ends.
        tokens, order: as for the base class.
        path: the file; None if there is none.
        whole: all of the file.
    """

    def __init__(
        self,
        rows: np.ndarray,
        ends: np.ndarray,
        tokens: np.ndarray,
        order: np.ndarray,
        path: Path | None = None,
        whole: np.ndarray | None = None,
    ) -> None:
        super().__init__(tokens, order)
        self.rows, self.ends, self.path, self._whole = rows, ends, path, whole

    @classmethod
    def of(cls, texts: Sequence[tuple[int, bytes]]) -> Segment:  # type: ignore[override]
        """Sort answers, given by their rows and the bytes of their tokens."""
        array = SuffixArray.of(text for _, text in texts)
        rows = np.array([row for row, _ in texts], np.int32)
        ends = np.flatnonzero(array.tokens == SEPARATOR).astype(np.int32) + 1
        return cls(rows, ends, array.tokens, array.order)

    @classmethod
    def open(cls, path: Path, database: int) -> Segment:
        """Map a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged, or belongs to another database.
        """
        header, whole, arrays = read_arrays(path, *INDEX_FORMAT)
        if header.get("database") != database or not len(arrays[0]) == len(arrays[1]) > 0:
            raise ValueError("belongs to another database")
        rows, ends, tokens, order = arrays
        return cls(rows, ends, tokens, order, path, whole)

    def __len__(self) -> int:
        """How many tokens there are, with a SEPARATOR for each text."""
        return len(self.tokens)

    def is_intact(self) -> bool:
        """Whether the file is as it was written."""
        return self._whole is None or is_intact(self._whole)

    def row_at(self, position: int) -> int:
        """The row of the answer at a position."""
        text = int(np.searchsorted(self.ends, position, side="right"))
        return int(self.rows[min(text, len(self.rows) - 1)])

    def only(self, stays: np.ndarray) -> Segment:
        """Some of the answers, in memory; ``stays`` is (texts,) of bool."""
        lengths = np.diff(self.ends, prepend=0)
        gone = np.repeat(~stays, lengths)
        order = self.order[~gone[self.order]]
        order -= np.cumsum(gone, dtype=np.int32)[order]
        ends = np.cumsum(lengths[stays], dtype=np.int32)
        return Segment(self.rows[stays], ends, self.tokens[~gone], order)

    def remove_file(self) -> None:
        if self.path:
            self.path.unlink(missing_ok=True)

    def arrays(self) -> Arrays:
        """What a file of it holds."""
        arrays = zip(INDEX_FORMAT[1], (self.rows, self.ends, self.tokens, self.order), strict=True)
        return {name: (len(array), [array]) for name, array in arrays}


def _joined(first: Segment, second: Segment) -> Arrays:
    """What a segment of two segments' answers holds."""
    older, newer = sorted((first, second), key=lambda one: int(one.rows[-1]))
    start = len(older.tokens)
    if len(older.order) < len(newer.order):
        order = merged_order(newer, older, start, 0)
    else:
        order = merged_order(older, newer, 0, start)
    n_texts = len(older.rows) + len(newer.rows)
    pieces: dict[str, Iterator[np.ndarray]] = {
        "rows": iter([older.rows, newer.rows]),
        "ends": iter([older.ends, newer.ends + np.int32(start)]),
        "tokens": chain(_pieces(older.tokens), _pieces(newer.tokens)),
        "order": order,
    }
    lengths = n_texts, n_texts, start + len(newer.tokens), len(older.order) + len(newer.order)
    return {name: (n, pieces[name]) for name, n in zip(INDEX_FORMAT[1], lengths, strict=True)}


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + _PIECE] for start in range(0, len(array), _PIECE))
