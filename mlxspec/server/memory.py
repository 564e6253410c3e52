"""The memory of a server: one bound for everything that its models take, and who waits for it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream, wired_limit

from ..corpus.suffix_index import MOST_BYTES
from ..engine.costs import forward_memory, free_memory, least_free_memory, whole_memory
from ..engine.model_sizes import CacheKind, cache_kinds
from ..engine.params import CacheOptions
from ..engine.step import SHORT
from ..engine.target import together, vocabulary_size
from ..generation.request import State
from ..generation.session import MARKS, UNDOABLE

if TYPE_CHECKING:
    from ..engine.heads import TrainedHead
    from .served_model import ServedModel
    from .worker import ServedRequest

_STEP = 256  # positions by which caches grow
_SLACK = 16 + _STEP  # positions that a window holds beyond its size
_ROWS = 64  # rows of a step of all sequences; more rarely pay
_SCORES = 4  # arrays over the vocabulary for each row: logits, log-probabilities, filters
_RESERVE = 0.1  # share of what is left beside weights, for slots and freed buffers
_FAR = 1 << 20  # tokens; further than any window
_CACHE_SHARE = 0.5  # share of the room for idle entries of the prefix caches
_INDEX = 2 * MOST_BYTES  # bytes per token of an index, which may hold as many of abandoned turns
_LOOK = 1.0  # seconds between two looks at the system's memory


class Need(NamedTuple):
    """The memory that a request may take.

    Attributes:
        caches: bytes of its caches and of the index that it drafts from, which are its own.
        forward: bytes of the buffers of its largest forward; forwards follow each other.
        shared: its part in a forward that several prompts share.
    """

    caches: int
    forward: int = 0
    shared: int = 0


class CacheMemory:
    """What one model's weights, caches and forwards take.

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
        self._trained: TrainedHead | None = getattr(model, "trained_head", None)
        self._waiting = self._trained.new_cache(0).waiting_bytes(_ROWS) if self._trained else 0

    def needs(self, tokens: int) -> Need:
        """What a request takes whose prompt and answer have so many tokens."""
        caches = self.bytes_for(tokens) + _INDEX * tokens
        chunk = min(tokens, self.options.prefill_step_size)
        forward = max(self.forward_bytes(tokens, chunk), self.step_bytes(tokens))
        return Need(caches, forward, self.forward_bytes(tokens, min(tokens, SHORT)))

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that the caches of one sequence with a session take.

        Args:
            tokens: the number of tokens of the prompt and the answer.
        """
        if not self._quantized:
            return self._waiting + _taken(self._plain, tokens)
        # A whole chunk of the prompt is cached before the cache is quantised.
        start = self.options.quantized_kv_start + self.options.prefill_step_size
        first = min(tokens, start)
        at_first = _taken(self._plain, first) + _taken(self._quantized, first)
        return self._waiting + max(at_first, _taken(self._quantized, tokens))

    @cached_property
    def weights(self) -> int:
        """The bytes of the model's weights, a trained head's included."""
        modules = [self._model, *([self._trained.head] if self._trained else ())]
        arrays = [array for module in modules for _, array in tree_flatten(module.parameters())]
        return sum(array.nbytes for array in {id(array): array for array in arrays}.values())

    def forward_bytes(self, tokens: int, rows: int) -> int:
        """The memory of a forward over so many rows of a prompt, besides the caches.

        It is measured with forwards over a few rows.

        Args:
            tokens: the length of the context that the rows attend to.
            rows: theirs.
        """
        (row, row_and_position), _ = self._measured
        return int(rows * (row + row_and_position * tokens))

    def step_bytes(self, tokens: int = 0) -> int:
        """The same for the largest step of all sequences, with the scores of its rows."""
        return self.forward_bytes(tokens, _ROWS) + _ROWS * self._measured[1]

    @cached_property
    def _measured(self) -> tuple[tuple[int, float], int]:
        """What :func:`forward_memory` returns, and the bytes of the scores of a step's row."""
        with mx.stream(generation_stream):
            found = together(forward_memory, self._model, self.options.max_kv_size)
        return found, _SCORES * 4 * vocabulary_size(self._model)


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

    Weights and the memories of earlier answers come first. The rest is the :attr:`room`: for the
    buffers of a forward, for reservations, such as the caches of running requests, and for idle
    entries of the prefix caches, which make room for reservations.

    The figures may be read in any thread. The methods that change something belong to the worker's
    thread; before it runs, to the thread that starts it.

    Args:
        bound: the most bytes of everything; by default, what the machine has.
        cache_bytes: the most bytes of idle entries; by default, half of the room.
    """

    def __init__(self, bound: int | None = None, cache_bytes: int | None = None) -> None:
        self._bound = whole_memory() if bound is None else min(bound, whole_memory())
        self._cache_bytes = cache_bytes
        self._models: dict[str, ServedModel] = {}
        self._reserved: dict[object, Need] = {}
        self._first: ServedRequest | None = None
        """The request that came first of those that wait for memory."""
        self._limit, self._next_look = self._bound, 0.0
        self._is_in_force = False

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
        """What is taken or reserved, in bytes, by what takes it."""
        models = [*self._models.copy().values()]
        memories = {id(memory): memory for one in models for memory in one.memories}
        return {
            "weights": sum(one.memory.weights for one in models),
            "answers": sum(memory.nbytes for memory in memories.values()),
            "forward": self._forward(),
            "requests": self.reserved,
            "prefixes": sum(one.cache.nbytes for one in models),
        }

    @property
    def room(self) -> int:
        """The bytes that are left beside weights and memories of earlier answers."""
        parts = self.parts
        return max(0, int((self.limit - parts["weights"] - parts["answers"]) * (1 - _RESERVE)))

    @property
    def reserved(self) -> int:
        """The bytes that are reserved, without those of forwards."""
        return sum(need.caches for need in self._reserved.copy().values())

    @property
    def most_idle(self) -> int:
        """How many bytes the idle entries of the prefix caches may take."""
        left = max(0, self.room - self._forward())
        return int(left * _CACHE_SHARE) if self._cache_bytes is None else self._cache_bytes

    def _forward(self, *more: Need) -> int:
        """The bytes of a forward, the largest of those that may run."""
        needs = [*self._reserved.copy().values(), *more]
        steps = (one.memory.step_bytes() for one in self._models.copy().values())
        return max(sum(need.shared for need in needs), *(need.forward for need in needs), *steps, 0)

    def fits(self, need: Need) -> bool:
        """Whether a need could be reserved now, with idle entries evicted if necessary."""
        return self.reserved + need.caches + self._forward(need) <= self.room

    def ever_fits(self, need: Need) -> bool:
        """Whether a need could be reserved if nothing else was."""
        return need.caches + need.forward <= self.room

    def bound_for(self, need: Need) -> int:
        """The least bound with room for so much, beside the models."""
        parts = self.parts
        room = (need.caches + need.forward) / (1 - _RESERVE)
        return parts["weights"] + parts["answers"] + math.ceil(room)

    def weights_fit(self, nbytes: int) -> bool:
        """Whether so many bytes of weights may be loaded now; reserve them before."""
        return self.fits(Need(nbytes))

    def spare_positions(self, served: ServedModel) -> int:
        """How many positions of a model's caches the reserve has room for."""
        each = (served.memory.bytes_for(2 * _FAR) - served.memory.bytes_for(_FAR)) // _FAR
        return self._spare // max(1, each)

    @property
    def _spare(self) -> int:
        """Half of the reserve: one is for slots of several sequences, one for freed buffers."""
        return int(self.room * _RESERVE / 2)

    # --- changes ---

    def add(self, served: ServedModel) -> None:
        """Count a model that is loaded; a reservation under its name ends."""
        self._models[served.name] = served
        self.release(served.name)
        model = served.decoder.model
        if hasattr(model, "leader"):  # each rank has a part of it, on a machine of its own
            held = mx.get_active_memory() + mx.get_cache_memory()
            self._bound = min(self._bound, held + together(least_free_memory, model))
        self._limit_mlx()
        self.make_room()

    def remove(self, served: ServedModel) -> None:
        """Count a model no longer, nor its idle entries."""
        del self._models[served.name]
        if self._first and self._first.served is served:  # it would hold the model's memory
            self._first = None
        self._limit_mlx()

    def admits(self, request: ServedRequest) -> bool:
        """Whether a request may start: it fits, and none that came earlier waits for memory."""
        first = self._first
        if first and first.state is State.WAITING and first.number < request.number:
            return False
        fits = self.fits(request.need)
        self._first = None if fits else request
        return fits

    def reserve(self, owner: object, need: Need | int) -> None:
        """Reserve memory; idle entries make room for it.

        Args:
            owner: until it is passed to :meth:`release`, the memory is reserved: a request, or the
                name of a model that is being loaded.
            need: what a request needs; for a model, the bytes of its weights.
        """
        self._reserved[owner] = Need(need) if isinstance(need, int) else need
        self.make_room()

    def release(self, owner: object) -> None:
        """End a reservation, if there is one."""
        self._reserved.pop(owner, None)

    def make_room(self) -> None:
        """Evict idle entries, the least recently used of all models first, until all fits."""
        free = self.room - self._forward() - self.reserved
        caches = [one.cache for one in self._models.values()]
        over = sum(cache.nbytes for cache in caches) - max(0, min(free, self.most_idle))
        while over > 0 and (found := [cache for cache in caches if cache.oldest is not None]):
            over -= min(found, key=lambda cache: cast(int, cache.oldest)).make_room(1)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let MLX keep to the bound while the worker runs."""
        before = mx.set_memory_limit(self._bound), mx.set_cache_limit(0)
        self._is_in_force = True
        self._limit_mlx()
        try:
            # Each model's own use of the same limit may then end in any order.
            with wired_limit(nn.Module(), [generation_stream]):
                yield
        finally:
            self._is_in_force = False
            mx.set_memory_limit(before[0])
            mx.set_cache_limit(before[1])

    def _limit_mlx(self) -> None:
        if self._is_in_force:
            mx.set_memory_limit(self._bound)
            mx.set_cache_limit(self._spare)  # of freed buffers that it keeps for later arrays


def in_words(nbytes: int) -> str:
    """A size for people, in the units of ``--memory``, rounded down."""
    mebibytes = nbytes >> 20
    return f"{mebibytes / 1024:,.1f} GiB" if mebibytes >= 10_000 else f"{mebibytes:,} MiB"
