"""Runs trained heads. They draft with the random numbers that will choose the output's tokens.

:class:`TrainedHead` attaches a head to a model. Every target of that model then has a
:class:`HeadCache`, which follows the target's own caches. :class:`HeadDrafts` drafts for one
generation; it can run the head for several sequences in one forward.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache

from ..drafting.heads import HeadExperience, HeadSource
from ..errors import LoadError
from ..models.heads import Head
from ..models.heads.blocks import DFlash
from ..models.heads.loading import LEFT_OUT
from ..models.heads.settings import args_of, text_of
from ..terminal import one_line
from .caches import SlotKVCache, TreeKVCache, WindowKVCache
from .head_cache import HeadCache
from .hidden import HiddenStates
from .joint import JointCache, JointMode
from .loaded_model import LoadedModel
from .patches import forward_at, install
from .sampling import draft_values
from .target import Capability, Target, evaluate_constants

_log = logging.getLogger(__name__)

_TIMED_DRAFTS = 3
_COMPARED_ROWS = 8192
_ROUNDED = 0.01  # the most that copies of quantised weights differ on average, relative to them


class TrainedHead:
    """A head attached to a model.

    Args:
        head: a head for this model.
        model: an mlx-lm model, which is not changed.

    Attributes:
        model: a copy that returns the same as the given model, and shares its weights.

    Raises:
        LoadError, ValueError: the model's hidden states or its embedding cannot be found.
    """

    def __init__(self, head: Head, model: nn.Module) -> None:
        self.head = head
        self._hidden = HiddenStates(model, head.reads)
        self.model = self._hidden.model
        _share(head, model)
        head.bind(_embedding(model), self._hidden.logits)
        install(head)
        mx.eval(head.parameters())
        evaluate_constants(head)

    def new_model(self) -> LoadedModel:
        """The copy with this head, for generations with the head."""
        return LoadedModel(self.model, self)

    def new_cache(self, length: int) -> HeadCache:
        """The head's caches for a target with ``length`` positions that the head has not seen."""
        return HeadCache(self.head, self._hidden, length)

    def small_caches(self) -> list[Any]:
        """The head's caches with a single lazy entry, which shows how much memory one takes."""
        cache = self.new_cache(0)
        dtype = self.head.embed(mx.array([0])).dtype
        cache.append(mx.zeros(1, mx.int32), mx.zeros((1, self.head.width), dtype))
        return cache.caches

    @functools.cached_property
    def experience(self) -> HeadExperience:
        """The time of the head's drafts, measured at the first use, and how often they have been
        right.
        """
        target = Target(self.new_model(), Capability.CHAIN)
        drafts = HeadDrafts(self, HeadExperience(1, 0, self.head.most))
        drafts.attach(target, lambda logprobs, _: logprobs)
        drafts.begin([0] * 8)
        with mx.stream(generation_stream):
            target.prefill([0] * 8)
            first, full = (
                min(self._timed(drafts, depth) for _ in range(_TIMED_DRAFTS))
                for depth in (1, self.head.most)
            )
        further = max(0.0, full - first) / max(1, self.head.most - 1)
        return HeadExperience(first, further, self.head.most)

    def _timed(self, drafts: HeadDrafts, depth: int) -> float:
        cache = drafts.cache
        cache.note(mx.zeros(1, mx.int32))
        cache.keep(cache.length, (0,))
        mx.eval(cache.arrays)
        started = time.perf_counter()
        self.draft([drafts], depth)
        return time.perf_counter() - started

    def draft(
        self, members: Sequence[HeadDrafts], depth: int
    ) -> list[tuple[list[int], list[float]]]:
        """Draft ``depth`` tokens for each sequence.

        Args:
            members: one for each sequence; all are ``ready``.
            depth: at most the head's ``most``.

        Returns:
            for each sequence, the tokens and the head's confidence in each of them.
        """
        steps = self._block if isinstance(self.head, DFlash) else self._chain
        tokens, confidences = zip(*steps(members, depth), strict=True)
        drafted = mx.stack(list(tokens), axis=1), mx.stack(list(confidences), axis=1)
        mx.eval(*drafted, [member.cache.arrays for member in members])
        return list(zip(*(cast(list[Any], array.tolist()) for array in drafted), strict=True))

    def _chain(
        self, members: Sequence[HeadDrafts], depth: int
    ) -> Iterator[tuple[mx.array, mx.array]]:
        """For each depth, yield the sequences' tokens and their confidences, (sequences,) each."""
        head = self.head
        rows = [member.cache.to_see(member.last) for member in members]
        counts = [len(tokens) for tokens, _ in rows]
        caches = [member.cache.caches or _keys_of(member.target) for member in members]
        tokens, features = (mx.concatenate([*arrays]) for arrays in zip(*rows, strict=True))
        fed, hidden = self._run(tokens, features, counts, caches)
        ends = mx.array([*accumulate(counts)]) - 1
        fed, hidden = fed[:, ends], hidden[:, ends]
        for place in range(depth):
            tokens, confidences = choose(members, head.logits(hidden)[0], place)
            yield tokens, confidences
            if place + 1 < depth:
                fed, hidden = self._run(tokens, fed[0], [1] * len(members), caches)
        for member in members:
            member.cache.has_seen()

    def _block(
        self, members: Sequence[HeadDrafts], depth: int
    ) -> Iterator[tuple[mx.array, mx.array]]:
        """Like :meth:`_chain`, but for a head that drafts all depths in one forward."""
        head = cast(DFlash, self.head)
        tokens = mx.array([member.last for member in members])
        features = [member.cache.to_see(member.last)[1][None] for member in members]
        hidden = head.block(tokens, depth, features, [member.cache.caches for member in members])
        logits = head.logits(hidden)
        for place in range(depth):
            tokens, confidences = choose(members, head.after(logits[:, place], tokens), place)
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
        """Run a chain head over rows of several sequences, and return its result.

        Args:
            tokens: the tokens of all rows, (rows,).
            features: the features of all rows, (rows, width).
            counts: the number of rows of each sequence.
            caches: for each sequence, a cache for each layer.
        """
        head = self.head
        if len(caches) == 1:
            return head(tokens[None], features[None], caches[0])
        ends = [*accumulate(counts)]
        spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        layers = [JointCache(layer, spans, JointMode.SPLIT) for layer in zip(*caches, strict=True)]
        positions = [
            layer_caches[0].offset + row
            for layer_caches, count in zip(caches, counts, strict=True)
            for row in range(count)
        ]
        returned: list[mx.array] = []

        def model(tokens: mx.array, cache: Sequence[Any]) -> mx.array:
            returned.extend(head(tokens, features[None], cache))
            return returned[1]

        forward_at(model, tokens[None], layers, mx.array(positions, dtype=mx.int32))
        return returned[0], returned[1]


def attach_head(head: Head, model: nn.Module) -> TrainedHead | None:
    """Attach a head to a model, and measure the time of its drafts.

    Returns:
        None if the head comes with the model but cannot draft for it; a warning says why.

    Raises:
        LoadError: a head that the user named cannot draft for the model.
    """
    try:
        trained = TrainedHead(head, model)
        _ = trained.experience
    except Exception as error:  # the classes of heads and models may raise anything
        reason = one_line(error) or type(error).__name__
        if head.requested:
            about = f"the head, {head.title}, cannot draft for this model"
            raise LoadError(f"{about} ({reason}); leave it out") from error
        _log.warning(LEFT_OUT, reason)
        return None
    return trained


def _embedding(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """A function from token ids to the input of a model's first layer."""
    embedding, scale = _embedding_module(model)
    return lambda tokens: embedding(tokens) * scale


def _embedding_module(model: nn.Module) -> tuple[nn.Module, float]:
    """A model's embedding, and the factor by which its output is multiplied."""
    for _, module in model.named_modules():
        if "embed_tokens" in module:
            return module.embed_tokens, getattr(module, "embed_scale", 1.0)
    raise LoadError("the model's embedding cannot be found")


def _share(head: Head, model: nn.Module) -> None:
    """Free a head's embedding and output layer where they are copies of the target's.

    Many checkpoints carry such copies, of hundreds of megabytes. Without them, the head uses those
    of its target.
    """
    embedding, scale = _embedding_module(model)
    outputs = [module.lm_head for _, module in model.named_modules() if "lm_head" in module]
    if not outputs and text_of(vars(args_of(model))).get("tie_word_embeddings"):
        outputs = [embedding]
    if "lm_head" in head and outputs and _is_copy(head.lm_head, outputs[0]):
        del head["lm_head"]
    if "embed_tokens" in head and scale == 1.0 and _is_copy(head.embed_tokens, embedding):
        del head["embed_tokens"]


def _is_copy(head_layer: nn.Module, target_layer: nn.Module) -> bool:
    """Whether a head's layer has the weights of its target's.

    If one of them is quantised, the other one is quantised in the same way first. Then a few
    weights may be rounded otherwise, since the originals had different 16-bit types.
    """
    quantised = next((layer for layer in (head_layer, target_layer) if "scales" in layer), None)
    if len(head_layer.weight) != len(target_layer.weight):
        return False
    for start in range(0, len(head_layer.weight), _COMPARED_ROWS):
        first, second = (_rows(layer, start, quantised) for layer in (head_layer, target_layer))
        if first.shape != second.shape:
            return False
        difference, size = mx.abs(first - second).sum(), mx.abs(second).sum()
        if (difference > (_ROUNDED * size if quantised else 0)).item():
            return False
    return True


def _rows(layer: nn.Module, start: int, quantised: nn.Module | None) -> mx.array:
    """Some rows of a layer's weights, quantised and dequantised like another layer if given."""
    rows = slice(start, start + _COMPARED_ROWS)
    packed = [
        layer[name][rows] for name in ("weight", "scales", "biases") if layer.get(name) is not None
    ]
    if quantised is None:
        return packed[0].astype(mx.float32)
    how = {"group_size": quantised.group_size, "bits": quantised.bits, "mode": quantised.mode}
    if "scales" not in layer:
        packed = list(mx.quantize(packed[0], **how))
    else:
        how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return mx.dequantize(*packed, **how).astype(mx.float32)


def choose(
    members: Sequence[HeadSource], logits: mx.array, place: int
) -> tuple[mx.array, mx.array]:
    """The tokens that the head would choose with each sequence's noise, and its confidences.

    Args:
        members: one for each sequence.
        logits: the head's, (sequences, vocabulary).
        place: the number of tokens that have been drafted.
    """
    member_values = [
        draft_values(logits[index : index + 1], place, member.target, member.perturb)
        for index, member in enumerate(members)
    ]
    values = mx.concatenate([array.astype(mx.float32) for array in member_values])
    confidence = mx.exp(values.max(axis=-1) - mx.logsumexp(values, axis=-1))
    return mx.argmax(values, axis=-1), confidence


def _keys_of(target: Target) -> list[KVCache]:
    """The keys and values of the target that a head without caches of its own reads.

    They come from two layers: the last one that sees the whole context, and the last one with a
    window. During a draft, their ``offset`` stays the position of the current token.
    """

    def seen(cache: Any, size: int) -> KVCache:
        end = cache.index(cache.offset)
        entries = cache.place, ..., slice(max(0, end - size), end), slice(None)
        held = KVCache()
        held.keys, held.values = cache.keys[entries], cache.values[entries]
        held.offset = cache.offset
        return held

    full = [cache for cache in target.trimmable if isinstance(cache, TreeKVCache | SlotKVCache)]
    windows = [cache for cache in target.trimmable if isinstance(cache, WindowKVCache)]
    return [seen(full[-1], full[-1].offset), seen(windows[-1], windows[-1].max_size)]


class HeadDrafts(HeadSource):
    """Drafts with a trained head for one generation.

    Args:
        trained: the head, attached to the generation's model.
        experience: how long the head's drafts take, and how often they have been right.
    """

    def __init__(self, trained: TrainedHead, experience: HeadExperience) -> None:
        super().__init__(experience)
        self._trained = trained

    @property
    def cache(self) -> HeadCache:
        """The head's caches for this generation."""
        return cast(HeadCache, self.target.head)

    @property
    def ready(self) -> bool:
        cache = self.target.head
        return cache is not None and cache.is_ready(self.target.length)

    @property
    def behind(self) -> int:
        return self.cache.behind

    @classmethod
    def _run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        with mx.stream(generation_stream):
            return heads[0]._trained.draft(heads, depth)
