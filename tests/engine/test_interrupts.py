"""Wherever Ctrl-C hits a target, the state is that of the tokens that have been taken."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.draft.tree import DraftTree
from mlxspec.engine import caches, target, window_cache
from mlxspec.engine.chooser import Chooser
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.sampling import SamplingParams
from mlxspec.engine.target import Capability, Target
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import PartlyRightDrafter
from tests.support.harness import decode, new_target, plain
from tests.support.interrupts import functions_of, interrupted
from tests.support.random_models import random_model

PROMPT = [7, 3, 9, 3, 5, 8, 2, 6, 1]
STEPS = functions_of(
    target.Target,
    caches,
    caches.Snapshot,
    caches._TreeSteps,
    window_cache.WindowKVCache,
)


def assert_goes_on_rightly(target: Target, context: list[int]) -> None:
    """The next forward gives what the context gives in one forward of mlx-lm's."""
    assert target.length == len(context) - 1
    logits = target.forward(mx.array(context[-1:]), DraftTree.chain(context[-1]))[-1]
    fresh = target.model(mx.array(context)[None], cache=make_prompt_cache(target.model))[0, -1]
    assert mx.max(mx.abs(logits - fresh)).item() < 1e-4


@pytest.mark.parametrize("seed", [1, 2])
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
    truth = plain(model, PROMPT, max_tokens=40, capability=capability)
    for lines in itertools.count():
        target = new_target(model, capability)
        drafter = PartlyRightDrafter(truth, 64, seed)
        chooser = Chooser(SamplingParams())
        steps = decode(target, PROMPT, drafter, chooser, max_tokens=40, ends=lambda _: False)
        first = itertools.islice(steps, 3)
        tokens = [token for step in first for token in step.verified.tokens]

        def go_on() -> None:
            for step in itertools.islice(steps, 2):  # noqa: B023
                tokens.extend(step.verified.tokens)  # noqa: B023

        hit = interrupted(lines, STEPS, go_on)
        steps.close()
        assert_goes_on_rightly(target, PROMPT + tokens)
        if not hit:
            break
    assert lines > 20


def test_a_truncation_that_is_interrupted_can_be_done_again() -> None:
    model = ARCHITECTURES["mamba2"].model()
    for lines in itertools.count():
        target = new_target(model, Capability.REPLAY)
        target.prefill(PROMPT[:-3])
        for token in PROMPT[-3:]:
            target.forward(mx.array([token]), DraftTree.chain(token))
            target.commit((0,))
        hit = interrupted(lines, STEPS, lambda: target.truncate(len(PROMPT) - 2))  # noqa: B023
        target.truncate(target.length)
        assert_goes_on_rightly(target, [*PROMPT, 5][: target.length + 1])
        if not hit:
            break
    assert lines > 8


@pytest.mark.parametrize("name", ["mamba2", "gemma3"])
def test_an_interrupt_anywhere_in_a_prefill_leaves_whole_chunks(name: str) -> None:
    model = ARCHITECTURES[name].model()
    functions = [Target.prefill, Target._prefill_chunk]
    for lines in itertools.count():
        target = new_target(model, Capability.TREE if name == "gemma3" else Capability.REPLAY)
        target.options = CacheOptions(prefill_step_size=4)
        hit = interrupted(lines, functions, lambda: target.prefill(PROMPT))  # noqa: B023
        target.truncate(target.length)
        assert target.length in (0, 4, 8, 9)
        if name == "gemma3":
            target.rewind(min(target.length, 3))
        assert_goes_on_rightly(target, [*PROMPT, 5][: target.length + 1])
        if not hit:
            break


def test_an_interrupt_anywhere_in_the_quantisation_leaves_caches_that_can_be_cut() -> None:
    model = random_model("llama", head_dim=32)
    options = CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=len(PROMPT))
    for lines in itertools.count():
        target = new_target(model, cache=options)
        target.prefill(PROMPT[:-1])
        target.forward(mx.array(PROMPT[-1:]), DraftTree.chain(PROMPT[-1]))
        hit = interrupted(lines, [Target._quantize_if_due], lambda: target.commit((0,)))  # noqa: B023
        target.truncate(len(PROMPT) - 1)
        assert {cache.offset for cache in target.cache} == {target.length} == {len(PROMPT) - 1}
        if not hit:
            break
