"""After Ctrl-C at any line, a target's state matches the tokens that were emitted."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import caches, patches
from mlxspec.engine import target as targets
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.sampling import Chooser, SamplingParams
from mlxspec.engine.target import Capability, Target
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import PartlyRightDrafter
from tests.support.examples import LONG
from tests.support.harness import decode, new_target, plain
from tests.support.interrupts import functions_of, interrupted_anywhere
from tests.support.random_models import random_model

pytestmark = pytest.mark.slow

PROMPT = [7, 3, 9, 3, 5, 8, 2, 6, 1]
FUNCTIONS = functions_of(targets, caches, patches)


def assert_goes_on_rightly(target: Target, context: list[int]) -> None:
    """Assert that the next forward equals mlx-lm's forward over the whole context."""
    assert target.length == len(context) - 1
    logits = target.forward(mx.array(context[-1:]), DraftTree.chain(context[-1]))[-1]
    fresh = target.model(mx.array(context)[None], cache=make_prompt_cache(target.model))[0, -1]
    assert mx.max(mx.abs(logits - fresh)).item() < 1e-4


class Generation:
    """Some steps of a generation on its own target."""

    def __init__(
        self, model: nn.Module, capability: Capability, truth: list[int], seed: int
    ) -> None:
        self.target = new_target(model, capability)
        self.context = PROMPT.copy()
        self.steps = decode(
            self.target,
            PROMPT,
            PartlyRightDrafter(truth, 64, seed),
            Chooser(SamplingParams()),
            max_tokens=40,
            ends=lambda _: False,
        )
        self.take(3)

    def take(self, count: int) -> None:
        for step in itertools.islice(self.steps, count):
            self.context += step.tokens


@pytest.mark.parametrize("seed", [1, 2] if LONG else [1])
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("mamba2", Capability.REPLAY),
        ("recurrent_gemma", Capability.REPLAY),
        ("llama3", Capability.REPLAY),
        ("llama3", Capability.TREE),
        ("gemma3", Capability.TREE),
    ],
)
def test_an_interrupt_anywhere_in_a_step_leaves_the_state_of_before(
    name: str, capability: Capability, seed: int
) -> None:
    model = ARCHITECTURES[name].model()
    patches.install(model)
    truth = plain(model, PROMPT, max_tokens=40, capability=capability)
    for generation in interrupted_anywhere(
        FUNCTIONS,
        lambda: Generation(model, capability, truth, seed),
        lambda generation: generation.take(2),
    ):
        generation.steps.close()
        assert_goes_on_rightly(generation.target, generation.context)


def test_a_truncation_that_is_interrupted_can_be_done_again() -> None:
    model = ARCHITECTURES["mamba2"].model()

    def prepared() -> Target:
        target = new_target(model, Capability.REPLAY)
        target.prefill(PROMPT[:-3])
        for token in PROMPT[-3:]:
            target.forward(mx.array([token]), DraftTree.chain(token))
            target.commit((0,))
        return target

    for target in interrupted_anywhere(
        FUNCTIONS, prepared, lambda target: target.truncate(len(PROMPT) - 2)
    ):
        target.truncate(target.length)
        assert_goes_on_rightly(target, [*PROMPT, 5][: target.length + 1])


@pytest.mark.parametrize("name", ["mamba2", "gemma3"])
def test_an_interrupt_anywhere_in_a_prefill_leaves_whole_chunks(name: str) -> None:
    model = ARCHITECTURES[name].model()
    capability = ARCHITECTURES[name].capability
    options = CacheOptions(prefill_step_size=4)
    for target in interrupted_anywhere(
        FUNCTIONS,
        lambda: new_target(model, capability, options),
        lambda target: target.prefill(PROMPT),
    ):
        target.truncate(target.length)
        assert target.length in (0, 4, 8, 9)
        if name == "gemma3":
            target.rewind(min(target.length, 3))
        assert_goes_on_rightly(target, [*PROMPT, 5][: target.length + 1])


def test_an_interrupt_anywhere_in_the_quantisation_leaves_caches_that_can_be_cut() -> None:
    model = random_model("llama", head_dim=32)
    options = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=len(PROMPT))

    def prepared() -> Target:
        target = new_target(model, cache=options)
        target.prefill(PROMPT[:-1])
        target.forward(mx.array(PROMPT[-1:]), DraftTree.chain(PROMPT[-1]))
        return target

    for target in interrupted_anywhere(FUNCTIONS, prepared, lambda target: target.commit((0,))):
        target.truncate(len(PROMPT) - 1)
        assert {cache.offset for cache in target.cache} == {target.length} == {len(PROMPT) - 1}
