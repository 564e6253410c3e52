"""Recurrent layers' states after any row of a forward, from its tape."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.caches import parts
from mlxspec.engine.capability import Capability, examine_joint
from mlxspec.engine.joint import Joint, JointMode
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.target import Target
from tests.support.architectures import ARCHITECTURES
from tests.support.examples import LONG
from tests.support.harness import new_target, next_logits

RUN_AGAIN = {
    *("mamba", "rwkv7", "recurrent_gemma", "deepseek_v41", "jamba", "baichuan_m1"),
    "longcat_flash_ngram",
}
HYBRIDS = [
    name
    for name, each in ARCHITECTURES.items()
    if each.capability is Capability.REPLAY and name not in RUN_AGAIN
]
TRIED = HYBRIDS if LONG else ["qwen3_5", "kimi_linear", "nemotron_h", "lfm2", "bailing_hybrid"]
PROMPT = [7, 3, 9, 3]
DRAFT = [1, 5, 2, 6, 11, 4]


def prefilled(name: str, prompt: list[int] = PROMPT) -> Target:
    target = new_target(ARCHITECTURES[name].model(), Capability.REPLAY)
    target.prefill(prompt)
    return target


def one_by_one(name: str, tokens: list[int], prompt: list[int] = PROMPT) -> Target:
    target = prefilled(name, prompt)
    for token in tokens:
        next_logits(target, token)
        target.commit((0,))
    return target


def assert_same_state(target: Target, expected: Target) -> None:
    assert target.length == expected.length
    for found, wanted in zip(parts(target.cache), parts(expected.cache), strict=True):
        if not found.is_trimmable():
            assert len(found.cache) == len(wanted.cache)
            for state, other in zip(found.cache, wanted.cache, strict=True):
                assert state.shape == other.shape
                assert state.dtype == other.dtype
                assert mx.max(mx.abs(state - other)).item() < 1e-4
    difference = next_logits(target, 3) - next_logits(expected, 3)
    assert mx.max(mx.abs(difference)).item() < 1e-3


@pytest.fixture
def from_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if tokens run again."""
    monkeypatch.setattr(Target, "_run_again", lambda *_: 1 / 0)


@pytest.mark.usefixtures("from_the_tape")
@pytest.mark.parametrize("name", TRIED)
def test_the_state_is_that_of_the_accepted_rows_however_many_these_are(name: str) -> None:
    for kept in range(1, len(DRAFT) + 1):
        target = prefilled(name)
        target.forward(mx.array(DRAFT), DraftTree.chain(DRAFT[0], DRAFT[1:]))
        target.commit(range(kept))
        assert_same_state(target, one_by_one(name, DRAFT[:kept]))


@pytest.mark.usefixtures("from_the_tape")
@pytest.mark.parametrize("name", TRIED)
def test_a_forward_can_be_undone_after_its_states_were_computed_again(name: str) -> None:
    target = one_by_one(name, DRAFT[:2])
    target.forward(mx.array(DRAFT), DraftTree.chain(DRAFT[0], DRAFT[1:]))
    target.commit(range(3))
    target.truncate(len(PROMPT) + 2)
    assert_same_state(target, one_by_one(name, DRAFT[:2]))


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_tape")
@pytest.mark.parametrize("name", TRIED)
def test_sequences_that_share_a_step_keep_different_numbers_of_rows(name: str) -> None:
    model = ARCHITECTURES[name].model()
    mode, _ = examine_joint(LoadedModel(model), Capability.REPLAY)
    if mode is JointMode.ALONE:
        pytest.skip("a forward takes the rows of one sequence")
    joint = Joint(LoadedModel(model), mode)
    prompts = [PROMPT, [2, 7], [5, 5, 1, 8, 4], [6, 1]]
    drafts, kept = [DRAFT, DRAFT[:3], DRAFT[::-1], [9]], [2, 1, 5, 1]
    targets = [prefilled(name, prompt) for prompt in prompts]
    joint.forward(
        [
            (target, mx.array(draft), DraftTree.chain(draft[0], draft[1:]))
            for target, draft in zip(targets, drafts, strict=True)
        ]
    )
    for target, prompt, draft, count in zip(targets, prompts, drafts, kept, strict=True):
        target.commit(range(count))
        assert_same_state(target, one_by_one(name, draft[:count], prompt))


@pytest.mark.parametrize("name", RUN_AGAIN if LONG else ["recurrent_gemma", "mamba"])
def test_a_layer_whose_state_comes_from_elsewhere_runs_accepted_tokens_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = prefilled(name)
    target.forward(mx.array(DRAFT), DraftTree.chain(DRAFT[0], DRAFT[1:]))
    again: list[list[int]] = []
    ordinary = Target._run_again

    def run_again(self: Target, tokens: list[int]) -> None:
        again.append(tokens)
        ordinary(self, tokens)

    monkeypatch.setattr(Target, "_run_again", run_again)
    target.commit(range(3))
    assert again == [DRAFT[:3]]
    expected = one_by_one(name, DRAFT[:3])
    assert target.length == expected.length
    difference = next_logits(target, 3) - next_logits(expected, 3)
    assert mx.max(mx.abs(difference)).item() < 1e-3


def test_plain_steps_keep_no_tape() -> None:
    target = prefilled("qwen3_5")
    next_logits(target, 3)
    assert target.tape is None
