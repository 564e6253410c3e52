"""State that cannot be trimmed is restored, and accepted rows run again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.sampling import Chooser, SamplingParams
from mlxspec.engine.target import Capability, Target
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import HostileDrafter
from tests.support.harness import decode, new_target, plain

PROMPT = [7, 3, 9, 3]
LENGTH = 60


@pytest.fixture(scope="module", params=["mamba2", "lfm2", "recurrent_gemma", "llama3"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Models with three kinds of state, and one that is replayed without need."""
    return ARCHITECTURES[request.param].model()


@pytest.fixture(scope="module")
def truth(model: nn.Module) -> list[int]:
    return plain(model, PROMPT, max_tokens=LENGTH, capability=Capability.REPLAY)


def generation(target: Target, drafter: Drafter) -> Iterator[VerifiedStep]:
    return decode(
        target,
        PROMPT,
        drafter,
        Chooser(SamplingParams()),
        max_tokens=LENGTH,
        ends=lambda _: False,
    )


def assert_goes_on_rightly(target: Target, context: list[int]) -> None:
    """Assert that the next forward equals mlx-lm's forward over the whole context."""
    assert target.length == len(context) - 1
    logits = target.forward(mx.array(context[-1:]), DraftTree.chain(context[-1]))[-1]
    fresh = target.model(mx.array(context)[None], cache=make_prompt_cache(target.model))[0, -1]
    assert mx.max(mx.abs(logits - fresh)).item() < 1e-4


@pytest.mark.parametrize("steps", [1, 4, 7, None])
def test_wherever_a_generation_ends_the_state_is_the_contexts(
    model: nn.Module, truth: list[int], steps: int | None
) -> None:
    for drafter in (NoDraft(), HostileDrafter(truth, 64, 5, seed=1)):
        target = new_target(model, Capability.REPLAY)
        stream = generation(target, drafter)
        taken = list(itertools.islice(stream, steps))
        stream.close()
        tokens = [token for step in taken for token in step.tokens]
        assert tokens == truth[: len(tokens)]
        assert_goes_on_rightly(target, PROMPT + tokens)


def test_after_a_rejection_the_caches_hold_the_context(model: nn.Module, truth: list[int]) -> None:
    target = new_target(model, Capability.REPLAY)
    context = PROMPT.copy()
    for step in generation(target, HostileDrafter(truth, 64, 5, seed=3)):
        context += step.tokens
        if step.accepted and len(step.accepted) < step.drafted:
            break
    assert_goes_on_rightly(target, context)


def test_an_interrupt_inside_a_prefill_leaves_the_state_of_the_chunks_before(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*PROMPT, 5, 8, 2, 6, 1]
    target = new_target(model, Capability.REPLAY, CacheOptions(prefill_step_size=4))
    last_layer = model.layers[-1]
    block = type(last_layer)
    ordinary = block.__call__
    chunks = 0

    def interrupt(self: nn.Module, *args: object, **kwargs: object) -> object:
        nonlocal chunks
        chunks += self is last_layer
        if chunks == 2:
            raise KeyboardInterrupt
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(block, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.prefill(prompt[:-1])
    monkeypatch.undo()
    target.truncate(target.length)
    assert_goes_on_rightly(target, prompt[:5])


@pytest.mark.parametrize("draft", [True, False])
def test_an_interrupt_inside_a_forward_leaves_the_state_of_before(
    model: nn.Module, truth: list[int], draft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = HostileDrafter(truth, 64, 5, seed=1) if draft else NoDraft()
    target = new_target(model, Capability.REPLAY)
    stream = generation(target, drafter)
    tokens = [t for step in itertools.islice(stream, 3) for t in step.tokens]
    last_layer = model.layers[-1]
    block = type(last_layer)
    ordinary = block.__call__

    def interrupt(self: nn.Module, *args: object, **kwargs: object) -> object:
        if self is last_layer:
            raise KeyboardInterrupt
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(block, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.undo()
    assert_goes_on_rightly(target, PROMPT + tokens)
