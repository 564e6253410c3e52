"""A small model as a drafter: classic speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..corpus.suffix_index import common_length
from ..drafting.accept import VerifiedStep
from ..drafting.drafter import Drafter
from ..drafting.tree import DraftTree
from ..errors import OptionError, whole
from .capability import capability_with
from .loaded_model import LoadedModel
from .sampling import Perturb, draft_values
from .target import Capability, Target

_MOST_PADDING = 1024  # the most that the output layers for one tokenizer may differ by, in tokens


class DraftModelDrafter(Drafter):
    """Drafts a chain of tokens chosen by another model.

    (Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding",
    ICML 2023, arXiv 2211.17192. Here the target accepts a token if it would have chosen the same.)
    In a generation, the draft model samples with the output's temperature, filters and random
    numbers. If the models are similar, most of its samples then equal the target's; see
    :func:`mlxspec.engine.sampling.draft_values`. Without :meth:`attach`, it takes the most likely
    tokens. The draft model has its own KV cache, which is trimmed when drafts are rejected. As the
    second drafter of a :class:`mlxspec.CombinedDrafter`, it drafts only if the first drafter has no
    draft.

    Args:
        model: an mlx-lm model, or a :class:`.LoadedModel`, with the target's tokenizer.
        num_draft_tokens: the most tokens to draft; the default is mlx-lm's.

    Raises:
        OptionError: ``num_draft_tokens`` is not a whole number, or is below 1.
    """

    branching = False
    is_fallback = True

    def __init__(self, model: nn.Module | LoadedModel, num_draft_tokens: int = 2) -> None:
        self.num_draft_tokens = whole("num_draft_tokens", num_draft_tokens)
        if num_draft_tokens < 1:
            raise OptionError(f"num_draft_tokens is {num_draft_tokens}: draft at least 1 token")
        self.loaded = LoadedModel.of(model)
        # No trial is needed: if rows affect each other, only drafts get worse.
        self._capability = capability_with(make_prompt_cache(self.loaded.model), Capability.CHAIN)
        self._attached: tuple[Target, Perturb] | None = None

    def attach(self, target: Target, perturb: Perturb) -> None:
        self._attached = target, perturb

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a generation: prefill the draft model."""
        undoable = self.num_draft_tokens + 1
        self._target = Target(self.loaded, self._capability, undoable=undoable)
        self._context = list(prompt)
        with mx.stream(generation_stream):
            self._target.prefill(self._readable(self._context[:-1]))

    def propose(self, max_depth: int) -> DraftTree:
        count = min(max_depth, self.num_draft_tokens)
        # The tokens stay lazy: all are read at once, after the last forward has been dispatched.
        drafted: list[mx.array] = []
        if count > 0:
            rows = mx.array(self._readable(self._context[self._target.length :]))
            for place in range(count):
                rows = self._next_token(rows, place)
                drafted.append(rows)
        self._draft = cast(list[int], mx.concatenate(drafted).tolist()) if drafted else []
        return DraftTree.chain(self._context[-1], self._draft, "draft model")

    def observe(self, step: VerifiedStep) -> None:
        right = len(self._context) + common_length(self._draft, [*step.tokens])
        self._context += step.tokens
        kept = min(right, len(self._context) - 1)  # the last token will run in the next step
        with mx.stream(generation_stream):
            self._target.truncate(min(self._target.length, kept))

    def end(self) -> None:
        self._attached = None  # frees the target's caches

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, with 0 in place of ids that only the target's padded vocabulary has."""
        size = self.loaded.vocab_size
        return [token if token < size else 0 for token in tokens]

    def _next_token(self, tokens: mx.array, place: int) -> mx.array:
        """Run tokens, (rows,); return the token at index ``place`` of the draft, (1,)."""
        tree = DraftTree.chain(0, [0] * (len(tokens) - 1))  # only the size matters
        with mx.stream(generation_stream):
            values = self._target.forward(tokens, tree)[-1:]
            if self._attached:
                target, perturb = self._attached
                values = _resized(values, target.loaded.vocab_size)
                values = draft_values(values, place, target, perturb)
            token = mx.argmax(values, axis=-1)
        self._target.commit(range(len(tokens)))
        mx.async_eval(token)
        return token


def _resized(logits: mx.array, size: int) -> mx.array:
    """Logits cut or padded to ``size`` tokens, whose number affects the noise. Padding is never
    chosen.
    """
    missing = max(0, size - logits.shape[-1])
    return mx.pad(logits[:, :size], [(0, 0), (0, missing)], constant_values=-mx.inf)


def check_vocabularies(draft_model: LoadedModel, vocab_size: int, tokenizer_size: int) -> None:
    """Refuse a draft model that cannot have the target's tokenizer.

    Args:
        draft_model: the model that drafts.
        vocab_size: the number of token ids that the target knows, padding included.
        tokenizer_size: the number of tokens in the target's tokenizer.

    Raises:
        OptionError: the draft model lacks tokens, or has many that the target lacks.
    """
    own = draft_model.vocab_size
    if own < min(tokenizer_size, vocab_size) or abs(own - vocab_size) > _MOST_PADDING:
        raise OptionError(
            f"draft_model has a vocabulary of {own} tokens, and the model of {vocab_size}: "
            "choose a draft model with the same tokenizer"
        )
