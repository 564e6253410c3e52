"""Sequences that share forwards generate the same tokens as alone."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine import caches
from mlxspec.engine.capability import Capability
from mlxspec.engine.joint import Joint, JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.params import CacheOptions
from mlxspec.engine.patches import finite
from mlxspec.engine.sampling import Chooser, SamplingParams
from mlxspec.engine.step import Sequence, joint_step
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import HostileDrafter
from tests.support.examples import LONG, examples
from tests.support.harness import Run, joint_mode, new_target, next_logits, run

pytestmark = pytest.mark.slow

VOCABULARY = 64
MODES = {
    "llama3": JointMode.SPLIT,
    "gemma3": JointMode.SPLIT,
    "gpt_oss": JointMode.SPLIT,
    "deepseek_v3": JointMode.BLOCK,
    "gemma2": JointMode.BLOCK,
    "qwen3_next": JointMode.SPLIT,
    "recurrent_gemma": JointMode.SPLIT,
    "gemma3n": JointMode.SPLIT,
    "kimi_linear": JointMode.BLOCK,
}
DRAFTERS = {
    "plain": lambda truth: NoDraft(),
    "hostile": lambda truth: HostileDrafter(truth, VOCABULARY, 5, seed=len(truth)),
    "lookup": lambda truth: PromptLookupDrafter(ngram_max=1),
    "lookahead": lambda truth: LookaheadDrafter(2, 3, 2),
}


@cache
def joint_model(name: str) -> tuple[nn.Module, Joint]:
    model = ARCHITECTURES[name].model()
    mode = joint_mode(model)
    assert mode is MODES[name]
    return model, Joint(LoadedModel(model), mode)


class Plan(NamedTuple):
    """A sequence in a schedule: when it joins and after how many of its own steps it is closed."""

    prompt: tuple[int, ...]
    max_tokens: int
    drafter: str
    temp: float
    bounded: bool
    joins: int
    leaves: int


PLANS = st.builds(
    Plan,
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24).map(tuple),
    st.integers(1, 24),
    st.sampled_from(sorted(DRAFTERS)),
    st.sampled_from([0.0, 0.0, 0.8]),
    st.booleans(),
    st.integers(0, 12),
    st.integers(1, 40),
)


@dataclass
class Member:
    """A sequence that takes part, and its output when it runs alone."""

    plan: Plan
    sequence: Sequence
    alone: Run
    tokens: list[int]
    logprobs: list[mx.array]


def member_of(model: nn.Module, plan: Plan, capability: Capability) -> Member:
    params = SamplingParams(temp=plan.temp, seed=3)
    options = CacheOptions(max_kv_size=12 if plan.bounded else None)
    alone = run(
        model,
        plan.prompt,
        NoDraft(),
        max_tokens=plan.max_tokens,
        params=params,
        cache=options,
        capability=capability,
    )
    sequence = Sequence(
        new_target(model, capability, options),
        plan.prompt,
        DRAFTERS[plan.drafter](alone.tokens),
        Chooser(params),
        max_tokens=plan.max_tokens,
        ends=lambda _: False,
    )
    return Member(plan, sequence, alone, [], [])


def assert_wrote_what_it_writes_alone(member: Member) -> None:
    written = len(member.tokens)
    assert member.tokens == member.alone.tokens[:written]
    difference = finite(mx.stack(member.logprobs)) - finite(member.alone.logprobs[:written])
    assert mx.max(mx.abs(difference)).item() < 1e-4
    target, last = member.sequence.target, member.tokens[-1]
    assert target.length == len(member.plan.prompt) + written - 1
    if written == len(member.alone.tokens):
        difference = next_logits(target, last) - next_logits(member.alone.target, last)
        assert mx.max(mx.abs(difference)).item() < 1e-3


@pytest.mark.parametrize("name", MODES)
def test_whoever_joins_and_leaves_each_sequence_writes_what_it_writes_alone(name: str) -> None:
    model, joint = joint_model(name)

    @settings(max_examples=examples(3, long=200))
    @given(st.lists(PLANS, min_size=2, max_size=8))
    def check(plans: list[Plan]) -> None:
        members = [member_of(model, plan, ARCHITECTURES[name].capability) for plan in plans]
        for number in itertools.count():
            for member in members:
                if member.plan.joins == number:
                    member.sequence.begin()
                    joint.join(member.sequence.target)
            active = [
                member
                for member in members
                if member.plan.joins <= number
                and not member.sequence.finished
                and number < member.plan.joins + member.plan.leaves
            ]
            if not active and all(member.plan.joins < number for member in members):
                break
            outcomes = joint_step([member.sequence for member in active], joint)
            done = [outcome for outcome in outcomes if isinstance(outcome, VerifiedStep)]
            for member, own in zip(active, done, strict=True):
                member.tokens += own.tokens
                member.logprobs += own.logprobs
                if not any(other.pipelined for other in done):
                    assert own.sequences == len(active)
            for member in members:
                leaving = number + 1 == member.plan.joins + member.plan.leaves
                if leaving or member.sequence.finished:
                    joint.leave(member.sequence.target)
                    member.sequence.close()
        for member in members:
            assert_wrote_what_it_writes_alone(member)

    check()


def test_lookaheads_windows_run_in_joint_steps() -> None:
    model, joint = joint_model("llama3")
    plans = [Plan((7, 3, number), 24, "lookahead", 0.0, False, 0, 40) for number in range(4)]
    members = [member_of(model, plan, Capability.TREE) for plan in plans]
    for member in members:
        member.sequence.begin()
        joint.join(member.sequence.target)
    verified, accepted = Counter[str](), Counter[str]()
    while active := [member for member in members if not member.sequence.finished]:
        outcomes = joint_step([member.sequence for member in active], joint)
        for member, own in zip(active, outcomes, strict=True):
            assert isinstance(own, VerifiedStep)
            assert own.sequences == len(active)
            member.tokens += own.tokens
            member.logprobs += own.logprobs
            origins = own.tree.node_origins
            verified.update(origins)
            accepted.update(origins[node] for node in own.accepted)
        for member in members:
            if member.sequence.finished:
                joint.leave(member.sequence.target)
    assert verified["window"] > 100
    assert accepted["guess"] + accepted["window"] > 0, accepted
    for member in members:
        member.sequence.close()
        assert_wrote_what_it_writes_alone(member)


@pytest.mark.parametrize(
    "name", sorted(ARCHITECTURES) if LONG else ["cohere", "gptj", "llama3", "mixtral"]
)
def test_rows_of_plain_steps_are_a_batch_where_all_layers_stand_in_slots(name: str) -> None:
    model = ARCHITECTURES[name].model()
    kinds = {type(cache) for cache in new_target(model).cache}
    if kinds != {KVCache} or joint_mode(model) is not JointMode.SPLIT:
        pytest.skip("has other caches, or takes the rows of one sequence")
    joint, shapes = Joint(LoadedModel(model), JointMode.SPLIT), []

    def watched(tokens: mx.array, cache: list[Any]) -> mx.array:
        shapes.append(tokens.shape)
        return model(tokens, cache=cache)

    joint.model = watched
    pairs = []
    for prompt in ([7, 3, 9], [5, 1, 2, 8, 8, 6, 4], [*range(20)]):
        together, alone = new_target(model), new_target(model)
        for target in (together, alone):
            target.prefill(prompt)
        joint.join(together)
        pairs.append((together, alone))
    for step in range(3):
        trees = [DraftTree.chain(7 * step + number) for number in range(len(pairs))]
        rows = [
            (together, mx.array(tree.tokens), tree)
            for (together, _), tree in zip(pairs, trees, strict=True)
        ]
        logits, _ = joint.forward(rows)
        for (together, alone), tree, found in zip(pairs, trees, logits, strict=True):
            expected = alone.forward(mx.array(tree.tokens), tree)[0]
            assert mx.max(mx.abs(finite(found) - finite(expected))).item() < 1e-4
            for target in (together, alone):
                target.commit((0,))
    assert shapes == [(3, 1)] * 3


def test_members_with_many_rows_stand_behind_those_in_slots_whatever_their_number() -> None:
    """A member's slot can be higher than the number of participants: some seats are idle."""
    model, joint = joint_model("llama3")
    pairs = []
    for number in range(6):
        together, alone = new_target(model), new_target(model)
        for target in (together, alone):
            target.prefill([number, 3, 9, *range(30 + number)])
        joint.join(together)
        pairs.append((together, alone))
    drafts = [(0, 9), (4, 1), (5, 1)]
    rows = [
        (pairs[seat][0], mx.array([*range(size)]), DraftTree.chain(0, range(1, size)))
        for seat, size in drafts
    ]
    logits, spans = joint.forward(rows)
    for (seat, _), row, span in zip(drafts, rows, spans, strict=True):
        expected = pairs[seat][1].forward(*row[1:])
        assert mx.max(mx.abs(finite(logits[span]) - finite(expected))).item() < 1e-4
    for together, _ in pairs:
        joint.leave(together)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("spare", [0, 16, 64])
def test_slots_take_no_more_than_is_spared_whoever_grows_pauses_and_leaves(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_STEP", 8)
    model, _ = joint_model("llama3")
    joint = Joint(LoadedModel(model), JointMode.SPLIT, spare)
    pairs, seats = [], []
    for number, length in enumerate((5, 6, 9, 24, 40)):
        together, alone = new_target(model), new_target(model)
        for target in (together, alone):
            target.prefill([*range(number, number + length)])
        pairs.append((together, alone))

    def look() -> None:
        contexts = [math.ceil((target.length + 1) / 8) * 8 for target in joint._seated]
        seats.append(len(contexts))
        for slots in joint._slots:
            assert slots.capacity <= sum(contexts) + spare

    for together, _ in pairs:
        joint.join(together)
        look()
    for step in range(30):
        active = pairs[: 2 if step < 20 else 5]  # the others pause and fall behind
        trees = [DraftTree.chain(step + number) for number in range(len(active))]
        rows = [
            (together, mx.array(tree.tokens), tree)
            for (together, _), tree in zip(active, trees, strict=True)
        ]
        logits, spans = joint.forward(rows)
        for (together, alone), row, span in zip(active, rows, spans, strict=True):
            expected = alone.forward(*row[1:])
            assert mx.max(mx.abs(finite(logits[span]) - finite(expected))).item() < 1e-4
            for target in (together, alone):
                target.commit((0,))
        look()
    for together, alone in pairs[::2]:
        joint.leave(together)
        look()
        difference = next_logits(together, 1) - next_logits(alone, 1)
        assert mx.max(mx.abs(difference)).item() < 1e-3
    assert max(seats) == {0: 2, 16: 3, 64: 4}[spare]
