"""A loaded model and its properties, such as its capability and the costs of its steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..corpus.answers import SWITCH
from ..drafting.acceptance import TokenClasses
from ..drafting.costs import StepTimes
from ..drafting.drafter import Drafter
from ..drafting.learned import Experience, experience_path
from ..engine.caches import smallest_keeping_window
from ..engine.costs import KeptCosts, costs_for, model_identity, with_long_context
from ..engine.joint import JointMode
from ..engine.probes import Probes
from ..engine.target import Capability, evaluate_constants, vocabulary_size
from ..models.tokenizer import VocabularyClasses, detokenizer_of

_log = logging.getLogger(__name__)


class LoadedModel:
    """A model with its tokenizer, and properties that are determined on first use.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
    """

    keeps_experience = True
    """Whether the experience of planned generations is kept on disk; see :class:`.Experience`."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        evaluate_constants(model)
        self.step_times = StepTimes()
        """The wall times of this decoder's steps, by their number of rows."""
        self.wrap_drafter: Callable[[Drafter], Drafter] | None = None
        """Wraps the drafter of each generation, to observe it; None wraps nothing."""
        self._measuring = threading.Lock()

    @cached_property
    def capability(self) -> Capability:
        """Which drafts the model can verify, as trial steps have shown."""
        capability, reason = Probes(self.model).drafts
        _log.info("drafts that the model can verify: %s (%s)", capability.value, reason)
        return capability

    @cached_property
    def chain_capability(self) -> Capability:
        """How the model can verify chains, which fewer trial steps show."""
        return Probes(self.model).chains

    @cached_property
    def joint_mode(self) -> JointMode:
        """How several sequences share one forward, as trial steps have shown."""
        mode, _ = Probes(self.model).joint
        _log.info("how several sequences share forwards: %s", mode.value)
        return mode

    def chunks_matter(self, length: int, caches: Sequence[Any]) -> bool:
        """Whether a prompt's result depends on the chunks that it runs in.

        If so, the prompt always runs in mlx-lm's chunks, and shares no prefix. With most models, no
        prompt's result depends on its chunks.

        Args:
            length: the number of the prompt's positions, including those already in the caches.
            caches: mlx-lm's or a target's caches for the prompt.
        """
        # Some windows keep the context's first positions, but mlx-lm's mask hides them from a
        # chunk's rows.
        bound = smallest_keeping_window(caches)
        if bound is not None and length > bound:
            return True
        return self.chain_capability is Capability.PLAIN

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return vocabulary_size(self.model)

    @cached_property
    def token_classes(self) -> TokenClasses:
        """The class of each token."""
        return VocabularyClasses(self.tokenizer)

    def new_detokenizer(self) -> StreamingDetokenizer:
        """A detokenizer for one output."""
        return detokenizer_of(self.tokenizer)

    @cached_property
    def costs(self) -> KeptCosts:
        """The costs of steps, read from the cost file, or begun with a few plain steps now."""
        with self._measuring:  # threads must not disturb each other's measurements
            if "costs" not in vars(self):
                _ = self.chain_capability  # the measurement's steps need it
                self.costs = costs_for(self.model)
            return self.costs

    def next_costs(self) -> KeptCosts:
        """The costs for a new generation.

        It begins with the latest one's context length and time of the last save. If that one had a
        long context, and steps after one have never been measured, they are measured first.
        """
        if getattr(self.costs, "wants_long_context", False):
            with self._measuring:
                self.costs = with_long_context(self.model, self.costs)
        self.costs = self.costs.for_generation()
        return self.costs

    @cached_property
    def experience(self) -> Experience:
        """The experience of planned generations."""
        if not self.keeps_experience or os.environ.get(SWITCH) == "off":
            return Experience()
        return Experience(experience_path(model_identity(self.model)))
