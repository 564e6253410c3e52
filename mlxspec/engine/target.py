"""The target: a model's forwards over the rows of a draft, and over the prompt's chunks."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..drafting.drafter import DraftTree
from .caches import Snapshot, TreeKVCache, masked_for, parts
from .context_cache import ContextCache
from .params import CacheOptions
from .patches import forward_at, install
from .tree_attention import OpenMask, TreeRows


class Capability(enum.Enum):
    """What drafts a target can verify, the most capable first."""

    TREE = "tree"
    """Branching drafts: KV caches, and positions that come from RoPE modules alone."""

    CHAIN = "chain"
    """Drafts in a row: every cache can be cut back."""

    REPLAY = "replay"
    """Drafts in a row, at a price: some state cannot be cut back (state-space and linear
    attention). It is restored after a rejection, and accepted tokens run once more."""

    PLAIN = "plain"
    """No drafts: several rows in one forward do not give what they give one by one."""


Progress = Callable[[int, int], None]
"""Called with the number of prompt tokens processed so far and the number in all."""

_MOST_PENDING = 15  # accepted tokens to run again; with the current token a step of 16 rows


def vocabulary_size(model: nn.Module) -> int:
    """The number of token ids that a model knows, those that pad its output layer included."""
    # The graph is built for its shape and never evaluated.
    return model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]


def evaluate_constants(model: nn.Module) -> None:
    """Evaluate what a model has computed for itself when it was made, such as RoPE's frequencies.

    These are no parameters, so loading leaves them lazy, and a lazy array can be read only in the
    thread that made it.
    """
    constants = [
        value
        for module in model.modules()
        for name, value in module.items()
        if name.startswith("_") and isinstance(value, mx.array)
    ]
    mx.eval(constants)


class Target(ContextCache):
    """A model, run over rows that follow the context in its caches.

    Args:
        model: an mlx-lm model.
        capability: what drafts the model can verify, from :mod:`mlxspec.engine.capability`.
        vocab_size: from :func:`vocabulary_size`.
        options: the memory of the caches.
        cache: mlx-lm's caches to continue, with what they hold; by default new ones. They are
            used as they are until the end of the prefill.
        undoable, marks: as for :class:`ContextCache`.
    """

    def __init__(
        self,
        model: nn.Module,
        capability: Capability,
        vocab_size: int,
        options: CacheOptions | None = None,
        cache: Sequence[Any] | None = None,
        undoable: int = 2,
        marks: int = 0,
    ) -> None:
        options = options or CacheOptions()
        if cache is None:
            cache = make_prompt_cache(model, options.max_kv_size)
        replays = capability in (Capability.REPLAY, Capability.PLAIN)
        super().__init__(cache, options, replays, undoable, marks)
        self.model = model
        self.capability = capability
        self.vocab_size = vocab_size
        self.mask = OpenMask()

    @property
    def max_rows(self) -> int:
        """The most rows that a step may ever have, pending ones included."""
        if self.capability is Capability.PLAIN:
            return 1
        return _MOST_PENDING + 1 if self.capability is Capability.REPLAY else sys.maxsize

    @property
    def max_depth(self) -> int:
        """How many tokens deep the next draft may be."""
        depth = self.max_rows - 1 - len(self.pending)
        if self._quantizes_later:
            # mlx-lm quantises the cache between two tokens, and so must we.
            depth = min(depth, self.options.quantized_kv_start - 2 - self.length)
        return max(0, depth)

    def prefill(
        self,
        tokens: Sequence[int],
        on_progress: Progress | None = None,
        as_mlx_lm: bool = False,
    ) -> None:
        """Put prompt tokens into the caches, ``prefill_step_size`` of the options at a time.

        Args:
            tokens: of the prompt.
            on_progress: called before each chunk, and at the end.
            as_mlx_lm: as for :meth:`prefill_in_chunks`.
        """
        for done in self.prefill_in_chunks(tokens, as_mlx_lm=as_mlx_lm):
            if on_progress:
                on_progress(done, len(tokens))

    def prefill_in_chunks(
        self,
        tokens: Sequence[int],
        chunk: Callable[[], int] | None = None,
        as_mlx_lm: bool = False,
    ) -> Generator[int, None, None]:
        """Put prompt tokens into the caches, a chunk each time the next number is asked for.

        The first prefill runs on mlx-lm's own caches; at its end, or when it is closed, trimmable
        ones replace them. Whatever the chunks, caches are quantised where mlx-lm's chunks end.

        Args:
            tokens: of the prompt.
            chunk: returns the size of the next chunk, if that is to be smaller than
                ``prefill_step_size`` of the options.
            as_mlx_lm: run mlx-lm's chunks, since others would give something else. Then ``chunk``
                is not asked, and the only mark is at the end.

        Yields:
            how many tokens are done: before each chunk, and at the end.
        """
        places = self._marks_within(len(tokens), as_mlx_lm)
        step, start = self.options.prefill_step_size, 0
        due = self.length + len(tokens) >= self.options.quantized_kv_start
        aligned = self._quantizes_later and due
        try:
            while start < len(tokens):
                if start in places:  # before the pause, in which others may look for it
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
                self._quantize_if_due()  # a copied beginning was the whole prompt
            if start in places:
                self.mark()
        finally:
            self._change_for_steps()
        yield start

    @property
    def prefills_jointly(self) -> bool:
        """Whether prompt tokens may run in a forward of several sequences."""
        plain = all(type(cache) in (KVCache, TreeKVCache) for cache in parts(self.cache))
        return plain and not self._quantizes_later and self.capability is not Capability.PLAIN

    def _prefill_chunk(self, tokens: Sequence[int], ends: bool = True) -> None:
        """Run tokens of a prompt, whose last ones they are if it ``ends`` with them."""
        before, length = Snapshot(self._untrimmable), self.length + len(tokens)
        try:
            self.model(mx.array(list(tokens))[None], cache=self.cache)
            self.length = length
        except BaseException:  # an interrupt in the middle of the layers
            before.restore()
            raise
        if ends or (length - self.chunks_from) % self.options.prefill_step_size == 0:
            self._quantize_if_due()
        mx.eval([cache.state for cache in self.cache])
        mx.clear_cache()

    def forward(self, tokens: mx.array, tree: DraftTree) -> mx.array:
        """Run the rows of a tree, without waiting for the result.

        The caches then hold all rows until :meth:`commit` says which of them stay.

        Args:
            tokens: (rows,), the tree's tokens; an array, since a pipelined token is not yet known.
            tree: says which rows each row follows.

        Returns:
            lazy logits, (rows, vocabulary).
        """
        rows = self.begin_forward(tokens, tree)
        if tree.is_chain:
            return self.model(rows[None], cache=self.cache)[0, len(self.pending) :]
        masked = TreeRows(tree, self.mask)
        install(self.model)
        with masked_for(masked, self.trimmable):
            return forward_at(self.model, rows[None], self.cache, masked.depths)[0]

    def flush_pending(self) -> None:
        """Run pending tokens, so that the caches hold all ``length`` positions."""
        tokens = self.pending
        self.pending, self.length = (), self.length - len(tokens)
        self._checkpoints.clear()
        if tokens:
            self._prefill_chunk(tokens)


Result = TypeVar("Result")


def target_for(
    model: nn.Module,
    capability: Capability,
    vocab_size: int,
    options: CacheOptions | None = None,
    cache: Sequence[Any] | None = None,
) -> Target:
    """A :class:`Target` of a model, on all machines over which the model is split.

    The arguments are those of :class:`Target`.

    Raises:
        OptionError: ``cache`` is given for a model that is split.
    """
    leader = getattr(model, "leader", None)
    make = leader.target if leader else Target
    return make(model, capability, vocab_size, options, cache)


def together(function: Callable[..., Result], model: nn.Module, *args: Any) -> Result:
    """Call a function that runs forwards of a model, on all machines over which it is split.

    Args:
        function: one of :data:`mlxspec.distributed.group.TOGETHER`.
        model: its first argument.
        args: its other arguments, which JSON can hold.
    """
    leader = getattr(model, "leader", None)
    return leader.run(function, model, *args) if leader else function(model, *args)
