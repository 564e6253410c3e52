"""How much memory a request will take, and how much there is."""

from __future__ import annotations

from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..engine.cache_memory import CacheKind, cache_kinds
from ..engine.device_memory import free_memory
from ..engine.params import CacheOptions
from ..engine.target import vocabulary_size
from ..generation.session import MARKS, UNDOABLE

_STEP = 256  # positions that caches grow by
_SLACK = 16 + _STEP  # positions that a window holds beyond its size
_ROWS = 64  # of a step of all sequences; more are hardly ever worth their time
_SCORES = 4  # arrays over the vocabulary for each row: logits, log-probabilities, filters
_TRIED = 32  # rows of the forward that tells what a row takes
_RESERVE = 0.1  # of the memory: joint caches that grow, the drafters' indices, the process
_CACHE_SHARE = 0.5  # of what caches may take: entries of the prefix cache that are not in use


class Memory:
    """The memory of one model's requests.

    Args:
        model: an mlx-lm model, with its weights in memory.
        options: of the caches.
        limit: how many bytes caches may take in all; by default what is left beside the weights,
            a forward, and a reserve. Ask for it before there are caches.

    Attributes:
        options: of the caches.
    """

    def __init__(
        self, model: nn.Module, options: CacheOptions | None = None, limit: int | None = None
    ) -> None:
        self.options = options or CacheOptions()
        self._model = model
        self._given_limit = limit
        self._plain = cache_kinds(model, self.options)
        self._quantized: list[CacheKind] = []
        if self.options.kv_bits is not None:
            self._quantized = cache_kinds(model, self.options, quantized=True)

    def bytes_for(self, tokens: int) -> int:
        """What the caches of one sequence with a session take, at the most.

        Args:
            tokens: of the prompt and the answer.
        """
        if not self._quantized:
            return _taken(self._plain, tokens)
        # A whole chunk of the prompt is in the cache before that is quantised.
        start = self.options.quantized_kv_start + self.options.prefill_step_size
        first = min(tokens, start)
        at_first = _taken(self._plain, first) + _taken(self._quantized, first)
        return max(at_first, _taken(self._quantized, tokens))

    @cached_property
    def limit(self) -> int:
        """How many bytes the caches of all requests, and idle ones, may take."""
        if self._given_limit is not None:
            return self._given_limit
        return max(0, int(free_memory() * (1 - _RESERVE)) - self.forward_bytes)

    @property
    def default_cache_bytes(self) -> int:
        """How much of the limit a prefix cache takes by default."""
        return int(self.limit * _CACHE_SHARE)

    @cached_property
    def forward_bytes(self) -> int:
        """What a forward takes beside the caches: a chunk of a prompt, or a step.

        Found out with a forward of a few rows. What attention takes for its scores over a long
        context, as it does on a CPU, has to come from the reserve.
        """
        with mx.stream(generation_stream):
            caches = make_prompt_cache(self._model, self.options.max_kv_size)
            mx.synchronize()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            self._model(mx.array([[0] * _TRIED]), cache=caches)
            mx.eval([cache.state for cache in caches])
            mx.synchronize()
            row = (mx.get_peak_memory() - before) // _TRIED
        chunk = row * self.options.prefill_step_size
        step = _ROWS * (row + _SCORES * 4 * vocabulary_size(self._model))
        return max(chunk, step)


def _taken(kinds: list[CacheKind], tokens: int) -> int:
    return sum(kind.count * _taken_by_one(kind, tokens) for kind in kinds)


def _taken_by_one(kind: CacheKind, tokens: int) -> int:
    """The size of one cache, with the states that are kept of it to return to."""
    if kind.state_bytes is not None:
        return kind.state_bytes * (1 + MARKS + UNDOABLE)
    each = kind.bytes_per_position or 0
    whole = (tokens + _STEP) * each
    if kind.positions is None:
        return whole
    return min(whole, (kind.positions + _SLACK) * each) * (1 + MARKS)
