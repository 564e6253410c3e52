"""A trained head's state for one sequence: its own caches, and rows that it has yet to see."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..models.heads import Head
from ..models.heads.blocks import DFlash
from .caches import cut, first_positions, for_steps, held_arrays
from .hidden import HiddenStates

_MOST_UNSEEN = 64  # rows of steps that wait to be seen by a head
_MOST_HELD = 512  # rows of the forwards that these belong to


class _UnseenRows(NamedTuple):
    """Rows of a forward that a head has yet to see.

    Attributes:
        tokens: the tokens of all rows of the sequence, (rows,).
        states: the arrays of hidden states that the head reads. Each has all rows of the forward,
            (rows, width).
        first: the index of the sequence's first row in the forward.
        accepted: the indices of the sequence's accepted rows.
        held: the number of rows of the forward, whose states all stay in memory.
    """

    tokens: mx.array
    states: Sequence[mx.array]
    first: int
    accepted: Sequence[int]
    held: int = 1

    def taken(self, array: mx.array, first: int = 0) -> mx.array:
        """The accepted rows of an array in which the sequence's rows begin at ``first``."""
        rows, start = self.accepted, first + self.accepted[0]
        if rows[-1] - rows[0] == len(rows) - 1:
            return array[start : start + len(rows)]
        return array[mx.array([first + row for row in rows])]


class HeadCache:
    """A head's state for one sequence: its own caches, and rows that it has yet to see.

    It follows the target's caches: the rows of each forward are noted, and those that are committed
    are kept. The head sees a prompt's rows immediately, and the rows of steps when it next drafts.
    If it does not draft for a long time, it never sees the oldest of these.

    An entry of the caches depends on the token after its position. So a cut also drops the entry of
    the last remaining position. If an entry is missing, the head just attends to one position less:
    later entries move up.

    Args:
        head: the head, attached to its target.
        hidden: the states of the target's forwards.
        length: the number of positions that the head will never see, such as those that were
            read from a prompt cache file.

    Attributes:
        caches: one per layer of the head.
    """

    def __init__(self, head: Head, hidden: HiddenStates, length: int) -> None:
        self._head, self._hidden = head, hidden
        self.caches = [for_steps(cache) for cache in head.make_cache()]
        self._positions: list[int] = []  # of the caches' entries
        self._seen = length  # the head has seen the rows before this one, or never will
        self._unseen: list[_UnseenRows] = []  # the rows from there on
        self._noted: _UnseenRows | None = None

    @property
    def length(self) -> int:
        """The number of positions up to the last accepted row."""
        return self._seen + sum(len(rows.accepted) for rows in self._unseen)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that the state holds."""
        rows_held = [*self._unseen, self._noted] if self._noted else self._unseen
        unseen = (array for rows in rows_held for array in (rows.tokens, *rows.states))
        return [*held_arrays(self.caches), *unseen]

    @property
    def behind(self) -> int:
        """The number of rows that the head has yet to see."""
        return self.length - self._seen

    def waiting_bytes(self, rows: int) -> int:
        """The most bytes that rows waiting for the head can take, if a step has ``rows`` rows."""
        embedded = self._head.embed(mx.array([0]))
        states = max(1, len(self._head.reads)) * embedded.nbytes
        return (_MOST_HELD + rows) * (states + mx.int32.size)

    def is_ready(self, length: int) -> bool:
        """Whether the head can draft after ``length`` positions: it needs the last one's states."""
        return bool(self._unseen) and self.length == length

    def note(self, tokens: mx.array, first: int = 0) -> None:
        """Note rows of the target's last forward.

        Args:
            tokens: the rows' tokens, (rows,).
            first: the index of the first of these rows in the forward.
        """
        states = self._hidden.of_layers if self._head.reads else [self._hidden.final]
        self._noted = _UnseenRows(tokens, states, first, (), len(states[0]))

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep the noted rows with these indices; the first has the position ``start``."""
        assert self._noted
        noted, self._noted = self._noted, None
        if self.length != start:
            self.cut(start)
            if self.length < start:
                self._seen, self._unseen = start, []
        held = sum([rows.held for rows in self._unseen])
        while start - self._seen > _MOST_UNSEEN or held > _MOST_HELD:
            held -= self._unseen[0].held
            self._seen += len(self._unseen.pop(0).accepted)
        self._unseen.append(noted._replace(accepted=rows))

    def see(self) -> None:
        """Append the entries of all rows but the last, whose next token is unknown."""
        tokens, features = self._tokens_and_features()
        if len(tokens) == 1:
            return
        self.append(tokens[1:], features[:-1])
        last = self._unseen[-1]
        last_row = last._replace(accepted=last.accepted[-1:])
        states = [mx.contiguous(last_row.taken(array, last_row.first)) for array in last_row.states]
        self.has_seen([_UnseenRows(tokens[-1:], states, 0, (0,))])

    def append(self, tokens: mx.array, features: mx.array) -> None:
        """Append the entries of rows to the caches.

        Args:
            tokens: the token after each row, (rows,).
            features: the rows' features, (rows, width).
        """
        if isinstance(self._head, DFlash):
            self._head.see([features[None]], [self.caches])
        elif self.caches:
            self._head(tokens[None], features[None], self.caches)

    def to_see(self, last: int) -> tuple[mx.array, mx.array]:
        """The rows that the head must see to draft after ``last``.

        Args:
            last: the current token.

        Returns:
            the token after each row, (rows,), and the rows' features, (rows, width).
        """
        tokens, features = self._tokens_and_features()
        if not self.caches:  # the head attends to the target's keys
            tokens, features = tokens[-1:], features[-1:]
        return mx.concatenate([tokens[1:], mx.array([last], tokens.dtype)]), features

    def _tokens_and_features(self) -> tuple[mx.array, mx.array]:
        """The tokens, (rows,), and the features, (rows, width), of all rows that the head has yet
        to see.
        """
        tokens = [rows.taken(rows.tokens) for rows in self._unseen]
        states = [
            mx.concatenate([rows.taken(rows.states[n], rows.first) for rows in self._unseen])
            for n in range(len(self._unseen[0].states))
        ]
        return mx.concatenate(tokens), self._head.features(states)

    def has_seen(self, left: Sequence[_UnseenRows] = ()) -> None:
        """Record that the head has seen all rows except ``left``; drop the entries of its draft."""
        seen = self.length - sum(len(rows.accepted) for rows in left)
        if self.caches:
            self._positions += range(self._seen, seen)
        self._seen, self._unseen = seen, [*left]
        cut(self.caches, len(self._positions))

    def cut(self, length: int) -> None:
        """Drop everything after the first ``length`` positions."""
        left, kept = length - self._seen, []
        for rows in self._unseen:
            if left > 0:
                kept.append(rows._replace(accepted=rows.accepted[:left]))
            left -= len(rows.accepted)
        self._seen, self._unseen = min(self._seen, length), kept
        entries = self._entries(length)
        del self._positions[entries:]
        cut(self.caches, entries)

    def _entries(self, length: int) -> int:
        """The number of entries that stay after a cut to ``length`` positions."""
        return bisect_left(self._positions, min(length - 1, self._seen))

    def copied(self, length: int) -> HeadCache:
        """A copy of the state for the first ``length`` positions."""
        other, entries = HeadCache(self._head, self._hidden, self._seen), self._entries(length)
        if entries:
            copies = [first_positions(cache, entries, room=0) for cache in self.caches]
            other.caches = [for_steps(cache) for cache in copies]
        other._positions = self._positions[:entries]
        other._unseen = [*self._unseen]
        other.cut(length)
        mx.eval(other.arrays)
        return other
