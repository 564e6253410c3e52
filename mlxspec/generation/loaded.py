"""A loaded model, and what is found out about it: drafts, chunks, costs, lessons."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper

from ..corpus.settings import SWITCH
from ..drafting.drafter import Drafter
from ..drafting.kept import Experience, experience_path
from ..engine.caches import smallest_window
from ..engine.capability import (
    chain_capability,
    draft_end,
    examine_chunks,
    examine_joint,
    find_capability,
    first_crossing,
)
from ..engine.costs import KeptCosts, costs_for, model_identity
from ..engine.joint import JointMode
from ..engine.target import Capability, evaluate_constants, vocabulary_size
from ..models.detokenizer import detokenizer_of
from ..models.tokenizer import vocabulary_classes
from .response import StepTimes

_log = logging.getLogger(__name__)


class LoadedModel:
    """A model with its tokenizer, and what is found out about it, each on first use.

    Args:
        model: mlx-lm's.
        tokenizer: the model's.
        on_measuring: called with the share done, 0 to 1, while step times are first measured.
    """

    remembers = True
    """Whether outputs are remembered, where there is a memory, and teach later generations."""

    keeps_experience = True
    """Whether what planned generations teach is kept on disk; see :mod:`mlxspec.drafting.kept`."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        on_measuring: Callable[[float], None] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        evaluate_constants(model)
        self.step_times = StepTimes()
        """Wall time of this decoder's steps by their number of rows."""
        self.wrap_drafter: Callable[[Drafter], Drafter] | None = None
        """Wraps the drafter of each generation, to watch what it does; None wraps nothing."""
        self._costs: KeptCosts | None = None
        self._measuring = threading.Lock()
        self._on_measuring = on_measuring

    @property
    def plans(self) -> bool:
        """Whether drafts are planned by what steps cost."""
        return False

    @cached_property
    def capability(self) -> Capability:
        """What drafts the model can verify; found out on first use, with a few forwards."""
        finding = find_capability(self.model, self.draft_end)
        _log.info("what the model verifies: %s (%s)", finding.capability.value, finding.reason)
        return finding.capability

    @cached_property
    def chain_capability(self) -> Capability:
        """What the model can verify of chains; found out with fewer forwards."""
        return chain_capability(self.model)

    @cached_property
    def joint_mode(self) -> JointMode:
        """How several sequences share one forward; found out with small forwards."""
        mode, _ = examine_joint(self.model, self.chain_capability)
        _log.info("how several sequences share forwards: %s", mode.value)
        return mode

    @cached_property
    def draft_end(self) -> int | None:
        """The position from which on nothing is drafted, since the model verifies no draft there.

        None for all models but those whose RoPE changes with the context's length (dynamic NTK).
        Found out with a few forwards, once a context comes near such a change.
        """
        return draft_end(self.model)

    @cached_property
    def first_crossing(self) -> int:
        """The first position after which the model might verify no drafts."""
        return first_crossing(self.model)

    @cached_property
    def _chunk_end(self) -> int | None:
        """The length up to which a prompt gives the same in any chunks; None if all do."""
        return examine_chunks(self.model, self.chain_capability, self.draft_end)[0]

    def chunks_matter(self, length: int, caches: Sequence[Any]) -> bool:
        """Whether a prompt gives something else in other chunks than mlx-lm's.

        Such a prompt runs in mlx-lm's chunks, whatever else runs, and shares no prefix. Most models
        have none.

        Args:
            length: in positions, those that the caches hold already included.
            caches: mlx-lm's, or a target's, for the prompt.
        """
        if self.chain_capability is Capability.PLAIN:
            return True
        # mlx-lm's mask hides the first positions, which such a cache keeps, from rows of a chunk.
        bound = smallest_window(caches, keeping=True)
        if bound is not None and length > bound:
            return True
        if length <= min(self.first_crossing, smallest_window(caches) or length):
            return False  # so nothing has to be tried
        return self._chunk_end is not None and length > self._chunk_end

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return vocabulary_size(self.model)

    @cached_property
    def token_classes(self) -> bytes:
        """Of each token; see :func:`mlxspec.drafting.acceptance.token_classes`."""
        return vocabulary_classes(self.tokenizer)

    def new_detokenizer(self) -> StreamingDetokenizer:
        """Turns the tokens of one output into text."""
        return detokenizer_of(self.tokenizer)

    @property
    def costs(self) -> KeptCosts:
        """What steps cost: read from the cost file, or measured now in a few seconds."""
        with self._measuring:  # else threads would disturb each other's measurements
            if self._costs is None:
                self._costs = costs_for(self.model, on_progress=self._on_measuring)
            return self._costs

    @costs.setter
    def costs(self, costs: KeptCosts | None) -> None:
        self._costs = costs

    @property
    def predicted_cost(self) -> float:
        """How long the steps of the last generation should have taken, in plain steps.

        By the measured costs of rows; 0 where these are not known.
        """
        return self._costs.predicted if self._costs else 0.0

    @cached_property
    def experience(self) -> Experience:
        """What planned generations have taught."""
        if not self.keeps_experience or os.environ.get(SWITCH) == "off":
            return Experience()
        return Experience(experience_path(model_identity(self.model)))
