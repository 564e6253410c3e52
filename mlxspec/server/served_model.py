"""A served model: its memory, its prefix cache, and the decoders of its clients."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..corpus import MAX_TOKENS
from ..drafting.drafter import Drafter
from ..engine.costs import least_free_memory, row_memory
from ..engine.model_sizes import CacheKind, cache_kinds, context_length
from ..engine.params import CacheOptions
from ..engine.target import together, vocabulary_size
from ..generation.decoder import Decoder
from ..generation.drafting import Auto
from ..generation.options import GenerationOptions
from ..generation.session import MARKS, UNDOABLE, Session
from .body import ApiError
from .prefix_cache import PrefixCache
from .requests import ApiRequest

_STEP = 256  # positions by which caches grow
_SLACK = 16 + _STEP  # positions that a window holds beyond its size
_ROWS = 64  # rows of a step of all sequences; more rarely pay
_SCORES = 4  # arrays over the vocabulary for each row: logits, log-probabilities, filters
_RESERVE = 0.1  # share of the memory for growing joint caches, drafters' indexes, the process
_CACHE_SHARE = 0.5  # share of the caches' limit for idle entries of the prefix cache


class CacheMemory:
    """The memory of one model's caches.

    Args:
        model: an mlx-lm model, with its weights in memory.
        options: the cache options.
        limit: the most bytes of all caches. By default it is what remains after the weights, a
            forward and a reserve. Read :attr:`limit` once before there are caches.

    Attributes:
        options: the cache options.
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
    def limit(self) -> int:
        """The most bytes of all caches, used and idle."""
        if self._given_limit is not None:
            return self._given_limit
        free = together(least_free_memory, self._model)
        return max(0, int(free * (1 - _RESERVE)) - self.forward_bytes)

    @property
    def default_cache_bytes(self) -> int:
        """The part of the limit that the prefix cache takes by default."""
        return int(self.limit * _CACHE_SHARE)

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


# The most partitions with a memory, and the tokens that each remembers: about 100 MB in all.
_MOST_APART = 32
_TOKENS_APART = MAX_TOKENS // 4


@dataclass
class ServedModel:
    """A served model.

    Each partition, such as a client's key, drafts from its own answers only. It also learns from
    them only how likely drafts are right. Otherwise accepted drafts, and the speed of answers,
    would reveal one client's answers to another. The least recently used partitions are forgotten.

    Attributes:
        name: the model's name in requests.
        decoder: the decoder, with its model loaded and its costs known.
        cache: the prefix cache.
        memory: the memory of its caches.
        options: default generation options, overridden by a request's.
        template_arguments: default arguments of the chat template, overridden by a request's.
        owner: the partition that uses the decoder's own memory. The others have memories of their
            own, in the process only.
        path: the path from which the user loaded it, another name for it in requests.
        created: when it was loaded, in seconds since 1970.
    """

    name: str
    decoder: Decoder
    cache: PrefixCache
    memory: CacheMemory
    options: GenerationOptions = field(default_factory=GenerationOptions)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    owner: str = field(default="", repr=False)
    path: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _apart: OrderedDict[str, Decoder] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    """The decoders of other partitions, the least recently used first."""

    @property
    def context_length(self) -> int | None:
        """The context length in tokens; None if the model does not state it."""
        return context_length(self.decoder.model)

    @cached_property
    def special_tokens(self) -> list[int]:
        """The tokens that XTC never drops: line breaks and end tokens."""
        tokenizer = self.decoder.tokenizer
        return [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]

    @property
    def predicts(self) -> bool:
        """Whether it drafts from clients' predictions."""
        return isinstance(self.decoder.drafting, Auto)

    def max_tokens_for(self, n_prompt: int, body: ApiRequest, default: int) -> int:
        """The most tokens of an answer: what the request asks for, or as many as fit.

        Args:
            n_prompt: the number of tokens of the prompt.
            body: the request.
            default: the number of tokens if the request has none.

        Raises:
            ApiError: 400, prompt and answer exceed the context; 413, their caches would not fit
                into memory even if nothing else ran.
        """
        longest, memory, wanted = self.context_length, self.memory, body.max_tokens
        if longest is not None and n_prompt >= longest:
            raise ApiError(
                # Claude Code parses both numbers, and shortens the conversation.
                f"the prompt is too long: {n_prompt} tokens > {longest}, which is the model's "
                "context: shorten it",
                param=body.param,
                code="context_length_exceeded",
            )
        if wanted is None or body.cuts_max_tokens:
            wanted = wanted or default
            if longest is not None:
                wanted = min(wanted, longest - n_prompt)
            while wanted > 1 and memory.bytes_for(n_prompt + wanted) > memory.limit:
                wanted //= 2
        elif longest is not None and n_prompt + wanted > longest:
            raise ApiError(
                f"the model's context has {longest} tokens; the prompt has {n_prompt} and the "
                f"answer may have {wanted}: shorten the prompt or ask for fewer",
                param=body.param,
                code="context_length_exceeded",
            )
        needed = memory.bytes_for(n_prompt + wanted)
        if needed > memory.limit:
            raise ApiError(
                f"the caches of {n_prompt} prompt tokens and {wanted} answer tokens need "
                f"{needed >> 20} MiB, but only {memory.limit >> 20} MiB are available: "
                "shorten the prompt or ask for fewer tokens",
                status=413,
                code="out_of_memory",
            )
        return wanted

    def make_drafter(
        self, prediction: Sequence[int], partition: str, session: Session | None
    ) -> Drafter:
        """The drafter of one generation; called only in the worker's thread.

        Args:
            prediction: token ids that the client expects as output.
            partition: the partition whose answers it drafts from, and adds its own to.
            session: the generation's session.
        """
        decoder = self._decoder_of(partition)
        drafting = decoder.drafting
        if isinstance(drafting, Auto):
            drafting = replace(drafting, prediction=prediction)
        return drafting.make(decoder, session)

    def _decoder_of(self, partition: str) -> Decoder:
        if partition == self.owner:
            return self.decoder
        own = self._apart.pop(partition, None) or self.decoder.apart(_TOKENS_APART)
        self._apart[partition] = own
        while len(self._apart) > _MOST_APART:
            self._apart.popitem(last=False)
        return own
