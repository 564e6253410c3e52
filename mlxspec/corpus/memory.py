"""The memory of earlier answers, from which all generations of a process draft.

The answers are rows of a database (:mod:`answers`). Look-ups search indexes derived from it, a
log-structured merge tree (O'Neil et al., 1996). The newest answers are in a suffix index, the
others in sorted segments. Merging keeps the segments few. Segments of kept answers are files next
to the database. They may be deleted at any time, and are then rebuilt from the rows.
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

from ..errors import FileError, OptionError
from ..files import remove_leftover, replaced
from .answers import (
    INDEX,
    INDEX_FORMAT,
    KEPT_TOKENS,
    KeptAnswers,
    OnTrouble,
    TokenizerIdentity,
    identify,
)
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

_log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
"""Tokens that a memory without kept answers holds by default, in 13 MB."""

LIVE_TOKENS = 16_384
"""The newest answers are sorted once they have this many tokens."""

LEADING_TOKENS = 8
"""A prompt's last tokens, which find the opening of its answer; "Openings" in notes/planner.md."""

RATIO = 8
"""A segment is merged into the next larger one unless that is this many times as large."""

_SORTED_TOKENS = 1 << 20  # sorted at once if segments are missing, in 90 bytes a token
_PIECE = 1 << 18  # tokens copied at a time
_INDEXED_TOKENS = 256  # indexed at a time; in between, other threads can run
_MANY_SEGMENTS = 8  # with more, answers wait for merging
_MOST_TOKENS = 2**31 - 1  # in a segment: positions are int32
_EXIT_SECONDS = 5.0  # to wait for the thread when the process ends

_IN_MEMORY = TokenizerIdentity("any", (1 << TOKEN_BITS) - 1, b"")

Arrays = Mapping[str, tuple[int, Iterable[np.ndarray]]]
"""The arrays of a segment: the length and the pieces of each, by name."""


class Memory:
    """Earlier answers, in which the end of a context is looked up.

    The memory's own thread adds, sorts and merges. Look-ups and additions never block, and may be
    made in any thread, even by a finaliser that interrupts a method of the memory.

    A memory changes only the speed of generations, never their output. Several decoders of one
    tokenizer may share it. Equal answers are remembered once. A full memory drops the answers that
    were least recently given, or drafted from with success, counted in days.

    Args:
        max_tokens: how many tokens to remember, 0 for none. By default the limit of ``kept``, or
            MAX_TOKENS.
        kept: the database that keeps the answers; the memory closes it. Without it they end with
            the process.
        on_trouble: called in the memory's thread with a line that describes a failure. The memory
            continues.

    Attributes:
        kept: as passed; do not call its methods.

    Raises:
        OptionError: ``max_tokens`` is negative or not a whole number.
        FileError: the kept answers cannot be read.
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
            raise OptionError(f"max_tokens is {max_tokens!r}: give a whole number, at least 0")
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
        """A memory on disk, which several processes may open at once.

        Args:
            directory: keeps the answers, also those of other tokenizers. Commands use it if the
                variable MLXSPEC_MEMORY names it.
            tokenizer: the tokenizer of the answers.
            max_tokens: how many tokens to keep.
            on_trouble: as for the class; by default the line is logged as a warning.

        Raises:
            OptionError: as for the class.
            FileError: the directory cannot be made or written.
        """
        model = str(getattr(tokenizer, "name_or_path", ""))
        kept = KeptAnswers(Path(directory), identify(tokenizer), model, max_tokens)
        return cls(kept=kept, on_trouble=on_trouble)

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = EXCERPT_TOKENS) -> Excerpts:
        """Find what followed earlier occurrences of a context's end.

        Args:
            tail: the context's last tokens; 64 are compared.
            limit: the most excerpts to return.
            depth: the most tokens of an excerpt.
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
        """Remember an answer soon; this never blocks.

        Args:
            output: the answer's tokens. If they are too many, the last ones are remembered.
            earned: the figures of its generation, by the names of :data:`EARNED`.
            prompt: the prompt's tokens. While the answer is among the newest, the opening is
                drafted after prompts with the same last eight tokens. These are not kept.

        Raises:
            OptionError: ``output`` or ``prompt`` has an item that is not a token id.
        """
        try:
            tokens = [index(token) for token in output]
            leading = [index(token) for token in prompt[-LEADING_TOKENS:]]
        except TypeError as error:
            raise OptionError(f"an answer must be token ids ({error}): pass integers") from error
        if self._thread.is_alive():  # otherwise nobody would take it
            take = partial(self._worker.take, tokens, dict(earned or {}), leading)
            self._worker.requests.put(take)

    def used(self, source: tuple[object, int]) -> None:
        """Record that a token drafted from an excerpt was accepted.

        Args:
            source: the excerpt's entry in :attr:`.Excerpts.sources`.
        """
        segment, position = source
        if isinstance(segment, Segment):
            self._worker.used.add(segment.row_at(position))

    @property
    def nbytes(self) -> int:
        """The memory of the indexes, without those in files, which are only mapped."""
        indexes = self._worker.searched
        return sum(index.nbytes for index in indexes if getattr(index, "path", None) is None)

    def refresh(self) -> None:
        """Soon index what other processes have kept, and drop what they have forgotten."""
        if self.kept:
            self._worker.requests.put(self._worker.take)

    def settle(self, *, tidy: bool = False) -> None:
        """Wait until look-ups find everything that was added.

        Args:
            tidy: also wait for all merging. Then the memory holds at most ``max_tokens``. Unless
                several processes share it, look-ups then depend only on what was added.
        """
        done = threading.Event()
        if tidy:
            self._worker.requests.put(self._worker.tidy)
        self._worker.requests.put(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def close(self, patience: float | None = None) -> None:
        """Keep everything that was added, merge, and remember nothing from then on.

        Args:
            patience: how many seconds to merge; None merges to the end. The next process that
                opens the directory merges the rest.
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
    """Keep the last additions before the process ends."""
    for memory in [*_open]:
        memory._worker.hurries = True
        memory._worker.requests.put(None)
        memory._thread.join(_EXIT_SECONDS)


class _MemoryWorker:
    """Does the work of a memory's thread, and provides the indexes to search.

    Attributes:
        searched: the indexes to search, the newest first.
        used: rows from which drafts were accepted; any thread adds to it.
        requests: functions for the thread to call; None ends it.
        hurries: whether to stop merging.
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
        self._unkept = 0  # the last row of an answer that could not be kept; these are negative
        self._state: tuple[int, int] | None = None
        """The database's state when its rows were last compared with the indexed ones."""
        self._last = 0
        """All rows up to this one have been read."""
        self._untidy = False  # whether segments may need merging
        self._live, self._live_texts = SuffixIndex(), dict[int, tuple[bytes, list[int]]]()
        self._segments = self._files()
        self._publish()

    def run(self) -> None:
        """Handle requests until the end, and merge while there are none."""
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
        """Merge until nothing is left to merge, or the process ends."""
        while self._merge():
            pass

    def _try(self, action: Callable[[], object]) -> None:
        """Run an action, and report its failure, if any."""
        try:
            action()
        except (OSError, FileError) as error:
            self._report(f"{error}; answers are remembered until this process ends")

    def _report(self, line: str) -> None:
        if line not in self._lines:
            self._lines.add(line)
            self._on_trouble(line)

    def _publish(self) -> None:
        """Let other threads search the present indexes."""
        self.searched: tuple[SuffixIndex | SuffixArray, ...] = (self._live, *self._segments)

    # Answers until they are sorted.

    def take(
        self,
        output: Sequence[int] = (),
        earned: Mapping[str, int] | None = None,
        leading: Sequence[int] = (),
    ) -> None:
        """Keep an answer if one is given, and index the database's new rows."""
        most = self._max_tokens * 3 // 4  # tokens left after an eviction
        # If the answer's beginning is left out, something else would follow the prompt.
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
        """Write an answer to the database; returns its row, or a negative one if that fails."""
        for _ in range(2):  # the second try finds a damaged database replaced
            with suppress(FileError):
                return self._answers.add(text, earned)
        self._try(lambda: self._answers.add(text, earned))
        self._unkept -= 1
        return self._unkept

    def _index(self, row: int, text: bytes, leading: Sequence[int] = ()) -> None:
        """Add an answer to the newest ones."""
        tokens = [*leading, *np.frombuffer(text, np.int32).tolist()]
        for start in range(0, len(tokens), _INDEXED_TOKENS):
            self._live.extend(tokens[start : start + _INDEXED_TOKENS])
            time.sleep(0)  # lets drafting threads run
        self._live.extend([SEPARATOR])
        self._live_texts[row] = text, [*leading]

    def _sort(self) -> None:
        """Sort the newest answers into a segment, and evict old ones if the memory is full."""
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

    # Changes by other processes, and files.

    def _files(self) -> list[Segment]:
        """The segments in files, the newest first; removes useless files."""
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
        for leftover in directory.glob(f".*{INDEX}.partial") if directory else ():
            remove_leftover(leftover)
        return sorted(segments, key=lambda segment: int(segment.rows[-1]), reverse=True)

    def refresh(self, leading: Mapping[int, Sequence[int]] | None = None) -> None:
        """Index new rows and drop deleted ones; ``leading`` has the prompts' last tokens by row."""
        if self._answers.state() != self._state:
            self._compare()
        self._last = max(self._last, self._index_all(self._answers.read(self._last), leading or {}))
        self._publish()

    def _compare(self, *, drop_unkept: bool = False) -> None:
        """Compare the indexes with all rows: drop deleted rows, and index missing ones."""
        state, there = self._answers.state(), self._answers.rows()
        if self._state and state[0] != self._state[0]:  # another database, with its own numbers
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
        """Index answers, sorted if they are many; returns the last row, or 0."""
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
        """Drop the answers in all other rows, from the indexes and the files."""
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
        """Let the thread rebuild a segment that has proved to be damaged."""
        self.requests.put(partial(self.drop_segment, index))

    def drop_segment(self, segment: Any) -> None:
        """Rebuild a damaged segment from its rows."""
        if segment in self._segments:
            self._report(f"{segment.path}: is damaged; it is rebuilt")
            segment.remove_file()
            self._segments.remove(segment)
            self._compare()

    # Merging.

    def _merge(self) -> bool:
        """Merge two segments, or write one to a file; returns whether that was needed."""
        chosen = self._choice() if self._untidy and not self.hurries else []
        self._untidy = bool(chosen)
        try:
            for segment in chosen:
                if not segment.is_intact():
                    self.drop_segment(segment)
                    return True
            if chosen:
                self._replace(chosen)
        except (IndexError, ValueError):  # impossible numbers, despite right checksums
            for segment in [one for one in self._segments if one.path]:
                self._try(partial(self.drop_segment, segment))
        except (OSError, FileError) as error:
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
            OSError, FileError: the new file cannot be written, or rows were deleted meanwhile.
        """
        arrays = _joined(*chosen) if len(chosen) > 1 else chosen[0].arrays()
        if all(map(self._goes_to_file, chosen)):
            assert self._state
            path, database = self._answers.new_index_file(), self._state[0]
            header = {"format": INDEX_FORMAT[0], "database": database}
            with ExitStack() as locked, replaced(path) as file:
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
        """Yield an array's pieces, until the process ends."""
        for piece in pieces:
            if self.hurries:
                raise InterruptedError
            yield piece
            time.sleep(0)  # lets drafting threads run


class Segment(SuffixArray):
    """Sorted answers.

    Args:
        rows: (texts,) of int32, the rows of the answers.
        ends: (texts,) of int32, the end of each text's SEPARATOR.
        tokens, order: as for the base class.
        path: the segment's file, if it has one.
        whole: the file's whole content.
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
        """The number of tokens, including a SEPARATOR for each text."""
        return len(self.tokens)

    def is_intact(self) -> bool:
        """Whether the file is as it was written."""
        return self._whole is None or is_intact(self._whole)

    def row_at(self, position: int) -> int:
        """The row of the answer at a position."""
        text = int(np.searchsorted(self.ends, position, side="right"))
        return int(self.rows[min(text, len(self.rows) - 1)])

    def only(self, stays: np.ndarray) -> Segment:
        """The answers that stay, as a segment held in memory; ``stays`` has one bool per text."""
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
        """The arrays of its file."""
        arrays = zip(INDEX_FORMAT[1], (self.rows, self.ends, self.tokens, self.order), strict=True)
        return {name: (len(array), [array]) for name, array in arrays}


def _joined(first: Segment, second: Segment) -> Arrays:
    """The arrays of a segment that joins two."""
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
