"""Random trees and rejections on every kind of cache never change plain decoding's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.target import Capability
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import TruthDrafter
from tests.support.examples import examples
from tests.support.harness import next_logits, run

pytestmark = pytest.mark.slow

VOCABULARY = 64
LENGTH = 30
LONGEST_PROMPT = 30


@dataclass(frozen=True)
class Kind:
    """A kind of cache: a model that has it, and the options that select it."""

    name: str
    options: CacheOptions | None = None
    wide_heads: bool = False


KINDS = {
    "plain": Kind("llama3"),
    "sliding and full": Kind("gemma3"),
    "with sinks": Kind("gpt_oss"),
    "bounded": Kind("mixtral", CacheOptions(max_kv_size=12)),
    "quantised": Kind("llama3", CacheOptions(8, 32, 0), wide_heads=True),
    "quantised later": Kind("llama3", CacheOptions(8, 32, 25), wide_heads=True),
    "latent": Kind("deepseek_v3"),
    "lists": Kind("deepseek_v32"),
    "chunked": Kind("llama4"),
    "state": Kind("mamba2"),
    "state and window": Kind("recurrent_gemma"),
    "state and full": Kind("lfm2"),
}


@cache
def model_of(kind: Kind) -> nn.Module:
    architecture = ARCHITECTURES[kind.name]
    if kind.wide_heads:
        architecture = replace(architecture, config={**architecture.config, "head_dim": 32})
    return architecture.model()


class DrawnTrees(TruthDrafter):
    """Drafts from recipes; each branch has true tokens, a wrong one, and more true ones."""

    pipelined = True

    def __init__(self, truth: Sequence[int], recipes: list[list[tuple[int, int]]]) -> None:
        super().__init__(truth)
        self._recipes = recipes

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._steps = 0

    def propose(self, max_depth: int) -> DraftTree:
        branches = self._recipes[self._steps % len(self._recipes)] if self._recipes else []
        self._steps += 1
        return DraftTree.from_branches(self._last, [self._branch(*recipe) for recipe in branches])

    def _branch(self, right: int, after: int) -> list[int]:
        ahead = self._truth[self._emitted : self._emitted + right + 1 + after]
        if right < len(ahead):
            ahead[right] = (ahead[right] + 1 + after) % VOCABULARY
        return ahead

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", KINDS)
def test_any_trees_and_rejections_leave_output_and_cache_as_they_are(name: str) -> None:
    kind = KINDS[name]
    model, capability = model_of(kind), ARCHITECTURES[kind.name].capability
    options = {"capability": capability, "cache": kind.options, "max_tokens": LENGTH}
    branch = st.tuples(st.integers(0, 7), st.integers(0, 4))

    @settings(max_examples=examples(4))
    @given(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST_PROMPT),
        recipes=st.lists(st.lists(branch, max_size=3), max_size=12),
    )
    def check(prompt: list[int], recipes: list[list[tuple[int, int]]]) -> None:
        expected = run(model, prompt, NoDraft(), **options)
        actual = run(model, prompt, DrawnTrees(expected.tokens, recipes), **options)
        assert actual.tokens == expected.tokens
        assert mx.max(mx.abs(actual.logprobs - expected.logprobs)).item() < 1e-4
        # The cache's content is the same, too.
        last = expected.tokens[-1]
        difference = next_logits(actual.target, last) - next_logits(expected.target, last)
        assert mx.max(mx.abs(difference)).item() < 1e-3

    check()


def test_every_tier_is_among_the_kinds() -> None:
    capabilities = {ARCHITECTURES[kind.name].capability for kind in KINDS.values()}
    assert capabilities == {*Capability} - {Capability.PLAIN}
