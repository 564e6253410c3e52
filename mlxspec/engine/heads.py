"""A trained head at work: its caches, and its drafts with the noise that will choose the tokens.

:class:`TrainedHead` attaches a head to a model. Every target of that model then has a
:class:`HeadCache`, which follows the target's own caches. :class:`HeadDrafts` are the drafts of one
generation; they run the head for several sequences in one forward.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache

from ..drafting.heads import HeadExperience, HeadSource, HeadTimes
from ..errors import LoadError
from ..models.heads import BlockHead, ChainHead, Head
from .caches import (
    SlotKVCache,
    TreeKVCache,
    WindowKVCache,
    cut,
    for_steps,
    held_arrays,
)
from .joint import JointCache, JointMode
from .patches import HiddenStates, find_body, forward_at, install, logits_of
from .sampling import Perturb, draft_values
from .target import Capability, Target, evaluate_constants, vocabulary_size

_MOST_UNSEEN = 256  # rows that a head has not seen; more are kept only for a moment
_TIMED_DRAFTS = 3


class TrainedHead:
    """A head attached to a model.

    Args:
        head: a head for this model.
        model: an mlx-lm model, which is not changed.

    Attributes:
        model: returns the same as the given one, and shares its weights. All targets of a
            generation with the head run this model.

    Raises:
        LoadError: the model's hidden states or its embedding cannot be found.
    """

    def __init__(self, head: Head, model: nn.Module) -> None:
        body = find_body(model)
        if body is None:
            raise LoadError("the model's hidden states cannot be read: leave the head out")
        self.head = head
        self._hidden = HiddenStates(model, body, head.reads)
        self.model = self._hidden.model
        self.model.trained_head = self
        head.bind(_embedding(model), lambda states: logits_of(model, body, states))
        install(head)
        mx.eval(head.parameters())
        evaluate_constants(head)

    def new_cache(self, length: int) -> HeadCache:
        """The caches of a target that holds ``length`` positions of which the head saw nothing."""
        return HeadCache(self, length)

    def features(self, rows: slice) -> mx.array:
        """What the head keeps of some rows of the last forward, lazy, (rows, width)."""
        of_layers = [states[rows] for states in self._hidden.of_layers]
        return self.head.features(self._hidden.final[rows], of_layers)

    @cached_property
    def identity(self) -> str:
        """Its kind and a digest of its sizes, which fine-tuned heads share."""
        sizes = [(name, array.shape) for name, array in tree_flatten(self.head.parameters())]
        digest = hashlib.sha256(repr(sorted(sizes)).encode()).hexdigest()
        return f"{type(self.head).__name__} {digest[:16]}"

    @cached_property
    def experience(self) -> HeadExperience:
        """What generations have shown of the head; its time is measured first."""
        target = Target(self.model, Capability.CHAIN, vocabulary_size(self.model))
        with mx.stream(generation_stream):
            target.prefill([0] * 8)
            first, most = (
                min(self._timed(target, depth) for _ in range(_TIMED_DRAFTS))
                for depth in (1, self.head.most)
            )
        further = max(0.0, most - first) / max(1, self.head.most - 1)
        return HeadExperience(self.head.most, HeadTimes(first, further))

    def _timed(self, target: Target, depth: int) -> float:
        cache = cast(HeadCache, target.head)
        cache.note(mx.zeros(1, mx.int32), slice(0, 1))
        cache.keep(cache.length, (0,))
        mx.eval(cache.arrays)
        started = time.perf_counter()
        self.draft([Member(target, 0, lambda logprobs, _: logprobs)], depth)
        return time.perf_counter() - started

    def draft(self, members: Sequence[Member], depth: int) -> list[tuple[list[int], list[float]]]:
        """Draft ``depth`` tokens for each sequence.

        Args:
            members: the sequences, whose caches are ``ready``.
            depth: at most ``most`` of the head.

        Returns:
            per sequence, the tokens and the confidence in each.
        """
        steps = self._block if isinstance(self.head, BlockHead) else self._chain
        tokens, confidences = zip(*steps(members, depth), strict=True)
        drafted = mx.stack(list(tokens), axis=1), mx.stack(list(confidences), axis=1)
        mx.eval(*drafted, [member.cache.arrays for member in members])
        return list(zip(*(cast(list[Any], array.tolist()) for array in drafted), strict=True))

    def _chain(self, members: Sequence[Member], depth: int) -> Iterator[tuple[mx.array, mx.array]]:
        """The tokens of each depth, (sequences,), and their confidences."""
        head = cast(ChainHead, self.head)
        rows = [member.cache.to_see(member.last) for member in members]
        counts = [len(tokens) for tokens, _ in rows]
        caches = [member.cache.caches or _keys_of(member.target) for member in members]
        tokens, features = (mx.concatenate([*arrays]) for arrays in zip(*rows, strict=True))
        fed, hidden = self._run(tokens, features, counts, caches)
        ends = mx.array([*accumulate(counts)]) - 1
        fed, hidden = fed[:, ends], hidden[:, ends]
        for place in range(depth):
            tokens, confidences = _choose(members, head.logits(hidden)[0], place)
            yield tokens, confidences
            if place + 1 < depth:
                fed, hidden = self._run(tokens, fed[0], [1] * len(members), caches)
        for member in members:
            member.cache.has_seen()

    def _block(self, members: Sequence[Member], depth: int) -> Iterator[tuple[mx.array, mx.array]]:
        """As :meth:`_chain`, from one forward."""
        head = cast(BlockHead, self.head)
        tokens = mx.array([member.last for member in members])
        features = [member.cache.to_see(member.last)[1][None] for member in members]
        hidden = head(tokens, depth, features, [member.cache.caches for member in members])
        logits = head.logits(hidden)
        for place in range(depth):
            tokens, confidences = _choose(members, head.after(logits[:, place], tokens), place)
            yield tokens, confidences
        for member in members:
            member.cache.has_seen()

    def _run(
        self,
        tokens: mx.array,
        features: mx.array,
        counts: Sequence[int],
        caches: Sequence[Sequence[Any]],
    ) -> tuple[mx.array, mx.array]:
        """Run a chain head over rows of several sequences; returns as the head does.

        Args:
            tokens: (rows of all,).
            features: (rows of all, width).
            counts: per sequence, the number of its rows.
            caches: per sequence, a cache for each layer.
        """
        head = cast(ChainHead, self.head)
        if len(caches) == 1:
            return head(tokens[None], features[None], caches[0])
        ends = [*accumulate(counts)]
        spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        kind = _JointKeys if isinstance(caches[0][0], _Keys) else JointCache
        layers = [kind(layer, spans, JointMode.SPLIT) for layer in zip(*caches, strict=True)]
        positions = [
            own[0].offset + row
            for own, count in zip(caches, counts, strict=True)
            for row in range(count)
        ]
        returned: list[mx.array] = []

        def model(tokens: mx.array, cache: Sequence[Any]) -> mx.array:
            returned.extend(head(tokens, features[None], cache))
            return returned[1]

        forward_at(model, tokens[None], layers, mx.array(positions, dtype=mx.int32))
        return returned[0], returned[1]


def _embedding(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """A function from token ids to what enters a model's first layer."""
    for _, module in model.named_modules():
        if "embed_tokens" in module:
            scale = getattr(module, "embed_scale", 1.0)
            return lambda tokens: module.embed_tokens(tokens) * scale
    raise LoadError("the model's embedding cannot be found: leave the head out")


class Member(NamedTuple):
    """A sequence of a draft.

    Attributes:
        target: the sequence's.
        last: its current token, which the target has not run yet.
        perturb: :meth:`mlxspec.engine.sampling.Chooser.perturb` of its chooser.
    """

    target: Target
    last: int
    perturb: Perturb

    @property
    def cache(self) -> HeadCache:
        """The head's."""
        return cast(HeadCache, self.target.head)


def _choose(members: Sequence[Member], logits: mx.array, place: int) -> tuple[mx.array, mx.array]:
    """The tokens that the head would choose with each sequence's noise, and its confidences.

    Args:
        members: the sequences.
        logits: (sequences, vocabulary).
        place: how many tokens have been drafted.
    """
    own = [
        draft_values(logits[index : index + 1], place, member.target, member.perturb)
        for index, member in enumerate(members)
    ]
    values = mx.concatenate([array.astype(mx.float32) for array in own])
    confidence = mx.exp(values.max(axis=-1) - mx.logsumexp(values, axis=-1))
    return mx.argmax(values, axis=-1), confidence


class KeptHead(NamedTuple):
    """What a head knows of a context, for sessions and files; nothing writes into the arrays.

    Attributes:
        identity: the head's.
        positions: those of the entries in its caches, and then that of the first unseen row.
        features: of the unseen rows, (rows, width of the head).
        layers: keys and values of each layer of the head, (1, heads, entries, head_dim); empty
            without entries.
    """

    identity: str
    positions: list[int]
    features: mx.array
    layers: list[tuple[mx.array, mx.array]]

    @property
    def arrays(self) -> list[mx.array]:
        """All that it holds."""
        return [self.features, *(array for layer in self.layers for array in layer)]


class HeadCache:
    """What a head knows of one sequence: its own caches, and rows that it has not seen.

    It follows the target's caches: the rows of a forward are noted, and those that are committed
    are kept. The head sees them when it drafts next, or once there are many.

    The entry of a position depends on the token after it. So a cut drops that of its last position,
    too. A missing entry does no harm but that the head attends to one position less; the entries
    after it move up.

    Args:
        trained: the head.
        length: positions of which the head sees nothing, such as a prompt cache of another program.

    Attributes:
        caches: one per layer of the head.
        noted: tokens and features of the rows of the last forward.
    """

    def __init__(self, trained: TrainedHead, length: int) -> None:
        self.trained = trained
        self.caches = [for_steps(cache) for cache in trained.head.make_cache()]
        self.noted: tuple[mx.array, mx.array] | None = None
        self._positions: list[int] = []  # of the entries in the caches
        self._seen = length  # the rows before are seen, or never will be
        self._unseen: list[tuple[mx.array, mx.array]] = []  # tokens and features of those after

    @property
    def length(self) -> int:
        """The positions up to the last row that is kept."""
        return self._seen + sum(len(tokens) for tokens, _ in self._unseen)

    @property
    def arrays(self) -> list[mx.array]:
        """All that it holds."""
        return [*held_arrays(self.caches), *(array for rows in self._unseen for array in rows)]

    def is_ready(self, length: int) -> bool:
        """Whether it can draft after ``length`` positions: it has the features of the last one."""
        return bool(self._unseen) and self.length == length

    def note(self, tokens: mx.array, rows: slice) -> None:
        """Note rows of the target's last forward.

        Args:
            tokens: theirs, (rows,).
            rows: which ones of the forward they are.
        """
        self.noted = tokens, self.trained.features(rows)

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Keep noted rows, by their index; the first one's position is ``start``."""
        assert self.noted
        (tokens, features), self.noted = self.noted, None
        if self.length != start:
            self.cut(start)
            if self.length < start:
                self._seen, self._unseen = start, []
        if len(rows) < len(tokens):
            taken = mx.array(list(rows))
            tokens, features = tokens[taken], features[taken]
        # Lazy arrays can be read in this thread only, but another thread may draft next.
        mx.async_eval(tokens, features)
        self._unseen.append((tokens, features))
        if self.length - self._seen > _MOST_UNSEEN:
            with mx.stream(generation_stream):
                self._see()

    def _rows(self) -> tuple[mx.array, mx.array]:
        tokens, features = zip(*self._unseen, strict=True)
        return mx.concatenate([*tokens]), mx.concatenate([*features])

    def _see(self) -> None:
        """Append the entries of all rows but the last one, whose next token is not known."""
        tokens, features = self._rows()
        self._append(tokens[1:], features[:-1])
        self.has_seen([(tokens[-1:], features[-1:])])
        mx.async_eval(self.arrays)

    def _append(self, tokens: mx.array, features: mx.array) -> None:
        """Append entries.

        Args:
            tokens: the one after each row, (rows,).
            features: of the rows, (rows, width).
        """
        head = self.trained.head
        if isinstance(head, BlockHead):
            head.see(features[None], self.caches)
        elif self.caches:
            cast(ChainHead, head)(tokens[None], features[None], self.caches)

    def to_see(self, last: int) -> tuple[mx.array, mx.array]:
        """The rows that the head has not seen.

        Args:
            last: the current token.

        Returns:
            per row, the token after it, (rows,), and its features, (rows, width).
        """
        tokens, features = self._rows()
        if not self.caches:  # the head attends to the target's keys
            tokens, features = tokens[-1:], features[-1:]
        return mx.concatenate([tokens[1:], mx.array([last], tokens.dtype)]), features

    def has_seen(self, left: Sequence[tuple[mx.array, mx.array]] = ()) -> None:
        """The head has seen its rows, except those that are left; drop what it drafted."""
        end, before = self.length - sum(len(tokens) for tokens, _ in left), self._seen
        self._seen, self._unseen = end, [*left]
        if self.caches:
            self._positions += range(before, end)
        cut(self.caches, len(self._positions))

    def cut(self, length: int) -> None:
        """Drop everything after the first ``length`` positions."""
        left = length - self._seen
        if left <= 0:
            self._seen = length
        kept = []
        for tokens, features in self._unseen:
            if left > 0:
                kept.append((tokens[:left], features[:left]))
            left -= len(tokens)
        self._unseen = kept
        mx.async_eval(kept)
        entries = self._entries(length)
        del self._positions[entries:]
        cut(self.caches, entries)

    def _entries(self, length: int) -> int:
        """How many entries stay if it is cut."""
        return bisect_left(self._positions, length - 1)

    def kept(self, length: int) -> KeptHead:
        """A copy for the first ``length`` positions; it may have more unseen rows."""
        entries = self._entries(length)
        features = self._rows()[1] if self._unseen else mx.zeros((0, self.trained.head.width))
        layers = [
            (mx.contiguous(keys[:, :, :entries]), mx.contiguous(values[:, :, :entries]))
            for keys, values in ((cache.keys, cache.values) for cache in self.caches)
            if entries
        ]
        positions = [*self._positions[:entries], self._seen]
        kept = KeptHead(self.trained.identity, positions, features, layers)
        mx.eval(kept.arrays)
        return kept

    def resume(self, kept: KeptHead, tokens: Sequence[int]) -> None:
        """Continue with what was kept, unless another head has kept it.

        Args:
            kept: of a context that begins with the tokens.
            tokens: all of this context.
        """
        if kept.identity != self.trained.identity or not self._takes(kept):
            return
        *self._positions, self._seen = kept.positions
        unseen = tokens[self._seen : self._seen + len(kept.features)]
        self._unseen = [(mx.array(unseen), kept.features[: len(unseen)])] if unseen else []
        if entries := len(self._positions):
            # Slices, since a cache may write into its own arrays.
            states = [(keys[:], values[:], entries) for keys, values in kept.layers]
            self.caches = [for_steps(KVCache.from_state(state)) for state in states]
        self.cut(len(tokens))

    def _takes(self, kept: KeptHead) -> bool:
        """Whether the arrays have the head's shapes; a file's may have any."""
        own, width = self.trained.new_cache(0), self.trained.head.width
        own._append(mx.zeros(1, mx.int32), mx.zeros((1, width)))

        def layout(keys: mx.array, values: mx.array) -> tuple[Any, ...]:
            return keys.shape[:2], keys.shape[3:], values.shape[:2], values.shape[3:]

        entries = len(kept.positions) > 1
        layouts = [layout(cache.keys, cache.values) for cache in own.caches if entries]
        fits = layouts == [layout(*layer) for layer in kept.layers]
        return fits and kept.features.shape[1:] == (width,)


class _Keys:
    """What a row sees of one of the target's layers, for a head without caches of its own.

    Args:
        cache: the target's, of the layer.
        size: the number of the latest positions that are seen.

    Attributes:
        offset: the position of the row: that of the current token, all along a draft.
    """

    def __init__(self, cache: Any, size: int) -> None:
        self.offset = cache.offset
        end = cache.index(cache.offset)
        seen = cache.place, ..., slice(max(0, end - size), end), slice(None)
        self._held = cache.keys[seen], cache.values[seen]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values, (1, heads, entries, head_dim)."""
        return self._held


class _JointKeys(JointCache):
    """Stands in for the :class:`_Keys` of several sequences."""

    def keys_and_values(self) -> tuple[Any, Any]:
        """This object, whose ``attend`` is called."""
        self._entries = [cache.keys_and_values() for cache, _ in self._alone]
        return self.state


def _keys_of(target: Target) -> list[_Keys]:
    """The keys of the target's last layer that sees everything, and of its last with a window."""
    full = [cache for cache in target.trimmable if isinstance(cache, TreeKVCache | SlotKVCache)]
    windows = [cache for cache in target.trimmable if isinstance(cache, WindowKVCache)]
    return [_Keys(full[-1], full[-1].offset), _Keys(windows[-1], windows[-1].max_size)]


class HeadDrafts(HeadSource):
    """The drafts of a trained head for one generation.

    Args:
        trained: the head, attached to the generation's model.
    """

    def __init__(self, trained: TrainedHead) -> None:
        super().__init__(trained.experience)
        self._trained = trained

    def attach(self, target: Target, perturb: Perturb) -> None:
        self._target, self._perturb = target, perturb

    @property
    def ready(self) -> bool:
        target, cache = self._target, self._target.head
        if cache is None or not cache.is_ready(target.length):
            return False
        return bool(cache.caches) or not target.quantized

    @classmethod
    def run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        members = [Member(head._target, head.last, head._perturb) for head in heads]
        with mx.stream(generation_stream):
            return heads[0]._trained.draft(members, depth)
