"""The memory of earlier answers, which all generations of a process draft from."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, cast

import numpy as np

from ..errors import OptionError, StoreError
from .excerpts import DamagedTexts, Searched, Source, excerpts
from .journal import Journal, JournalMovedError
from .kept import KEPT_TOKENS, KeptTexts, OnTrouble, reason
from .live import LEADING_TOKENS, Live
from .part import NOTHING, SUPERSEDED, Learned, Merged, Part, distinct
from .part_file import FilePart
from .settings import open_kept
from .suffix_array import TOKEN_BITS, encode_texts
from .suffix_index import EXCERPT_TOKENS, Excerpts
from .tokenizer_identity import Vocabulary, identify

_log = logging.getLogger(__name__)

MAX_TOKENS = 1 << 20
"""Tokens that a memory holds unless it is told otherwise: 9 MB, and 1 MB of what is newest."""

LIVE_TOKENS = 16_384
"""Tokens of the newest answers, beyond which they are sorted."""

RATIO = 8
"""A part is merged into the next older one unless that is this many times as large."""

_MANY_PARTS = 8  # beyond which answers wait for merging, too
_VOCABULARY = (1 << TOKEN_BITS) - 1
_EXIT_SECONDS = 5.0  # to wait at the process's end


class _State(NamedTuple):
    """All that is searched at one time.

    Attributes:
        live: the newest answers.
        parts: the others, the newest first.
        everything: both, to be searched. Nothing in it leads back here, so that the file of a part
            that is searched no longer leaves the process's memory at once.
    """

    live: Live
    parts: tuple[Part, ...]
    everything: tuple[Searched, ...]

    @classmethod
    def of(cls, live: Live, parts: Iterable[Part]) -> _State:
        parts = tuple(parts)
        return cls(live, parts, (live.searched, *(part.searched for part in parts)))


class Memory:
    """Earlier answers, in which the end of a context is looked up.

    New answers go to a part that grows, and from there to sorted ones, which are merged so that
    there are few: a log-structured merge tree (O'Neil et al., 1996) of suffix arrays. A thread of
    the memory's own does that. Look-ups wait for nothing and may be made in any thread; so may
    additions, also by a finaliser that interrupts a method of the memory.

    It can only change how fast outputs come, and never what they are. Several decoders of one
    tokenizer may share it.

    Of equal answers one is kept, as the newest. When the memory is full, the answers go that were
    neither learned nor drafted from with success for the longest time, by days.

    Args:
        max_tokens: how much is remembered; 0 remembers nothing. None takes what ``kept`` says, or
            MAX_TOKENS.
        kept: where answers are kept over runs. Without it they end with the process.
        on_trouble: called with one line about what could not be done, by the memory's thread or
            by one that looks up. The memory goes on without it.

    Attributes:
        kept: as given. The memory alone may use it, but for what it says of itself.

    Raises:
        OptionError: ``max_tokens`` is no whole number from 0 on.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        kept: KeptTexts | None = None,
        on_trouble: OnTrouble = lambda line: None,
    ) -> None:
        if max_tokens is None:
            max_tokens = kept.max_tokens if kept else MAX_TOKENS
        if type(max_tokens) is not int or max_tokens < 0:
            raise OptionError(f"a memory of {max_tokens!r} tokens: give a whole number from 0 on")
        self.kept = kept
        self._shelf = _Shelf(max_tokens, kept, on_trouble)
        self._thread = threading.Thread(target=self._shelf.run, name="mlxspec memory", daemon=True)
        self._thread.start()
        _open.add(self)
        weakref.finalize(self, self._shelf.requests.put, _STOP).atexit = False

    @classmethod
    def kept_in(
        cls,
        directory: str | os.PathLike[str],
        tokenizer: Vocabulary,
        *,
        max_tokens: int = KEPT_TOKENS,
        on_trouble: OnTrouble = _log.warning,
    ) -> Memory:
        """A memory that is kept over runs, and shared with other processes that open it.

        Args:
            directory: where; each tokenizer has its own directory in it. The commands use it, too,
                where the variable MLXSPEC_MEMORY names it.
            tokenizer: of which the tokens are.
            max_tokens: how much is kept.
            on_trouble: as for the class; by default the line is logged as a warning.

        Raises:
            OptionError: as for the class.
            StoreError: the directory cannot be made or written.
        """
        model = str(getattr(tokenizer, "name_or_path", ""))
        kept = open_kept(identify(tokenizer), model, max_tokens, Path(directory))
        return cls(kept=kept, on_trouble=on_trouble)

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = EXCERPT_TOKENS) -> Excerpts:
        """Find what followed where a context's end occurs.

        Args:
            tail: the context's last tokens, of which 64 are compared.
            limit: how many excerpts to return at most.
            depth: how many tokens an excerpt has at most.
        """
        shelf = self._shelf
        while True:
            try:
                return excerpts(shelf.searched.everything, tail, limit, depth, shelf.vocab_size)
            except DamagedTexts as damaged:
                shelf.drop(damaged.texts)

    def add(
        self,
        output: Sequence[int],
        earned: Mapping[str, int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """Remember an answer, soon. This waits for nothing, wherever it is called.

        Args:
            output: its tokens. Of one that is too long the end is remembered.
            earned: what its generation earned, by the names of :data:`EARNED`.
            prompt: the tokens that it answers, of which the last eight count. While the answer is
                among the newest, its opening is found where a prompt ends alike. They end with
                the process, or when the answer is sorted. Of equal answers, the first one's count.

        Raises:
            OptionError: they are no token ids.
        """
        try:
            tokens = [index(token) for token in output]
            leading = [index(token) for token in prompt[-LEADING_TOKENS:]]
        except TypeError as error:
            raise OptionError(f"an answer is token ids, and this is none: {error}") from error
        if self._thread.is_alive():  # nobody would take it otherwise
            self._shelf.requests.put((tokens, dict(earned or {}), leading))

    def used(self, source: Source) -> None:
        """Take note that a drafted token of an excerpt was accepted.

        Args:
            source: the excerpt's. If its text has moved since it was looked up, nothing happens.
        """
        texts, position = source
        if isinstance(texts, Part):
            texts.use(position)

    def refresh(self) -> None:
        """See, soon, what other processes have kept or forgotten. Cheap where that is nothing."""
        if self._shelf.is_outdated():
            self._shelf.requests.put(_REFRESH)

    def settle(self, *, tidy: bool = False) -> None:
        """Wait until all that was added can be looked up.

        Args:
            tidy: wait for all merging, too. Then no more than ``max_tokens`` are held, and unless
                they are kept for several processes, what is found depends on nothing but what was
                added.
        """
        done = threading.Event()
        if tidy:
            self._shelf.requests.put(_TIDY)
        self._shelf.requests.put(done)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def close(self, patience: float | None = None) -> None:
        """Keep all that was added, and merge what there is to merge.

        Nothing is remembered from then on.

        Args:
            patience: for how many seconds to merge; None merges to the end. What is left is for
                whoever opens the same directory next.
        """
        self._shelf.requests.put(_FINISH)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._shelf.requests.put(_STOP)
            self._thread.join(_EXIT_SECONDS)


_STOP, _FINISH, _REFRESH, _TIDY, _MERGED = (object() for _ in range(5))

_open: weakref.WeakSet[Memory] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Let what was added last be handed over before the process ends."""
    for memory in [*_open]:
        memory._shelf.requests.put(_STOP)
        memory._thread.join(_EXIT_SECONDS)


class _Shelf:
    """What a memory holds, and the work of its thread."""

    def __init__(self, max_tokens: int, kept: KeptTexts | None, on_trouble: OnTrouble) -> None:
        self.vocab_size = kept.identity.vocab_size if kept else _VOCABULARY
        self._max_tokens = max_tokens
        self._kept = kept
        self._on_trouble = on_trouble
        self._told: set[str] = set()
        self._live_tokens = max(1, min(LIVE_TOKENS, max_tokens // 8))
        self._changing = threading.Lock()
        """Held for a moment while :attr:`searched` is replaced."""
        self._untidy = False
        """Whether there may be something to merge."""
        self._merging: Generator[None, None, None] | None = None
        self._journals: dict[Part, list[Journal]] = {}
        """Of sorted parts that are not in a file yet, where their answers are kept."""
        self.searched = _State.of(Live(), self._files())
        self.requests: SimpleQueue[object] = SimpleQueue()

    def run(self) -> None:
        """Do what is asked for until the end, and whenever nothing is, merge parts step by step."""
        try:
            self._adopt()
            self._serve()
        finally:
            self._merging = None
            for journals in self._journals.values():
                for journal in journals:
                    journal.close()
            if self._kept:
                self._kept.close()

    def drop(self, texts: object) -> None:
        """Search some texts no longer, since they prove to be damaged."""
        if self._kept and isinstance(texts, FilePart):
            self._tell(f"{texts.path}: is damaged; what it holds is not drafted from")
            self._kept.refuse(texts)
        self._leave_out(texts)

    def _leave_out(self, texts: object) -> None:
        with self._changing:
            live, parts, _ = self.searched
            remaining = tuple(part for part in parts if part is not texts)
            self.searched = _State.of(Live() if live is texts else live, remaining)

    def is_outdated(self) -> bool:
        """Whether other processes have changed what is kept."""
        return self._kept is not None and self._kept.changed()

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._on_trouble(line)

    def _trouble(self, error: Exception) -> None:
        assert self._kept
        self._tell(
            f"{self._kept.directory}: {reason(error)}; answers are remembered until this process "
            "ends, and kept where that is possible"
        )

    def _serve(self) -> None:
        finishing = False
        while True:
            while self._has_to_merge() and len(self.searched.parts) > _MANY_PARTS:
                self._go_on()
            busy = bool(self._merging) or self._untidy
            try:
                request = self.requests.get(block=not (busy or finishing))
            except Empty:
                if self._merging:
                    self._go_on()
                elif not busy:
                    return
                continue
            if request is _STOP:
                return
            if request is _FINISH:
                finishing = True
            elif request is _REFRESH:
                self._refresh()
            elif request is _TIDY:
                while self._has_to_merge():
                    self._go_on()
            elif isinstance(request, threading.Event):
                request.set()
            else:
                self._take(*cast(tuple[list[int], dict[str, int], list[int]], request))

    def _has_to_merge(self) -> bool:
        """Whether parts are being merged, which begins here if there is something to merge."""
        if self._merging is None and self._untidy:
            self._untidy = False
            self._merging = self._merge()
        return self._merging is not None

    def _go_on(self) -> None:
        """Go on with merging by one step."""
        assert self._merging is not None
        try:
            if next(self._merging, _MERGED) is not _MERGED:
                return
        except (OSError, StoreError) as error:
            self._trouble(error)
        self._merging = None

    # Answers, until they are sorted.

    def _take(self, output: list[int], earned: dict[str, int], leading: list[int]) -> None:
        most = self._max_tokens * 3 // 4  # what is left when the memory has become too full
        # What is left out would let another text begin behind the prompt.
        first = (*leading, *output[:2])
        if len(output) > most or not all(0 <= token < self.vocab_size for token in first):
            leading = []
        for text in encode_texts(output[max(0, len(output) - most) :], self.vocab_size):
            answer = Learned.now(text, earned)
            self._write_down(answer)
            self.searched.live.add(answer, leading)
            earned, leading = {}, []
        if len(self.searched.live) >= self._live_tokens:
            self._sort()

    def _write_down(self, answer: Learned) -> None:
        if not self._kept:
            return
        try:
            try:
                self._kept.append(answer)
            except JournalMovedError:
                self._forget_lost_journals()
                self._kept.append(answer)
        except (OSError, JournalMovedError) as error:
            self._trouble(error)

    def _adopt(self) -> None:
        """Take over the answers of processes that are gone."""
        if not self._kept:
            return
        try:
            for answers in self._kept.adopt(self._tell):
                for answer in answers:
                    self.searched.live.add(answer)
                if len(self.searched.live) >= self._live_tokens:
                    self._sort()
        except OSError as error:
            self._trouble(error)

    def _sort(self) -> None:
        """Make a sorted part of the newest answers."""
        part = Part.of(self.searched.live.answers)
        if self._kept:
            self._journals[part], self._kept.journals = self._kept.journals, []
        with self._changing:
            older = self.searched.parts
            self.searched = _State.of(Live(), (part, *older))
        hashes = np.sort(part.records["hash"])
        for other in older:
            other.supersede(hashes)
        self._untidy = True

    def _forget_lost_journals(self) -> None:
        """Take anew, from what is still there, what was in a journal that another process moved.

        It has moved it to forget some of its answers, and has written the others to a part.
        """
        assert self._kept
        if remaining := _if_some_are_lost(self._kept.journals):
            self._kept.journals = remaining.journals
            with self._changing:
                self.searched = _State.of(Live(remaining.answers), self.searched.parts)
        for part, journals in [*self._journals.items()]:
            if remaining := _if_some_are_lost(journals):
                del self._journals[part]
                new = Part.of(distinct(remaining.answers))
                self._journals[new] = remaining.journals
                with self._changing:
                    live, parts, _ = self.searched
                    parts = tuple(new if old is part else old for old in parts)
                    self.searched = _State.of(live, parts)

    # Parts.

    def _files(self) -> tuple[Part, ...]:
        """The parts that are in files."""
        try:
            return tuple(self._kept.parts(self._tell)) if self._kept else ()
        except OSError as error:
            self._trouble(error)
            return ()

    def _refresh(self) -> None:
        """See what other processes have done, unless this one keeps them from doing anything."""
        if self.is_outdated() and self._merging is None:
            self._read_directory()
            self._untidy = self._untidy or bool(self._journals)

    def _read_directory(self) -> None:
        """Search what is in the directory now."""
        self._forget_lost_journals()
        files = self._files()
        with self._changing:
            live, parts, _ = self.searched
            own = tuple(part for part in parts if not isinstance(part, FilePart))
            self.searched = _State.of(live, own + files)

    def _merge(self) -> Generator[None, None, None]:
        """Merge the smallest parts as far as need be; all of them where some texts must go."""
        if self._kept:
            with self._kept.merging() as alone:
                if alone:  # otherwise another process does
                    yield from self._merge_files(self._kept)
        else:
            chosen, left_out = self._choice(())
            if chosen:
                merged = yield from _merged(chosen, left_out)
                self._replace(chosen, (yield from merged.in_memory()))

    def _merge_files(self, kept: KeptTexts) -> Generator[None, None, None]:
        """Merge parts in files, and those that are not in a file yet into one."""
        self._read_directory()
        kept.tidy_up()
        yield from kept.set_aside_damaged(self._tell)
        verified: set[Part] = set()
        while True:
            chosen, left_out = self._choice(self._journals)
            files = [part for part in chosen if isinstance(part, FilePart)]
            for part in files:
                if part not in verified:
                    verified.add(part)
                    if not (yield from kept.verify(part, self._tell)):
                        self._leave_out(part)
                        break
            else:
                break
        if not chosen:
            return
        merged = yield from _merged(chosen, left_out)
        journals = [journal for part in chosen for journal in self._journals.get(part, ())]
        written = yield from kept.write(merged, files, [journal.name for journal in journals])
        self._replace(chosen, written)
        for journal in journals:
            journal.close()
        for old in chosen:
            self._journals.pop(old, None)

    def _choice(self, wanted: Iterable[Part]) -> tuple[list[Part], list[np.ndarray]]:
        """Which parts become one, the smallest first, and which of their texts are left out.

        Parts of this process alone stay in the order of their age, in which those that were merged
        before grow. So they tell of texts of one second, too, which of them is older.

        Args:
            wanted: parts that must be among them.
        """
        parts = [*self.searched.parts]
        if self._kept:
            parts.sort(key=len)
        if sum(map(len, parts)) > self._max_tokens - self._live_tokens:
            return parts, surplus(parts, self._max_tokens * 3 // 4)
        first = [part for part in parts if part in wanted]
        chosen = first + [part for part in parts if part not in wanted]
        chosen = chosen[: too_many([*map(len, chosen)], len(first))]
        return chosen, [np.zeros(len(part.records), bool) for part in chosen]

    def _replace(self, old: list[Part], new: Part) -> None:
        """Search one part instead of some others."""
        with self._changing:
            live, parts, _ = self.searched
            remaining = [part for part in parts if part not in old]
            # It stands where the newest of them was; those before it were made meanwhile.
            place = min((parts.index(part) for part in old if part in parts), default=0)
            self.searched = _State.of(live, (*remaining[:place], new, *remaining[place:]))
        for part in remaining[:place]:
            new.supersede(np.sort(part.records["hash"]))


class _Remaining(NamedTuple):
    """Journals that are still at their place, and the answers in them."""

    journals: list[Journal]
    answers: list[Learned]


def _if_some_are_lost(journals: list[Journal]) -> _Remaining | None:
    """What remains of journals of which some were moved; None if all are at their place."""
    if all(journal.is_at_its_place() for journal in journals):
        return None
    remaining = _Remaining([], [])
    for journal in journals:
        if journal.is_at_its_place():
            with suppress(OSError, ValueError):
                remaining.answers.extend(journal.adopt())
                remaining.journals.append(journal)
                continue
        journal.close()
    return remaining


def _merged(parts: list[Part], left_out: list[np.ndarray]) -> Generator[None, None, Merged]:
    """All of some parts, the smallest first, of which the last is merged when it is written."""
    if len(parts) == 1:
        return Merged(parts[0], NOTHING, (left_out[0], np.zeros(0, bool)))
    result, result_out = parts[0], left_out[0]
    for number, (part, out) in enumerate(zip(parts[1:], left_out[1:], strict=True), 2):
        if part.newest > result.newest:
            merged = Merged(result, part, (result_out, out))
        else:
            merged = Merged(part, result, (out, result_out))
        if number < len(parts):
            result = yield from merged.in_memory()
            result_out = np.zeros(len(result.records), bool)
    return merged


def too_many(sizes: Sequence[int], wanted: int) -> int:
    """How many of some parts become one; 0 where all are as they should be.

    Args:
        sizes: the parts'.
        wanted: how many of the first must be among them.
    """
    number, total = 0, 0
    for size in sizes:
        if number >= max(1, wanted) and size >= RATIO * total:
            break
        number, total = number + 1, total + size
    return number if number > 1 else wanted


def surplus(parts: Sequence[Part], most: int) -> list[np.ndarray]:
    """Which texts are left out so that no more than ``most`` tokens remain.

    Those go that were used on the longest past day; of one day those learned first, of one second
    those of the last part.

    Returns:
        for each part (texts,) of bool.
    """
    # Behind each other from the oldest to the newest, as the texts of a part are.
    ordered = parts[::-1]
    used = np.concatenate([part.used for part in ordered])
    learned = np.concatenate([part.records["learned"] for part in ordered])
    lengths = np.concatenate([part.lengths for part in ordered])
    newest_first = np.lexsort((learned, used))[::-1]
    lengths[used == SUPERSEDED] = 0
    out = np.empty(len(used), bool)
    out[newest_first] = np.cumsum(lengths[newest_first]) > most
    borders = np.cumsum([len(part.records) for part in ordered])[:-1]
    return np.split(out, borders)[::-1]
