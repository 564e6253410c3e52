"""A served model: the memory that it needs, its prefix cache, and the decoders of its clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generation_stream

from ..cache_files import cache_directory, file_name, read_kept, write_among_newest
from ..corpus.answer_index import MAX_TOKENS, AnswerIndex
from ..corpus.suffix_index import MOST_BYTES
from ..drafting.drafter import Drafter
from ..drafting.planner import Planner
from ..engine.calibration import forward_memory
from ..engine.loaded_model import LoadedModel
from ..engine.machine import machine_identity, model_identity
from ..engine.model_sizes import CacheKind, cache_kinds, context_length
from ..engine.params import CacheOptions
from ..engine.target import UNDOABLE, together
from ..generation.decoder import Decoder
from ..generation.drafter_factories import Auto
from ..generation.session import MARKS
from .prefix_cache import PrefixCache

if TYPE_CHECKING:
    from ..engine.draft_model import DraftModel
    from ..engine.grammar import Grammar

_STEP = 256  # positions by which caches grow
_SLACK = 16 + _STEP  # positions that a window's cache may hold beyond the window
_ROWS = 64  # rows of a large joint step; more rows rarely pay
_SCORES = 4  # arrays over the vocabulary for each row: logits, log-probabilities, filters


class Need(NamedTuple):
    """The memory that a request may need.

    Attributes:
        caches: the bytes of its own caches, and of the index that it drafts from.
        forward: the bytes of buffers in its largest forward; only one forward runs at a time.
    """

    caches: int
    forward: int = 0


@dataclass(eq=False)
class CacheMemory:
    """The memory that one model's weights, caches and forwards need.

    Attributes:
        loaded: the model, with its weights in memory.
        options: the cache options.
        draft_model: the draft model that drafts for it, if any.
    """

    loaded: LoadedModel
    options: CacheOptions = field(default_factory=CacheOptions)
    draft_model: DraftModel | None = None

    def __post_init__(self) -> None:
        self._draft = CacheMemory(self.draft_model.loaded) if self.draft_model else None
        self._plain = cache_kinds(self.loaded, self.options)
        self._quantized: list[CacheKind] = []
        if self.options.kv_bits is not None:
            self._quantized = cache_kinds(self.loaded, self.options, quantized=True)
        trained = self._trained = self.loaded.trained_head
        self._waiting = trained.new_cache(0).waiting_bytes(_ROWS) if trained else 0

    def needs(self, tokens: int) -> Need:
        """The memory that a request needs for ``tokens`` tokens of prompt and answer."""
        caches = self.bytes_for(tokens) + MOST_BYTES * tokens
        chunk = min(tokens, self.options.prefill_step_size)
        forward = max(self.forward_bytes(tokens, chunk), self.step_bytes(tokens))
        if self._draft:
            drafts = self._draft.needs(tokens)
            caches, forward = caches + drafts.caches, max(forward, drafts.forward)
        return Need(caches, forward)

    def bytes_for(self, tokens: int) -> int:
        """The most bytes that the caches of one sequence, with its session, can take.

        Args:
            tokens: the number of tokens of the prompt and the answer.
        """
        if not self._quantized:
            return self._waiting + _taken(self._plain, tokens)
        # A whole chunk of the prompt is cached before it is quantised.
        start = self.options.quantized_kv_start + self.options.prefill_step_size
        first = min(tokens, start)
        at_first = _taken(self._plain, first) + _taken(self._quantized, first)
        return self._waiting + max(at_first, _taken(self._quantized, tokens))

    @cached_property
    def weights(self) -> int:
        """The bytes of all weights, including those of a trained head and a draft model."""
        modules = [self.loaded.model, *([self._trained.head] if self._trained else ())]
        arrays = [array for module in modules for _, array in tree_flatten(module.parameters())]
        nbytes = sum(array.nbytes for array in {id(array): array for array in arrays}.values())
        return nbytes + (self._draft.weights if self._draft else 0)

    def forward_bytes(self, tokens: int, rows: int) -> int:
        """The memory of a forward over ``rows`` rows of a prompt, without the caches.

        It is extrapolated from forwards over a few rows.

        Args:
            tokens: the length of the context that the rows attend to.
        """
        (row, row_and_position), _ = self._measured
        return int(rows * (row + row_and_position * tokens))

    def step_bytes(self, tokens: int = 0) -> int:
        """The memory of the largest joint step, with the scores of its rows, without the caches."""
        return self.forward_bytes(tokens, _ROWS) + _ROWS * self._measured[1]

    @cached_property
    def _measured(self) -> tuple[tuple[int, float], int]:
        """The result of :func:`forward_memory`, and the bytes per row for logits and the like.

        The result is kept on disk, by all that it depends on.
        """
        group = self.loaded.group
        key = [
            *(version("mlx-lm"), machine_identity(), model_identity(self.loaded.model)),
            *(self.options.max_kv_size, group.size() if group else 1),
            model_identity(self._trained.head) if self._trained else None,
        ]
        path = cache_directory() / "forward_memory" / file_name(key)
        measured = read_kept("memory of forwards", path, tuple[int, float])
        if measured is None:
            with mx.stream(generation_stream):
                measured = together(forward_memory, self.loaded, self.options.max_kv_size)
            write_among_newest(path, measured)
        return measured, _SCORES * 4 * self.loaded.vocab_size


def _taken(kinds: list[CacheKind], tokens: int) -> int:
    return sum(kind.count * _taken_by_one(kind, tokens) for kind in kinds)


def _taken_by_one(kind: CacheKind, tokens: int) -> int:
    """The size of one cache, including the earlier states kept for rewinding."""
    if kind.state_bytes is not None:
        return kind.state_bytes * (1 + MARKS + UNDOABLE)
    each = kind.bytes_per_position or 0
    whole = (tokens + _STEP) * each
    if kind.positions is None:
        return whole
    return min(whole, (kind.positions + _SLACK) * each) * (1 + MARKS)


# The most keys with their own memory, and the tokens in each memory: about 100 MB in all.
_MOST_KEYS = 32
_TOKENS_PER_KEY = MAX_TOKENS // 4


@dataclass
class ServedModel:
    """A served model.

    If there are several keys, each drafts only from its own answers, and learns only from them how
    likely drafts are right. Otherwise accepted drafts, and the speed of answers, would reveal one
    client's answers to another. The least recently used keys are forgotten.

    Attributes:
        name: the model's name in requests.
        decoder: the decoder, with its model loaded.
        cache_options: the cache options of all requests.
        template_arguments: default arguments of the chat template, overridden by a request's.
        memory: the memory needs of its weights, caches and forwards.
        cache: the prefix cache.
    """

    name: str
    decoder: Decoder
    cache_options: CacheOptions = field(default_factory=CacheOptions)
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._decoders: dict[str, Decoder] = {}
        """The decoders that draft for one key each, the least recently used first."""
        decoder = self.decoder
        factory = decoder.drafter_factory
        draft_model = factory.draft_model if isinstance(factory, Auto) else None
        self.memory = CacheMemory(decoder.loaded, self.cache_options, draft_model)
        self.cache = PrefixCache(decoder.model, self.cache_options, decoder.loaded.chunks_matter)

    @property
    def context_length(self) -> int | None:
        """The context length in tokens; None if the model does not state it."""
        return context_length(self.decoder.model)

    @property
    def answer_indexes(self) -> list[AnswerIndex]:
        """The earlier answers to draft from, of all keys."""
        decoders = [self.decoder, *self._decoders.copy().values()]
        factories = [decoder.drafter_factory for decoder in decoders]
        memories = [factory.memory for factory in factories if isinstance(factory, Auto)]
        return [memory for memory in memories if memory]

    @cached_property
    def special_tokens(self) -> list[int]:
        """The tokens that XTC never drops: line breaks and end tokens."""
        tokenizer = self.decoder.tokenizer
        return [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]

    def make_drafter(
        self, prediction: Sequence[int], key: str, grammar: Grammar | None
    ) -> Drafter | Planner | None:
        """The drafter of one generation; called only in the worker's thread.

        Args:
            prediction: token ids that the client expects as output.
            key: the client's key if there are several. Drafts come only from its answers.
            grammar: the grammar of a constrained output.
        """
        decoder = self._decoder_of(key)
        factory = decoder.drafter_factory
        if isinstance(factory, Auto):
            factory = replace(factory, prediction=prediction)
        return factory.make(decoder, grammar)

    def _decoder_of(self, key: str) -> Decoder:
        if not key:
            return self.decoder
        decoder = self._decoders.pop(key, None) or self.decoder.with_separate_memory(
            _TOKENS_PER_KEY
        )
        self._decoders[key] = decoder
        if len(self._decoders) > _MOST_KEYS:
            del self._decoders[next(iter(self._decoders))]
        return decoder
