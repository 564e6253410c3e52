"""The memory of earlier answers, which all generations of a process draft from."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple, cast

import numpy as np

from ..draft.suffix_array import TOKEN_BITS, encode_texts
from ..draft.suffix_index import Excerpts
from .excerpts import DEPTH, DamagedTexts, Source, excerpts
from .live import Live
from .part import NOTHING, SUPERSEDED, Learned, Merged, Part

MAX_TOKENS = 1 << 20
"""Tokens that a memory holds unless it is told otherwise: 9 MB, and 1 MB of what is newest."""

LIVE_TOKENS = 16_384
"""Tokens of the newest answers, beyond which they are sorted."""

RATIO = 8
"""A part is merged into the next older one unless that is this many times as large."""

_MANY_PARTS = 8  # beyond which answers wait for merging, too
_VOCABULARY = (1 << TOKEN_BITS) - 1
_EXIT_SECONDS = 5.0  # to wait at the process's end

OnTrouble = Callable[[str], None]
"""Called with one line about what could not be done. The memory goes on without it."""


class _Searched(NamedTuple):
    """All that is searched at one time, the newest first."""

    live: Live
    parts: tuple[Part, ...]


class Memory:
    """Earlier answers, in which the end of a context is looked up.

    New answers go to a part that grows, and from there to sorted ones, which are merged so that
    there are few: a log-structured merge tree (O'Neil et al., 1996) of suffix arrays. A thread of
    the memory's own does that. Look-ups wait for nothing and may be made in any thread; so may
    additions, also by a finaliser that interrupts a method of the memory.

    Of equal answers one is kept, as the newest. When the memory is full, the answers go that were
    neither learned nor drafted from with success for the longest time.

    Args:
        max_tokens: how much is remembered. 0 remembers nothing.
        on_trouble: see :data:`OnTrouble`.
    """

    def __init__(
        self, max_tokens: int = MAX_TOKENS, *, on_trouble: OnTrouble = lambda line: None
    ) -> None:
        self._shelf = _Shelf(max_tokens, on_trouble)
        self._thread = threading.Thread(target=self._shelf.run, name="mlxspec memory", daemon=True)
        self._thread.start()
        _open.add(self)
        weakref.finalize(self, self._shelf.requests.put, _STOP).atexit = False

    def look_up(self, tail: Sequence[int], limit: int = 8, depth: int = DEPTH) -> Excerpts:
        """Find what followed where a context's end occurs.

        Args:
            tail: the context's last tokens, of which 64 are compared.
            limit: how many excerpts to return at most.
            depth: how many tokens an excerpt has at most.
        """
        while True:
            live, parts = self._shelf.searched
            try:
                everything = (live.searched, *(part.searched for part in parts))
                return excerpts(everything, tail, limit, depth)
            except DamagedTexts as damaged:
                self._shelf.drop(damaged.texts)

    def add(self, output: Sequence[int], earned: Mapping[str, int] | None = None) -> None:
        """Remember an answer, soon. This waits for nothing, wherever it is called.

        Args:
            output: its tokens. Of one that is too long the end is remembered.
            earned: what its generation earned, by the names of :data:`EARNED`.
        """
        self._shelf.requests.put((list(output), dict(earned or {})))

    def used(self, source: Source) -> None:
        """Take note that a drafted token of an excerpt was accepted.

        Args:
            source: the excerpt's. If its text has moved since it was looked up, nothing happens.
        """
        if isinstance(source.texts, Part):
            source.texts.use(source.position)

    def settle(self, *, tidy: bool = False) -> None:
        """Wait until all that was added can be looked up.

        Args:
            tidy: wait for all merging, too. What is found then depends on nothing but what was
                added, and no more than ``max_tokens`` are held.
        """
        done = threading.Event()
        if tidy:
            self._shelf.requests.put(_TIDY)
        self._shelf.requests.put(done)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def close(self) -> None:
        """Wait until all that was added is in its place; nothing is remembered from then on."""
        self._shelf.requests.put(_FINISH)
        self._thread.join()


_STOP, _FINISH, _TIDY, _MERGED = object(), object(), object(), object()

_open: weakref.WeakSet[Memory] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Let what was added last be handed over before the process ends."""
    for memory in [*_open]:
        memory._shelf.requests.put(_STOP)
        memory._thread.join(_EXIT_SECONDS)


class _Shelf:
    """What a memory holds, and the work of its thread."""

    def __init__(self, max_tokens: int, on_trouble: OnTrouble) -> None:
        self._max_tokens = max_tokens
        self._on_trouble = on_trouble
        self._live_tokens = max(1, min(LIVE_TOKENS, max_tokens // 8))
        self._changing = threading.Lock()
        """Held for a moment while :attr:`searched` is replaced."""
        self._untidy = False
        """Whether there may be something to merge."""
        self._merging: Generator[None, None, None] | None = None
        self.searched = _Searched(Live(), ())
        self.requests: SimpleQueue[object] = SimpleQueue()

    def run(self) -> None:
        """Do what is asked for until the end, and whenever nothing is, merge parts step by step."""
        finishing = False
        while True:
            if self._has_to_merge() and len(self.searched.parts) > _MANY_PARTS:
                self._go_on()
            try:
                request = self.requests.get(block=not (self._merging or finishing))
            except Empty:
                if self._merging is None:
                    return
                self._go_on()
                continue
            if request is _STOP:
                return
            if request is _FINISH:
                finishing = True
            elif request is _TIDY:
                while self._has_to_merge():
                    self._go_on()
            elif isinstance(request, threading.Event):
                request.set()
            else:
                self._take(*cast(tuple[list[int], dict[str, int]], request))

    def drop(self, texts: object) -> None:
        """Search some texts no longer."""
        with self._changing:
            live, parts = self.searched
            remaining = tuple(part for part in parts if part is not texts)
            self.searched = _Searched(Live() if live is texts else live, remaining)

    def _take(self, output: list[int], earned: dict[str, int]) -> None:
        most = self._max_tokens * 3 // 4  # what is left when the memory has become too full
        for text in encode_texts(output[max(0, len(output) - most) :], _VOCABULARY):
            self.searched.live.add(Learned.now(text, earned))
            earned = {}
            if len(self.searched.live) >= self._live_tokens:
                self._sort()

    def _sort(self) -> None:
        """Make a sorted part of the newest answers."""
        part = Part.of(self.searched.live.answers)
        with self._changing:
            older = self.searched.parts
            self.searched = _Searched(Live(), (part, *older))
        hashes = np.sort(part.records["hash"])
        for other in older:
            other.supersede(hashes)
        self._untidy = True

    def _has_to_merge(self) -> bool:
        """Whether parts are being merged, which begins here if there is something to merge."""
        if self._merging is None and self._untidy:
            self._untidy = False
            self._merging = self._merge()
        return self._merging is not None

    def _go_on(self) -> None:
        """Go on with merging by one step."""
        assert self._merging is not None
        if next(self._merging, _MERGED) is _MERGED:
            self._merging = None

    def _merge(self) -> Generator[None, None, None]:
        """Merge the newest parts as far as need be; all of them where some texts must go."""
        parts = self.searched.parts
        if sum(map(len, parts)) > self._max_tokens - self._live_tokens:
            chosen = parts
            left_out = surplus(parts, self._max_tokens * 3 // 4)
        else:
            chosen = parts[: _too_many(parts)]
            left_out = [np.zeros(len(part.records), bool) for part in chosen]
        if not chosen:
            return
        result, result_out = NOTHING, np.zeros(0, bool)
        for part, out in zip(chosen, left_out, strict=True):
            result = yield from Merged(part, result, (out, result_out)).in_memory()
            result_out = np.zeros(len(result.records), bool)
        with self._changing:
            live, parts = self.searched
            newer = parts[: parts.index(chosen[0])]
            self.searched = _Searched(live, (*newer, result, *parts[len(newer) + len(chosen) :]))
        for part in newer:  # made meanwhile
            result.supersede(np.sort(part.records["hash"]))


def _too_many(parts: Sequence[Part]) -> int:
    """How many of the newest parts become one; 0 where all are as they should be."""
    number, size = 0, 0
    for part in parts:
        if number and len(part) >= RATIO * size:
            break
        number, size = number + 1, size + len(part)
    return number if number > 1 else 0


def surplus(parts: Sequence[Part], most: int) -> list[np.ndarray]:
    """Which texts are left out so that no more than ``most`` tokens remain.

    Those go that were used on the longest past day; of one day those learned first.

    Returns:
        for each part (texts,) of bool.
    """
    # Behind each other from the oldest to the newest, as the texts of a part are.
    ordered = parts[::-1]
    used = np.concatenate([part.used for part in ordered])
    lengths = np.concatenate([part.lengths for part in ordered])
    newest_first = np.argsort(used, kind="stable")[::-1]
    kept_lengths = np.where(used == SUPERSEDED, 0, lengths)[newest_first]
    out = np.empty(len(used), bool)
    out[newest_first] = np.cumsum(kept_lengths) > most
    borders = np.cumsum([len(part.records) for part in ordered])[:-1]
    return np.split(out, borders)[::-1]
