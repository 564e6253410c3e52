"""Rejected drafts leave no memory allocated."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.caches import held_arrays
from mlxspec.engine.target import Capability
from tests.support.drafters import TruthDrafter
from tests.support.examples import examples
from tests.support.harness import run
from tests.support.random_models import MAMBA_2, random_model

pytestmark = pytest.mark.slow

TOKENS = examples(500, long=1200)
WRONG = (60, 61, 62)  # the models never emit this token
SLIDING_MISTRAL = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS = {
    "window": (Capability.TREE, "llama", SLIDING_MISTRAL),  # one layer's window beside a full cache
    "replay": (Capability.REPLAY, "mamba2", {**MAMBA_2, "num_hidden_layers": 1}),
}


class WrongDrafts(TruthDrafter):
    """Drafts wrong tokens, starting after a number of emitted tokens."""

    def __init__(self, begin_at: int) -> None:
        super().__init__([])
        self._begin_at = begin_at
        self.rejected = 0

    @property
    def pipelined(self) -> bool:
        return self._emitted < self._begin_at

    def propose(self, max_depth: int) -> DraftTree:
        if self._emitted < self._begin_at or max_depth < 1:
            return DraftTree.chain(self._last)
        return DraftTree((self._last, *WRONG), (-1, 0, 0, 0))

    def observe(self, step: VerifiedStep) -> None:
        super().observe(step)
        self.rejected += step.drafted - len(step.accepted)


@dataclass
class Memory:
    """Bytes beside the model's: the peak, and the rest after the generation."""

    peak: int
    left: int
    rejected: int
    caches: list[int]


def memory_of(model: nn.Module, capability: Capability, begin_at: int) -> Memory:
    drafter = WrongDrafts(begin_at)
    gc.collect()  # free other tests' garbage now
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    outcome = run(
        model, [1, 2, 3], drafter, max_tokens=TOKENS, capability=capability, keeps_logprobs=False
    )
    mx.synchronize()
    return Memory(
        mx.get_peak_memory() - before,
        mx.get_active_memory() - before,
        drafter.rejected,
        [sum(one.nbytes for one in held_arrays([cache])) for cache in outcome.target.cache],
    )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", MODELS)
def test_peak_memory_does_not_grow_with_the_number_of_rejected_drafts(name: str) -> None:
    capability, model_type, config = MODELS[name]
    model = random_model(model_type, **config)
    # Both end with drafts, since a running step's rows take memory.
    few = memory_of(model, capability, begin_at=TOKENS - 40)
    many = memory_of(model, capability, begin_at=0)
    assert many.rejected > 9 * few.rejected > 0
    # Because of MLX's threads, peaks of equal runs differ by a fifth, and state may be a view of a
    # step's rows. Keeping one row of each rejected draft would take far more.
    assert many.peak <= 1.5 * few.peak
    assert many.left <= 2 * few.left
    if name == "window":
        sliding, full = many.caches
        assert sliding < 0.6 * full
