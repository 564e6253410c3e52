"""Run the decoding loop on a bare model and compare its output with plain decoding."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxspec.bench.measure import NEAR_TIE_FLOAT32, first_difference
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import step as engine
from mlxspec.engine.capability import Capability, chain_capability, examine, examine_joint
from mlxspec.engine.joint import JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.sampling import Chooser, SamplingParams
from mlxspec.engine.target import Progress, Target, target_for

NEAR_TIES: list[float] = []
"""Margins of the near ties found by comparisons; printed at the end of the test run."""


@dataclass
class Run:
    """The outcome of one generation."""

    tokens: list[int]
    steps: int
    accepted: int
    rejecting: int
    """Steps that rejected some draft tokens."""
    moved: int
    """Steps whose accepted rows were not consecutive."""
    target: Target
    logprobs: mx.array
    """(tokens, vocabulary)"""


def examined(model: nn.Module) -> tuple[Capability, str]:
    """What :func:`examine` finds by trial steps of the model itself."""
    loaded = LoadedModel(model)
    return examine(loaded, chain_capability(loaded))


def joint_mode(model: nn.Module) -> JointMode:
    """What :func:`examine_joint` finds by trial steps of the model itself."""
    loaded = LoadedModel(model)
    return examine_joint(loaded, chain_capability(loaded))[0]


def new_target(
    model: nn.Module | LoadedModel,
    capability: Capability = Capability.TREE,
    cache: CacheOptions | None = None,
) -> Target:
    """Return the model with an empty cache."""
    return target_for(LoadedModel.of(model), capability, cache)


def next_logits(target: Target, token: int) -> mx.array:
    """Run one more row; return its logits, (vocabulary,)."""
    return target.forward(mx.array([token]), DraftTree.chain(token))[-1]


def decode(
    target: Target,
    prompt: Sequence[int],
    drafter: Drafter,
    chooser: Chooser,
    on_progress: Progress = lambda done, total: None,
    **options: Any,
) -> Generator[VerifiedStep, None, None]:
    """Generate, and yield each step."""
    sequence = engine.Sequence(target, prompt, drafter, chooser, **options)
    try:
        for done, total in sequence.begin_in_chunks():
            on_progress(done, total)
        while not sequence.finished:
            (outcome,) = engine.joint_step([sequence])
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
    finally:
        sequence.close()


def run(
    model: nn.Module | LoadedModel,
    prompt: Sequence[int],
    drafter: Drafter,
    *,
    max_tokens: int,
    params: SamplingParams | None = None,
    stop_tokens: Collection[int] = (),
    capability: Capability = Capability.TREE,
    cache: CacheOptions | None = None,
    keeps_logprobs: bool = True,
) -> Run:
    target = new_target(model, capability, cache)
    outcome = Run([], 0, 0, 0, 0, target, mx.zeros((0, target.loaded.vocab_size)))
    logprobs = []
    for step in decode(
        target,
        prompt,
        drafter,
        Chooser(params or SamplingParams()),
        max_tokens=max_tokens,
        ends=lambda token: token in stop_tokens,
    ):
        outcome.tokens += step.tokens
        outcome.accepted += len(step.accepted)
        accepted = step.accepted
        outcome.rejecting += len(accepted) < step.drafted
        outcome.moved += accepted != tuple(range(1, len(accepted) + 1))
        outcome.steps += 1
        if keeps_logprobs:
            logprobs += step.logprobs
    if logprobs:
        outcome.logprobs = mx.stack(logprobs)
    return outcome


def plain(model: nn.Module, prompt: Sequence[int], **options: object) -> list[int]:
    """Return the output of plain decoding."""
    return run(model, prompt, NoDraft(), **options).tokens  # type: ignore[arg-type]


def assert_same_output(
    model: nn.Module,
    prompt: Sequence[int],
    expected: Sequence[int],
    actual: Sequence[int],
    params: SamplingParams | None = None,
) -> None:
    """Assert that two float32 outputs are equal or first differ at a near tie."""
    difference = first_difference(model, prompt, expected, actual, params or SamplingParams())
    if difference is not None:
        print(f"first difference at {difference.index}, margin {difference.margin:.2e}")
        assert difference.margin < NEAR_TIE_FLOAT32
        NEAR_TIES.append(difference.margin)
