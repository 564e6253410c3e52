"""The memory of a server: one bound for everything that its models take, and who waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream, wired_limit

from ..engine.costs import free_memory, least_free_memory, row_memory, whole_memory
from ..engine.model_sizes import CacheKind, cache_kinds
from ..engine.params import CacheOptions
from ..engine.target import together, vocabulary_size
from ..generation.session import MARKS, UNDOABLE

if TYPE_CHECKING:
    from .served_model import ServedModel

_STEP = 256  # positions by which caches grow
_SLACK = 16 + _STEP  # positions that a window holds beyond its size
_ROWS = 64  # rows of a step of all sequences; more rarely pay
_SCORES = 4  # arrays over the vocabulary for each row: logits, log-probabilities, filters
_RESERVE = 0.1  # share of the room for growing joint caches and the process
_CACHE_SHARE = 0.5  # share of the room for idle entries of the prefix caches
_LOOK = 1.0  # seconds between two looks at the system's memory


class CacheMemory:
    """What one model's caches and forwards take.

    Args:
        model: an mlx-lm model, with its weights in memory.
        options: the cache options.

    Attributes:
        options: the cache options.
    """

    def __init__(self, model: nn.Module, options: CacheOptions | None = None) -> None:
        self.options = options or CacheOptions()
        self._model = model
        self._plain = cache_kinds(model, self.options)
        self._quantized: list[CacheKind] = []
        if self.options.kv_bits is not None:
            self._quantized = cache_kinds(model, self.options, quantized=True)

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that the caches of one sequence with a session take.

        Args:
            tokens: the number of tokens of the prompt and the answer.
        """
        if not self._quantized:
            return _taken(self._plain, tokens)
        # A whole chunk of the prompt is cached before the cache is quantised.
        start = self.options.quantized_kv_start + self.options.prefill_step_size
        first = min(tokens, start)
        at_first = _taken(self._plain, first) + _taken(self._quantized, first)
        return max(at_first, _taken(self._quantized, tokens))

    @cached_property
    def weights(self) -> int:
        """The bytes of the model's weights, a trained head's included."""
        trained = getattr(self._model, "trained_head", None)
        modules = [self._model, *([trained.head] if trained else ())]
        arrays = [array for module in modules for _, array in tree_flatten(module.parameters())]
        return sum(array.nbytes for array in {id(array): array for array in arrays}.values())

    @cached_property
    def forward_bytes(self) -> int:
        """The memory of a forward besides the caches, for a chunk of a prompt or a step.

        It is measured with a forward over a few rows. On a CPU, attention also stores its scores
        over a long context, and these must fit into the reserve.
        """
        with mx.stream(generation_stream):
            row = together(row_memory, self._model, self.options.max_kv_size)
        chunk = row * self.options.prefill_step_size
        step = _ROWS * (row + _SCORES * 4 * vocabulary_size(self._model))
        return max(chunk, step)


def _taken(kinds: list[CacheKind], tokens: int) -> int:
    return sum(kind.count * _taken_by_one(kind, tokens) for kind in kinds)


def _taken_by_one(kind: CacheKind, tokens: int) -> int:
    """The size of one cache, including the earlier states that it can be rewound to."""
    if kind.state_bytes is not None:
        return kind.state_bytes * (1 + MARKS + UNDOABLE)
    each = kind.bytes_per_position or 0
    whole = (tokens + _STEP) * each
    if kind.positions is None:
        return whole
    return min(whole, (kind.positions + _SLACK) * each) * (1 + MARKS)


class ServerMemory:
    """The memory of a server, which all its models share.

    What they take for certain comes first: weights, and the buffers of a forward. The rest is the
    :attr:`room`, for reservations, such as the caches of running requests, and for idle entries of
    the prefix caches, which make room for reservations.

    The figures may be read in any thread. All methods belong to the worker's thread; before it
    runs, to the thread that starts it.

    Args:
        bound: the most bytes of everything; by default, what the machine has.
        cache_bytes: the most bytes of idle entries; by default, half of the room.
    """

    def __init__(self, bound: int | None = None, cache_bytes: int | None = None) -> None:
        self._bound = whole_memory() if bound is None else min(bound, whole_memory())
        self._cache_bytes = cache_bytes
        self._models: dict[str, ServedModel] = {}
        self._reserved: dict[object, int] = {}
        self._limit, self._next_look = self._bound, 0.0

    # --- figures ---

    @property
    def limit(self) -> int:
        """The most bytes of everything now: other programs may leave less than the bound."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + _LOOK
            held = mx.get_active_memory() + mx.get_cache_memory()
            self._limit = min(self._bound, held + free_memory())
        return self._limit

    @property
    def parts(self) -> dict[str, int]:
        """What is taken, in bytes, by what takes it."""
        models = [*self._models.copy().values()]
        return {
            "weights": sum(one.memory.weights for one in models),
            "forward": max((one.memory.forward_bytes for one in models), default=0),
            "reserved": sum(self._reserved.copy().values()),
            "prefixes": sum(one.cache.nbytes for one in models),
        }

    @property
    def room(self) -> int:
        """The bytes that reservations may take in all."""
        parts = self.parts
        left = self.limit - parts["weights"] - parts["forward"]
        return max(0, int(left * (1 - _RESERVE)))

    @property
    def most_idle(self) -> int:
        """The most bytes of idle entries of the prefix caches."""
        room = self.room
        return min(
            room, int(room * _CACHE_SHARE) if self._cache_bytes is None else self._cache_bytes
        )

    # --- in the worker's thread ---

    def add(self, served: ServedModel) -> None:
        """Count a model that is loaded; a reservation under its name ends."""
        self._models[served.name] = served
        self.release(served.name)
        model = served.decoder.model
        if hasattr(model, "leader"):  # each rank has a part of it, on a machine of its own
            held = mx.get_active_memory() + mx.get_cache_memory()
            self._bound = min(self._bound, held + together(least_free_memory, model))
        self.make_room()

    def remove(self, served: ServedModel) -> None:
        """Count a model no longer, nor its idle entries."""
        del self._models[served.name]

    def weights_fit(self, nbytes: int) -> bool:
        """Whether so many bytes of weights may be loaded now; idle entries make room for them.

        Reserve them, under the model's name, before they are loaded in another thread.
        """
        if not self.fits(nbytes):
            return False
        self.make_room(nbytes)
        return True

    def fits(self, nbytes: int) -> bool:
        """Whether so much could be reserved now."""
        return sum(self._reserved.values()) + nbytes <= self.room

    def reserve(self, owner: object, nbytes: int) -> None:
        """Reserve memory; idle entries make room for it.

        Args:
            owner: until it is passed to :meth:`release`, the memory is reserved: a request, or the
                name of a model.
            nbytes: how much; what was reserved for the same owner before is included.
        """
        self._reserved[owner] = nbytes
        self.make_room()

    def release(self, owner: object) -> None:
        """End a reservation, if there is one."""
        self._reserved.pop(owner, None)

    @property
    def is_reserved(self) -> bool:
        """Whether anything is reserved."""
        return bool(self._reserved)

    def make_room(self, nbytes: int = 0) -> None:
        """Evict idle entries, the least recently used of all models first, until all fits.

        Args:
            nbytes: how much more must fit.
        """
        parts = self.parts
        free = self.room - parts["reserved"] - nbytes
        over = parts["prefixes"] - max(0, min(free, self.most_idle))
        while over > 0:
            caches = [one.cache for one in self._models.values()]
            found = [cache for cache in caches if cache.oldest is not None]
            if not found:
                return
            over -= min(found, key=lambda cache: cache.oldest or 0).make_room(1)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let MLX keep to the bound while the worker runs."""
        limit = mx.set_memory_limit(self._bound)
        # Each model's own use of the same limit ends with the model, in any order.
        with wired_limit(nn.Module(), [generation_stream]):
            try:
                yield
            finally:
                mx.set_memory_limit(limit)
