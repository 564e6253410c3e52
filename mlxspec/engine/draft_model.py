"""A small model that drafts for another one: classic speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..corpus.suffix_index import common_length
from ..drafting.accept import VerifiedStep
from ..drafting.heads import FEW_ROWS, HeadExperience, HeadSource
from ..drafting.tree import DraftTree
from ..errors import OptionError, whole
from .calibration import costs_for
from .capability import capability_with
from .heads import choose
from .loaded_model import LoadedModel
from .target import Capability, Target, evaluate_constants

_MOST_PADDING = 1024  # the most that the output layers for one tokenizer may differ by, in tokens


class DraftModel:
    """A model that drafts for another one with the same tokenizer.

    (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
    ICML 2023, arXiv 2211.17192. Here the target accepts a token if it would have chosen the same.)

    Args:
        model: an mlx-lm model, or a :class:`.LoadedModel`.
        num_draft_tokens: the most tokens to draft.

    Attributes:
        loaded: the model, with what mlxspec knows about it.
        capability: how the model verifies rows.

    Raises:
        OptionError: ``num_draft_tokens`` is not a whole number, or is below 1.
    """

    def __init__(self, model: nn.Module | LoadedModel, num_draft_tokens: int) -> None:
        self.num_draft_tokens = whole("num_draft_tokens", num_draft_tokens)
        if num_draft_tokens < 1:
            raise OptionError(f"num_draft_tokens is {num_draft_tokens}: draft at least 1 token")
        self.loaded = LoadedModel.of(model)
        # No trial is needed: if rows affect each other, only drafts get worse.
        self.capability = capability_with(make_prompt_cache(self.loaded.model), Capability.CHAIN)
        evaluate_constants(self.loaded.model)

    @cached_property
    def experience(self) -> HeadExperience:
        """The time of drafts, which begins with that of the model's plain steps, and how often they
        have been right.
        """
        seconds = costs_for(self.loaded).plain_seconds
        return HeadExperience(seconds, seconds, self.num_draft_tokens)

    def check_vocabulary(self, vocab_size: int, tokenizer_size: int) -> None:
        """Refuse a target that cannot have the same tokenizer.

        Args:
            vocab_size: the number of token ids that the target knows, padding included.
            tokenizer_size: the number of tokens in the target's tokenizer.

        Raises:
            OptionError: the draft model lacks tokens, or has many that the target lacks.
        """
        size = self.loaded.vocab_size
        if size < min(tokenizer_size, vocab_size) or abs(size - vocab_size) > _MOST_PADDING:
            raise OptionError(
                f"draft_model has a vocabulary of {size} tokens, and the model of {vocab_size}: "
                "choose a draft model with the same tokenizer"
            )


class DraftModelDrafts(HeadSource):
    """Drafts with a draft model for one generation.

    The draft model samples with the output's temperature, filters and random numbers. If the models
    are similar, most of its samples then equal the target's; see
    :func:`mlxspec.engine.sampling.draft_values`. It has its own KV cache, which is trimmed when
    drafts are rejected.

    Args:
        model: the draft model, whose experience this generation adds to.
    """

    origin = "draft model"

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model.experience)
        self._model = model

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation. The draft model reads the prompt with the first draft, if there is
        one, since its drafts may never pay.
        """
        super().begin(prompt)
        model = self._model
        self._caches = Target(model.loaded, model.capability, undoable=model.num_draft_tokens + 1)
        self._context, self._drafted = list(prompt), list[int]()
        self._prefill(())  # converts the caches

    @classmethod
    def _run(cls, heads: Sequence[Self], depth: int) -> list[tuple[list[int], list[float]]]:
        # The tokens stay lazy: all are read at once, after the last forward has been dispatched.
        tokens, confidences = zip(*(head._lazy_draft(depth) for head in heads), strict=True)
        with mx.stream(generation_stream):
            drafted = mx.stack(list(tokens)), mx.stack(list(confidences))
        drafts = list(zip(*(cast(list[Any], array.tolist()) for array in drafted), strict=True))
        for head, (draft, _) in zip(heads, drafts, strict=True):
            head._drafted = draft
        return drafts

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        right = len(self._context) + common_length(self._drafted, [*step.tokens])
        self._context += step.tokens
        self._drafted = []
        kept = min(right, len(self._context) - 1)  # the last token has not run yet
        with mx.stream(generation_stream):
            self._caches.truncate(min(self._caches.length, kept))

    @property
    def behind(self) -> int:
        return len(self._context) - self._caches.length

    def _prefill(self, tokens: Sequence[int]) -> None:
        with mx.stream(generation_stream):
            self._caches.prefill(self._readable(tokens))

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, with 0 in place of ids that only the target's padded vocabulary has."""
        size = self._model.loaded.vocab_size
        return [token if token < size else 0 for token in tokens]

    def _lazy_draft(self, depth: int) -> tuple[mx.array, mx.array]:
        """Draft ``depth`` tokens; return them and their confidences, (depth,) each, lazy."""
        if self.behind > FEW_ROWS:
            self._prefill(self._context[self._caches.length : -1])
        rows = mx.array(self._readable(self._context[self._caches.length :]))
        tokens, confidences = [], []
        with mx.stream(generation_stream):
            for place in range(depth):
                tree = DraftTree.chain(0, [0] * (len(rows) - 1))  # only the size matters
                logits = self._caches.forward(rows, tree)[-1:]
                logits = _resized(logits, self.target.loaded.vocab_size)
                rows, confidence = choose([self], logits, place)
                self._caches.commit(range(len(tree)))
                mx.async_eval(rows, confidence)
                tokens.append(rows)
                confidences.append(confidence)
            return mx.concatenate(tokens), mx.concatenate(confidences)


def _resized(logits: mx.array, size: int) -> mx.array:
    """Logits cut or padded to ``size`` tokens, whose number affects the noise. Padding is never
    chosen.
    """
    missing = max(0, size - logits.shape[-1])
    return mx.pad(logits[:, :size], [(0, 0), (0, missing)], constant_values=-mx.inf)
