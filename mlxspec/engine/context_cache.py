"""The caches of one context: which positions they hold, and how they return to fewer of them.

Knows no model: whoever runs one over :attr:`ContextCache.cache` says what was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import CacheList

from ..drafting.drafter import DraftTree
from .caches import (
    Kept,
    Snapshot,
    are_quantized,
    cached_length,
    can_be_cut,
    compact,
    cut,
    drop_unseen,
    first_positions,
    for_steps,
    held_arrays,
    is_trimmable,
    is_trimmable_anywhere,
    move_rows,
    parts,
)
from .params import CacheOptions

_AFTER_MARK = 16  # tokens of a prompt; what opens an answer in chat templates is shorter


class Checkpoint(NamedTuple):
    """A state that a target can return to.

    Attributes:
        length, pending: of the target at that time.
        state: of the caches that cannot be cut back.
    """

    length: int
    pending: tuple[int, ...]
    state: Snapshot


class ContextCache:
    """Caches that hold exactly what was accepted of a context.

    A forward is announced by :meth:`begin_forward`, writes its rows, and :meth:`commit` keeps some
    of them. Between two commits, and after an interrupt anywhere, :meth:`truncate` returns to what
    was committed.

    If it ``replays``, some state cannot be cut back. After a partial rejection it is restored to
    what it was before the step, and the accepted tokens become **pending**: they run again in front
    of the next step's rows. So a rejection costs rows, not a forward. A step that keeps all its
    rows leaves nothing pending.

    Args:
        cache: mlx-lm's caches, with what they hold.
        options: the memory of the caches.
        replays: whether forwards are undone by restoring states; otherwise all caches can be cut.
        undoable: how many of the last forwards :meth:`truncate` can undo if it replays.
        marks: how many of the last prefills :meth:`rewind` can return to, where the caches cannot
            be cut to any length. The mark is 16 tokens before a prefill's end, since the next
            turn of a conversation may differ in the tokens that open the answer.

    Attributes:
        cache, trimmable: the caches, and those parts of them that can be cut back.
        length: positions of the context that were committed, pending ones included.
        pending: accepted tokens that the caches do not hold.
        mark_at: a length at which the next prefill makes a mark, too; 0 for none.
        chunks_from: the length from which mlx-lm would have counted its chunks.
    """

    cache: list[Any]
    trimmable: list[Any]

    def __init__(
        self,
        cache: Sequence[Any],
        options: CacheOptions,
        replays: bool,
        undoable: int = 2,
        marks: int = 0,
    ) -> None:
        self.options = options
        self.pending: tuple[int, ...] = ()
        self.mark_at = 0
        self._quantizes_later = options.kv_bits is not None and not are_quantized(cache)
        self._replays = replays
        self.use(list(cache))
        self.length = cached_length(self.cache)
        self.chunks_from = self.length
        self._tree: DraftTree
        """The rows of the last forward."""
        self._unfinished = False
        """Whether a state is not that of ``length`` and ``pending``, if it replays."""
        # One plain step may be dispatched ahead, so a generation undoes two forwards at most.
        self._checkpoints: deque[Checkpoint] = deque(maxlen=undoable)
        self._marks: deque[Checkpoint] = deque(maxlen=marks)

    def use(self, caches: list[Any]) -> None:
        """Run on these caches from now on, sorted by whether they can be cut back."""
        trimmable = [cache for cache in parts(caches) if is_trimmable(cache)]
        untrimmable = [cache for cache in parts(caches) if not is_trimmable(cache)]
        self.cache, self.trimmable, self._untrimmable = caches, trimmable, untrimmable

    @property
    def arrays(self) -> list[mx.array]:
        """All that the caches hold."""
        return held_arrays(parts(self.cache))

    @property
    def kept_arrays(self) -> list[mx.array]:
        """All that the caches hold, and that is kept of them to return to."""
        states = [each.state.arrays for each in (*self._marks, *self._checkpoints)]
        return [*self.arrays, *(array for arrays in states for array in arrays)]

    @property
    def quantized(self) -> bool:
        """Whether a cache is quantised, or will be."""
        return self._quantizes_later or are_quantized(self.cache)

    def prefilled(self, tokens: int) -> None:
        """So many prompt tokens were put into the caches by a forward of several sequences."""
        self.length += tokens
        self._change_for_steps()

    def _change_for_steps(self) -> None:
        self.use([for_steps(cache) for cache in self.cache])
        compact(self.cache)
        mx.eval(self.arrays)

    def _marks_within(self, tokens: int, as_mlx_lm: bool) -> set[int]:
        """Where a prefill of so many tokens makes marks."""
        caches = parts(map(for_steps, self.cache))
        if not tokens or not self._marks.maxlen or all(map(is_trimmable_anywhere, caches)):
            return set()
        if as_mlx_lm:
            return {tokens}
        early = max(0, tokens - _AFTER_MARK)
        wanted = self.mark_at - self.length
        return {early, *([wanted] if 0 < wanted < early else [])}

    def mark(self) -> None:
        """Keep the state of the caches that cannot be cut back to this length."""
        self.use([for_steps(cache) for cache in self.cache])
        drop_unseen(self.cache)
        self._change_for_steps()
        untrimmable = [cache for cache in parts(self.cache) if not is_trimmable_anywhere(cache)]
        if self.length and untrimmable:
            self._marks.append(Checkpoint(self.length, (), Snapshot(untrimmable)))

    def begin_forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """Note what a forward will do; returns all its tokens, pending ones first, (rows,).

        The arguments are those of :meth:`mlxspec.engine.target.Target.forward`.
        """
        self._tree = tree
        if not self._replays:
            return tokens
        self._checkpoints.append(Checkpoint(self.length, self.pending, Snapshot(self._untrimmable)))
        self._unfinished = True
        if not self.pending:
            return tokens
        return mx.concatenate([mx.array(self.pending, tokens.dtype), tokens])

    def kept(self, rows: Sequence[int]) -> Kept:
        """What has to be moved in the caches if these rows of the last forward are to stay."""
        return Kept([] if self._replays else self.trimmable, self.length, rows)

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, by node index, and forget the others."""
        move_rows([self.kept(rows)])
        self.commit_moved(rows)

    def commit_moved(self, rows: Sequence[int]) -> None:
        """As :meth:`commit`, for rows that :func:`move_rows` has already moved."""
        pending: tuple[int, ...] = ()
        if len(rows) < len(self._tree):
            if self._replays:
                self._undo_forward()
                pending = (*self.pending, *(self._tree.tokens[row] for row in rows))
            else:
                cut(self.trimmable, self.length + len(rows))
        # All at once and last: at any interrupt, the length tells what is committed.
        length = self.length + len(rows)
        self.pending, self.length, self._unfinished = pending, length, False
        if self._quantizes_later:
            self._quantize_if_due()

    def truncate(self, length: int) -> None:
        """Return to the first ``length`` positions, also from a forward that was not committed.

        If it replays, ``undoable`` forwards can be undone, and the length may become shorter than
        asked for: a forward is undone with all its rows.

        Raises:
            ValueError: the state at that length has not been kept.
        """
        if self._replays:
            self._drop_pending(length)
            while self._unfinished or self.length > length:
                if not self._checkpoints:
                    raise ValueError(f"the state at {length} positions has not been kept")
                self._undo_forward()
                self._drop_pending(length)
        else:
            self.length = length
        cut(self.trimmable, self.length - len(self.pending))
        self._forget_marks_behind()

    def rewind(self, length: int) -> None:
        """Return to the first ``length`` positions, or to a mark before them.

        Raises:
            ValueError: no such state has been kept. The target cannot be used any more.
        """
        self._change_for_steps()  # an interrupt may have kept the prefill from doing it
        if self._is_before_quantization(length):
            raise ValueError(f"the cache was quantised, and is not at {length} positions")
        try:
            if any(
                length < cache.offset and not can_be_cut(cache, length) for cache in self.trimmable
            ):
                raise ValueError(f"what is seen from {length} positions on has been dropped")
            self.truncate(length)
        except ValueError:
            self.length = length
            self._forget_marks_behind()
            if not self._marks:
                raise
            self._checkpoints.clear()
            self._return_to(self._marks[-1])

    def reach(self, length: int) -> int:
        """The most positions up to ``length`` that :meth:`copied` takes; 0 for none.

        This and :meth:`copied` may be called between any two steps of a generation, and between
        two chunks of its prompt.
        """
        length = min(length, self.length - len(self.pending))
        if self._is_before_quantization(length):
            return 0
        if all(can_be_cut(cache, length) for cache in parts(self.cache)):
            return length
        return max((mark.length for mark in self._marks if mark.length <= length), default=0)

    def copied(self, length: int, room: int) -> list[Any]:
        """mlx-lm's caches with a copy of the first positions.

        Args:
            length: of :meth:`reach`, not 0, or all that the caches hold between two generations.
            room: as for :func:`mlxspec.engine.caches.first_positions`.
        """
        held = (self._content_at(length, cache) for cache in self.cache)
        copies = [first_positions(cache, length, room) for cache in held]
        mx.eval(held_arrays(parts(copies)))
        return copies

    def _content_at(self, length: int, cache: Any) -> Any:
        """A cache that ends at a length or can be cut to it."""
        if isinstance(cache, CacheList):
            return CacheList(*(self._content_at(length, part) for part in cache.caches))
        marks = [mark for mark in self._marks if mark.length == length]
        return (
            marks[-1].state.content_of(cache) if marks and not can_be_cut(cache, length) else cache
        )

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """A context in which the target can be used; at its end the target is as it was before."""
        attributes = {
            **vars(self),
            "_checkpoints": self._checkpoints.copy(),
            "_marks": self._marks.copy(),
        }
        held = Snapshot(parts(self.cache))
        try:
            yield
        finally:
            vars(self).update(attributes)
            held.restore()

    def _drop_pending(self, length: int) -> None:
        """Drop pending tokens, as many as lie after a length."""
        if not self._unfinished and self.pending:
            dropped = min(max(0, self.length - length), len(self.pending))
            left, length = self.pending[: len(self.pending) - dropped], self.length - dropped
            self.pending, self.length = left, length

    def _forget_marks_behind(self) -> None:
        """Forget the marks in what was cut off: other tokens will take its place."""
        while self._marks and self._marks[-1].length > self.length:
            self._marks.pop()

    def _undo_forward(self) -> None:
        """Return to the state before the last forward."""
        self._return_to(self._checkpoints[-1])
        self._checkpoints.pop()

    def _return_to(self, checkpoint: Checkpoint) -> None:
        self._unfinished = True
        checkpoint.state.restore()
        cut(self.trimmable, checkpoint.length - len(checkpoint.pending))
        self.length, self.pending, self._unfinished = checkpoint.length, checkpoint.pending, False

    def _quantize_if_due(self) -> None:
        """Quantise the cache where mlx-lm does: after the first step that reaches the start."""
        options = self.options
        if self._quantizes_later and self.length >= options.quantized_kv_start:
            quantized = self.cache.copy()
            maybe_quantize_kv_cache(quantized, 0, options.kv_group_size, options.kv_bits)
            self.use(quantized)
            self._quantizes_later = False

    def _is_before_quantization(self, length: int) -> bool:
        """Whether caches that are quantised by now were not at that length."""
        quantized = self.options.kv_bits is not None and not self._quantizes_later
        return quantized and length < min(self.options.quantized_kv_start, self.length)
