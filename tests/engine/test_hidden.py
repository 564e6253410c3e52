"""Hidden states of verified rows, from which each architecture's LM head computes the logits."""

from __future__ import annotations

from threading import Thread

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.capability import Capability
from mlxspec.engine.hidden import HiddenStates
from mlxspec.engine.joint import Joint
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.patches import finite
from tests.support.architectures import ARCHITECTURES
from tests.support.examples import LONG
from tests.support.harness import joint_mode, new_target

COMMON = ("llama3", "qwen3_next", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "mamba2")
WITH_HEADS = ("llama3", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "gemma4", "gpt_oss")
PROMPT = [3, 1, 4, 1, 5, 9]
TREE = DraftTree((2, 6, 5, 8), (-1, 0, 0, 1))


def close(found: mx.array, expected: mx.array) -> bool:
    return bool(mx.max(mx.abs(finite(found) - finite(expected))) < 1e-3)


def hidden_states(name: str, layers: tuple[int, ...]) -> tuple[nn.Module, HiddenStates]:
    """Return a model and the recorder of its hidden states."""
    model = ARCHITECTURES[name].model()
    return model, HiddenStates(model, layers)


@pytest.mark.parametrize("name", {*COMMON, *WITH_HEADS} if LONG else WITH_HEADS)
def test_the_logits_follow_from_the_hidden_states(name: str) -> None:
    model = ARCHITECTURES[name].model()
    modules = [(path, type(module), id(module)) for path, module in model.named_modules()]
    states = HiddenStates(model, (0, 1))
    tokens = mx.array([PROMPT])
    logits = model(tokens, cache=make_prompt_cache(model))
    assert mx.array_equal(states.model(tokens, cache=make_prompt_cache(model)), logits)
    assert states.final.ndim == 2
    assert close(states.logits(states.final[None]), logits)
    for of_layer in states.of_layers:
        assert of_layer.shape == states.final.shape
    assert modules == [(path, type(module), id(module)) for path, module in model.named_modules()]


def test_layers_return_what_enters_the_next_one_and_the_last_norm() -> None:
    model, states = hidden_states("llama3", (0, 1))
    states.model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    first, second = states.of_layers
    if len(model.layers) == 2:
        assert close(model.model.norm(second), states.final)
    assert close(model.layers[1](first[None], mask="causal")[0], second)


def test_each_thread_has_the_states_of_its_own_forward() -> None:
    _, states = hidden_states("llama3", (0,))
    states.model(mx.array([PROMPT]))
    own = states.final
    thread = Thread(target=states.model, args=[mx.array([PROMPT[:2]])])
    thread.start()
    thread.join()
    assert states.final is own
    assert len(states.of_layers[0]) == len(own) == len(PROMPT)


@pytest.mark.parametrize("name", COMMON)
def test_rows_of_a_draft_have_the_states_of_a_chain(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, states = hidden_states(name, (0,))
    target = new_target(states.model, architecture.capability)
    target.prefill(PROMPT)
    trees = [TREE if architecture.capability is Capability.TREE else DraftTree.chain(2, [6, 8])]
    trees.append(trees[0])
    context = PROMPT
    for tree in trees:
        target.forward(mx.array(tree.tokens), tree)
        found = [each[-len(tree) :] for each in (states.final, *states.of_layers)]
        path = [0, 1, len(tree) - 1]
        in_a_row = [*context, *(tree.tokens[node] for node in path)]
        states.model(mx.array([in_a_row]), cache=make_prompt_cache(model))
        for rows, expected in zip(found, (states.final, *states.of_layers), strict=True):
            assert close(rows[mx.array(path)], expected[-3:])
        target.commit((0, 1))
        context = [*context, *tree.tokens[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3_next"])
def test_rows_of_several_sequences_have_the_states_that_they_have_alone(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, states = hidden_states(name, (0,))
    joint = Joint(LoadedModel(states.model), joint_mode(model))
    members = []
    for number in range(3):
        target = new_target(states.model, architecture.capability)
        target.prefill([number, *PROMPT])
        joint.join(target)
        tree = DraftTree.chain(number, range(number))
        members.append((target, mx.array(tree.tokens), tree))
    _, spans = joint.forward(members)
    found = [(states.final[span], states.of_layers[0][span]) for span in spans]
    for number, (final, of_layer) in enumerate(found):
        tokens = [number, *PROMPT, number, *range(number)]
        states.model(mx.array([tokens]), cache=make_prompt_cache(model))
        assert close(final, states.final[-number - 1 :])
        assert close(of_layer, states.of_layers[0][-number - 1 :])
