"""The target: runs a model over the rows of drafts and the chunks of prompts, and manages its
caches.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from ..drafting.tree import DraftTree
from ..errors import OptionError
from .caches import (
    Snapshot,
    TreeRows,
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
    masked_for,
    move_rows,
    parts,
)
from .head_cache import HeadCache
from .params import CacheOptions
from .patches import Tape, forward_at, install

if TYPE_CHECKING:
    from .loaded_model import LoadedModel

UNDOABLE = 2
"""The most forwards that a generation may have to undo: a step's, and one dispatched ahead of time.
For each, a snapshot of the states that cannot be cut is kept.
"""

_AFTER_MARK = 16  # tokens after a mark: more than open an answer in any chat template


class Capability(enum.StrEnum):
    """Which drafts a target can verify; the greatest capability comes first."""

    TREE = "tree"
    """Branching drafts: all caches are KV caches, and only RoPE modules use positions."""

    CHAIN = "chain"
    """Chains: every cache can be trimmed."""

    REPLAY = "replay"
    """Chains: some state cannot be trimmed (state-space layers, linear attention, short
    convolutions). After a rejection, it is computed again for the accepted rows.
    """

    PLAIN = "plain"
    """No drafts: several rows in one forward give different logits than in separate forwards."""


Progress = Callable[[int, int], None]
"""Called with the number of prompt tokens processed so far, and the total."""


def evaluate_constants(model: nn.Module) -> None:
    """Evaluate constants that a model computed when it was created, such as RoPE's frequencies.

    Loading evaluates only parameters, and only the thread that made a lazy array can evaluate it.
    """
    constants = [
        value
        for module in model.modules()
        for name, value in module.items()
        if name.startswith("_") and isinstance(value, mx.array)
    ]
    mx.eval(constants)


class Target:
    """Runs a model over rows that follow the context in its caches.

    After a commit, the caches hold exactly the accepted tokens. :meth:`forward` writes a draft's
    rows into them, and :meth:`commit` keeps some of these. Between two commits, and after an
    interrupt anywhere, :meth:`truncate` returns to the last commit.

    With the capability ``REPLAY`` or ``PLAIN``, some state may be impossible to trim. If only
    some of a step's rows are accepted, their state is then computed from the forward's tape.
    Without a tape, the state before the step is restored, and the accepted tokens run again.

    Args:
        capability: which drafts the model can verify, from :mod:`mlxspec.engine.capability`.
        options: the limits on the caches.
        cache: mlx-lm's caches to continue; by default new ones. They are converted at the end of
            the prefill or by :meth:`begin_at`.
        marks: the number of prefills that :meth:`rewind` can return to, counted from the last one,
            if the caches cannot be cut to any length. It returns to 16 tokens before a prefill's
            end, since the next prompt of a conversation may lack the tokens that open the answer.
        undoable: the number of forwards that :meth:`truncate` can undo if states cannot be cut.

    Attributes:
        model: the mlx-lm model.
        cache, trimmable: the caches, and those parts of them that can be trimmed.
        length: the number of committed positions.
        mark_at: a further length that :meth:`rewind` can return to once the next prefill passes it;
            0 for none.
        chunks_from: the length at which mlx-lm's first chunk would begin.
        tape: the last forward's tape; None if its calls were not recorded.
        head: the state of the model's trained head, which follows the caches; None without a head.
    """

    cache: list[Any]
    trimmable: list[Any]
    head: HeadCache | None = None

    def __init__(
        self,
        loaded: LoadedModel,
        capability: Capability,
        options: CacheOptions | None = None,
        cache: Sequence[Any] | None = None,
        marks: int = 0,
        undoable: int = UNDOABLE,
    ) -> None:
        self.loaded, self.model = loaded, loaded.model
        self.capability = capability
        self.options = options or CacheOptions()
        if cache is None:
            cache = make_prompt_cache(self.model, self.options.max_kv_size)
        self.mark_at = 0
        self._quantizes_later = self.options.kv_bits is not None and not are_quantized(cache)
        self._replays = capability in (Capability.REPLAY, Capability.PLAIN)
        if capability is Capability.REPLAY:
            install(self.model)
        self.use(list(cache))
        self.length = self.chunks_from = cached_length(self.cache)
        self._tree: DraftTree
        """The rows of the last forward."""
        self.tape: Tape | None = None
        self._unfinished = False
        """With REPLAY: whether some state is not the one after ``length`` positions."""
        self._checkpoints: deque[Snapshot] = deque(maxlen=undoable)
        self._marks: deque[Snapshot] = deque(maxlen=marks)
        if loaded.trained_head:
            self.head = loaded.trained_head.new_cache(self.length)

    def use(self, caches: list[Any]) -> None:
        """Use these caches from now on; sort them by whether they can be trimmed."""
        trimmable = [cache for cache in parts(caches) if is_trimmable(cache)]
        untrimmable = [cache for cache in parts(caches) if not is_trimmable(cache)]
        self.cache, self.trimmable, self._untrimmable = caches, trimmable, untrimmable

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that the caches hold, including the head's."""
        return [*held_arrays(parts(self.cache)), *(self.head.arrays if self.head else ())]

    @property
    def all_arrays(self) -> list[mx.array]:
        """The arrays of the caches, and of the saved states that they can return to."""
        states = [each.arrays for each in (*self._marks, *self._checkpoints)]
        return [*self.arrays, *(array for arrays in states for array in arrays)]

    @property
    def quantized(self) -> bool:
        """Whether a cache is quantised, or will be."""
        return self._quantizes_later or are_quantized(self.cache)

    def begin_at(self, length: int) -> None:
        """Treat the content of the caches as a context of this length, which it is then possible
        to rewind to.
        """
        self._change_for_steps()
        self.length, self.chunks_from = length, 0
        self.mark()

    def _change_for_steps(self) -> None:
        self.use([for_steps(cache) for cache in self.cache])
        compact(self.cache)
        mx.eval(self.arrays)

    def _marks_within(self, tokens: int, as_mlx_lm: bool) -> set[int]:
        """The lengths at which a prefill of ``tokens`` tokens makes marks."""
        caches = parts(map(for_steps, self.cache))
        if not tokens or not self._marks.maxlen or all(map(is_trimmable_anywhere, caches)):
            return set()
        if as_mlx_lm:
            return {tokens}
        early = max(0, tokens - _AFTER_MARK)
        wanted = self.mark_at - self.length
        return {early, wanted} if 0 < wanted < early else {early}

    def mark(self) -> None:
        """Save the state of the caches that cannot be cut, for a later return to this length."""
        self.use([for_steps(cache) for cache in self.cache])
        drop_unseen(self.cache)
        self._change_for_steps()
        untrimmable = [cache for cache in parts(self.cache) if not is_trimmable_anywhere(cache)]
        if self.length and untrimmable:
            self._marks.append(Snapshot(untrimmable, self.length))

    def begin_forward(self, tree: DraftTree) -> None:
        """Begin a forward over the rows of a tree."""
        self._tree, self.tape = tree, None
        if self._replays:
            self._checkpoints.append(Snapshot(self._untrimmable, self.length))
            self._unfinished = True

    def to_move(self, rows: Sequence[int]) -> tuple[list[Any], int, Sequence[int]]:
        """This target's item in the argument of :func:`move_rows`, if these rows stay."""
        return [] if self._replays else self.trimmable, self.length, rows

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, by node index, and forget the others."""
        move_rows([self.to_move(rows)])
        self.commit_moved(rows)

    def commit_moved(self, rows: Sequence[int]) -> None:
        """Like :meth:`commit`, for rows that :func:`move_rows` has already moved."""
        length = self.length + len(rows)
        if len(rows) < len(self._tree):
            if self._replays and not self._recompute_states(len(rows)):
                self._return_to(self._checkpoints[-1])
                self._unfinished = True
                self._run_again([self._tree.tokens[row] for row in rows])
            else:
                cut(self.trimmable, length)
        if self.head:
            self.head.keep(self.length, rows)
        # Set last and together, so that after any interrupt the length is that of a commit.
        self.length, self._unfinished, self.tape = length, False, None
        if self._quantizes_later:
            self._quantize_if_due()

    def _run_again(self, tokens: Sequence[int]) -> None:
        """Run accepted tokens through the model again, once the earlier states are restored."""
        self.model(mx.array(list(tokens))[None], cache=self.cache)
        mx.async_eval(held_arrays(parts(self.cache)))

    def _recompute_states(self, rows: int) -> bool:
        """Compute the states after the first rows of the last forward, if its tape allows it.

        Returns:
            whether the tape allows it. If it does not, nothing is changed.
        """
        states = self.tape.states_after(rows, self._untrimmable) if self.tape else None
        if states is None:
            return False
        for cache, arrays in zip(self._untrimmable, states, strict=True):
            cache.cache = arrays
        # Otherwise they would be lazy until the next step, which may run in a thread that cannot
        # evaluate them.
        mx.async_eval(states)
        return True

    def truncate(self, length: int) -> None:
        """Return to the first ``length`` positions, even from a forward that was not committed.

        With REPLAY, only ``undoable`` forwards can be undone, each with all its rows. So the result
        may be shorter than requested.

        Raises:
            ValueError: no state was kept at or before that length.
        """
        self.tape = None
        if self._replays:
            while self._unfinished or self.length > length:
                if not self._checkpoints:
                    raise ValueError(f"no state was kept at {length} positions")
                self._return_to(self._checkpoints[-1])
                self._checkpoints.pop()
        else:
            self.length = length
        cut(self.trimmable, self.length)
        if self.head:
            self.head.cut(self.length)
        self._forget_marks_behind()

    def rewind(self, length: int) -> None:
        """Return to the first ``length`` positions, or to a mark before their end.

        Raises:
            ValueError: no such state was kept. The target cannot be used any more.
        """
        self._change_for_steps()  # an interrupted prefill has not done this
        if self._is_before_quantization(length):
            raise ValueError(f"the cache was quantised after {length} positions")
        try:
            if any(
                length < cache.offset and not can_be_cut(cache, length) for cache in self.trimmable
            ):
                raise ValueError(
                    f"the cache no longer has all it needs to go back to {length} positions"
                )
            self.truncate(length)
        except ValueError:
            self.length = length
            self._forget_marks_behind()
            if not self._marks:
                raise
            self._checkpoints.clear()
            self._return_to(self._marks[-1])
            if self.head:
                self.head.cut(self.length)

    def reusable_prefix(self, length: int) -> int:
        """The most positions, up to ``length``, that :meth:`copied` can copy; 0 if it cannot copy.

        Both may be called between any two steps of a generation, and between any two chunks of its
        prompt.
        """
        length = min(length, self.length)
        if self._is_before_quantization(length):
            return 0
        if all(can_be_cut(cache, length) for cache in parts(self.cache)):
            return length
        return max((mark.length for mark in self._marks if mark.length <= length), default=0)

    def copied(self, length: int, room: int) -> list[Any]:
        """Copy the first positions into new caches of mlx-lm's classes.

        Args:
            length: from :meth:`reusable_prefix`, not 0. Between generations, it may also be the
                whole length.
            room: as for :func:`mlxspec.engine.caches.first_positions`.
        """
        held = (self._content_at(length, cache) for cache in self.cache)
        copies = [first_positions(cache, length, room) for cache in held]
        mx.eval(held_arrays(parts(copies)))
        return copies

    def fork(self, length: int, room: int) -> Target:
        """A target that begins with a copy of the first positions.

        The arguments are those of :meth:`copied`.
        """
        cache, marks = self.copied(length, room), self._marks.maxlen or 0
        forked = type(self)(self.loaded, self.capability, self.options, cache, marks)
        forked.begin_at(length)
        if self.head:
            forked.head = self.head.copied(length)
        return forked

    def _content_at(self, length: int, cache: Any) -> Any:
        """The cache, or a copy with its content at a mark, that can be cut to ``length``."""
        if isinstance(cache, CacheList):
            return CacheList(*(self._content_at(length, part) for part in cache.caches))
        marks = [mark for mark in self._marks if mark.length == length]
        return marks[-1].content_of(cache) if marks and not can_be_cut(cache, length) else cache

    def _forget_marks_behind(self) -> None:
        """Forget marks beyond the current length, since other tokens will follow from there."""
        while self._marks and self._marks[-1].length > self.length:
            self._marks.pop()

    def _return_to(self, checkpoint: Snapshot) -> None:
        self._unfinished = True
        checkpoint.restore()
        cut(self.trimmable, checkpoint.length)
        self.length, self._unfinished = checkpoint.length, False

    def _quantize_if_due(self) -> None:
        """Quantise the cache when mlx-lm would: once it reaches ``quantized_kv_start``."""
        options = self.options
        if self._quantizes_later and self.length >= options.quantized_kv_start:
            quantized = self.cache.copy()
            maybe_quantize_kv_cache(quantized, 0, options.kv_group_size, options.kv_bits)
            self.use(quantized)
            self._quantizes_later = False
            mx.async_eval(held_arrays(parts(quantized)))  # the next step may run in another thread

    def _is_before_quantization(self, length: int) -> bool:
        """Whether the caches are quantised now, but were not yet at that length."""
        quantized = self.options.kv_bits is not None and not self._quantizes_later
        return quantized and length < min(self.options.quantized_kv_start, self.length)

    # --- forwards ---

    @property
    def max_depth(self) -> int:
        """The greatest depth that the next draft may have."""
        if self.capability is Capability.PLAIN:
            return 0
        if self._quantizes_later:
            # mlx-lm quantises the cache between two tokens, so a draft must end before that point.
            return max(0, self.options.quantized_kv_start - 2 - self.length)
        return sys.maxsize

    def takes_as_rows(self, tokens: int) -> bool:
        """Whether a prompt of ``tokens`` tokens may run as the rows of a step, all accepted."""
        return (
            tokens <= min(self.max_depth, self.options.prefill_step_size)
            and not self._marks_within(tokens, False)
            and self.head is None
        )

    def prefill(self, tokens: Sequence[int]) -> None:
        """Put prompt tokens into the caches, in chunks of ``options.prefill_step_size``."""
        for _ in self.prefill_in_chunks(tokens):
            pass

    def prefill_in_chunks(
        self,
        tokens: Sequence[int],
        chunk: Callable[[], int] | None = None,
        as_mlx_lm: bool = False,
    ) -> Generator[int, None, None]:
        """Put prompt tokens into the caches, one chunk per iteration.

        The first prefill runs on mlx-lm's own caches. At its end, or when the generator is closed,
        they are converted to caches that can be cut. Whatever the chunks, the caches are quantised
        after the same number of tokens as in mlx-lm.

        Args:
            tokens: the prompt's tokens.
            chunk: returns the size of the next chunk, if it should be less than
                ``options.prefill_step_size``.
            as_mlx_lm: whether to run the same chunks as mlx-lm, because other chunks would change
                the result. ``chunk`` is then not called, and the only mark is at the end.

        Yields:
            the number of tokens processed so far: before each chunk, and at the end.
        """
        places = self._marks_within(len(tokens), as_mlx_lm)
        step, start = self.options.prefill_step_size, 0
        due = self.length + len(tokens) >= self.options.quantized_kv_start
        aligned = self._quantizes_later and due
        try:
            while start < len(tokens):
                if start in places:  # before yielding: whoever iterates may look for the mark
                    self.mark()
                yield start
                size = step - (self.length - self.chunks_from) % step if aligned else step
                if chunk and not as_mlx_lm:
                    size = min(size, chunk())
                following = (place for place in places if place > start)
                end = min(start + size, len(tokens), *following)
                self._prefill_chunk(tokens[start:end], end == len(tokens))
                start = end
            if not tokens and self.length > self.chunks_from:
                self._quantize_if_due()  # a copied prefix covered the whole prompt
            if start in places:
                self.mark()
        finally:
            self._change_for_steps()
        yield start

    def _prefill_chunk(self, tokens: Sequence[int], ends: bool = True) -> None:
        """Run the next tokens of a prompt.

        Args:
            ends: whether they are the last ones.
        """
        before, length = Snapshot(self._untrimmable), self.length + len(tokens)
        rows = mx.array(list(tokens))
        try:
            self.model(rows[None], cache=self.cache)
            if self.head:
                self.head.note(rows)
                self.head.keep(self.length, range(len(tokens)))
                self.head.see()
            self.length = length
        except BaseException:  # such as an interrupt between two layers
            before.restore()
            raise
        if ends or (length - self.chunks_from) % self.options.prefill_step_size == 0:
            self._quantize_if_due()
        mx.eval([cache.state for cache in self.cache], self.head.arrays if self.head else [])
        mx.clear_cache()

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """Run the rows of a tree, without waiting for the result.

        The caches then hold all rows until :meth:`commit` keeps some of them.

        Args:
            tokens: the tree's tokens, (rows,); an array, since a pipelined token is not yet known.
            tree: the tree, which has the order of the rows.

        Returns:
            lazy logits, (rows, vocabulary).
        """
        self.begin_forward(tree)
        split = self.loaded.split_from
        if len(tree) == 1:
            logits = self.model(tokens[None], cache=self.cache)
        elif tree.is_chain:
            self.tape = Tape() if self._replays else None
            logits = forward_at(self.model, tokens[None], self.cache, None, self.tape, split)
            if self.tape:
                for cache in self._untrimmable:
                    if isinstance(cache, ArraysCache):
                        self.tape.assign(cache.cache, [cache], len(tree))
        else:
            masked = TreeRows(tree)
            install(self.model)
            with masked_for(masked, self.trimmable):
                logits = forward_at(
                    self.model, tokens[None], self.cache, masked.depths, None, split
                )
        if self.head:
            self.head.note(tokens)
        return logits[0]


Result = TypeVar("Result")


def target_for(
    loaded: LoadedModel,
    capability: Capability,
    options: CacheOptions | None = None,
    cache: Sequence[Any] | None = None,
    marks: int = 0,
) -> Target:
    """A :class:`Target` of a model, on all machines that the model is split over.

    The arguments are those of :class:`Target`.

    Raises:
        OptionError: ``cache`` is given for a model that is split.
    """
    if loaded.leader and cache is not None:  # the cache would belong to the whole model
        raise OptionError(
            "a prompt cache cannot be split over several machines as the model is: leave it out, "
            "or run without mlx.launch"
        )
    make = loaded.leader.target if loaded.leader else Target
    return make(loaded, capability, options, cache, marks)


def together(function: Callable[..., Result], loaded: LoadedModel, *args: Any) -> Result:
    """Call a function that runs forwards of a model, on all machines that the model is split over.

    Args:
        function: a function of mlxspec's.
        loaded: the model, its first argument.
        args: its other arguments, as for :meth:`mlxspec.distributed.ranks.Leader.repeating`.
    """
    leader = loaded.leader
    return leader.run(function, loaded, *args) if leader else function(loaded, *args)
