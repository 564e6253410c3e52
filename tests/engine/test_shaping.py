"""Penalties and logits processors, compared with mlx-lm's generation."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

import mlxspec
from mlxspec.drafting.drafter import Drafter, NoDraft
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.capability import Capability
from mlxspec.engine.sampling import Chooser, SamplingParams
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import demo
from tests.support.drafters import HostileDrafter
from tests.support.examples import LONG
from tests.support.harness import assert_same_output, decode, new_target, plain, run
from tests.support.llamas import LLAMAS

pytestmark = pytest.mark.slow

BOS = 1
PROMPT = [BOS, 403, 407, 261, 370, 403, 407]


@mlxspec.pure
def no_token_twice_in_a_row(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor that converts its tokens to numbers, as users write them."""
    forbidden = tokens.tolist()[-1]
    return mx.where(mx.arange(logits.shape[-1]) == forbidden, -mx.inf, logits)


@mlxspec.pure
def by_parity_of_the_length(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor that derives its position from the number of tokens."""
    lifted = mx.arange(logits.shape[-1]) % 2 == len(tokens) % 2
    return logits + 2.0 * lifted


SHAPES: dict[str, dict] = {
    "bias": {"logit_bias": {80: -mx.inf, 261: -mx.inf, 300: 4.0, 7: -2.5}},
    "repetition": {"repetition_penalty": 1.3},
    "repetition of all": {"repetition_penalty": 1.2, "repetition_context_size": 0},
    "presence": {"presence_penalty": 1.5, "presence_context_size": 7},
    "frequency": {"frequency_penalty": 0.8, "frequency_context_size": 50},
    "negative": {"presence_penalty": -1.5, "frequency_penalty": -0.5},
    "all penalties": {
        "logit_bias": {261: -3.0},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "frequency_context_size": 50,
    },
    "callables": {"logits_processors": [no_token_twice_in_a_row, by_parity_of_the_length]},
    "everything": {
        "logit_bias": {300: 1.0},
        "repetition_penalty": 1.15,
        "frequency_penalty": 0.1,
        "logits_processors": [by_parity_of_the_length],
    },
}
FILTERS: dict[float, dict] = {
    0.0: {},
    0.7: {"top_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    1.0: {"min_p": 0.05, "top_k": 30},
}


def mlx_lm_processors(shape: dict) -> list[Callable]:
    own = dict(shape)
    callables = own.pop("logits_processors", [])
    return [*make_logits_processors(**own), *callables]


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("name", SHAPES)
def test_plain_decoding_equals_mlx_lm_with_the_same_processors(model: nn.Module, name: str) -> None:
    processors = mlx_lm_processors(SHAPES[name])
    steps = generate_step(mx.array(PROMPT), model, max_tokens=40, logits_processors=processors)
    expected, logprobs = zip(*steps, strict=True)
    chooser = Chooser(SamplingParams(**SHAPES[name]))
    ours = list(
        decode(new_target(model), PROMPT, NoDraft(), chooser, max_tokens=40, ends=lambda _: False)
    )
    assert [step.tokens[0] for step in ours] == list(expected)
    for step, theirs in zip(ours, logprobs, strict=True):
        assert mx.array_equal(step.logprobs[0], theirs).item()
    assert list(expected) != plain(model, PROMPT, max_tokens=40)  # the processor has an effect


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("temp", FILTERS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("model", LLAMAS if LONG else LLAMAS[:1], indirect=True)
def test_speculated_tokens_equal_plain_ones_whatever_shapes_and_filters(
    model: nn.Module, name: str, temp: float
) -> None:
    params = SamplingParams(temp=temp, seed=4, **SHAPES[name], **FILTERS[temp])
    options = {"max_tokens": 24, "params": params, "stop_tokens": {BOS}}
    vocab_size = model.args.vocab_size
    expected = plain(model, PROMPT, **options)
    accepted = 0
    for capability in (Capability.TREE, Capability.CHAIN):
        hostile = HostileDrafter(
            expected, vocab_size, BOS, seed=3, chains=capability is Capability.CHAIN
        )
        outcome = run(model, PROMPT, hostile, capability=capability, **options)
        assert_same_output(model, PROMPT, expected, outcome.tokens, params)
        accepted += outcome.accepted
    assert accepted > 0


def test_the_demo_model_writes_the_same_with_every_drafter() -> None:
    model, tokenizer = demo().model, demo().tokenizer
    prompt = tokenizer.encode("[INST] Count from one to ten, twice. [/INST]")
    params = SamplingParams(
        temp=0.7,
        seed=7,
        top_p=0.95,
        xtc_probability=0.3,
        repetition_penalty=1.05,
        frequency_penalty=0.1,
        logits_processors=[by_parity_of_the_length],
    )
    options = {"max_tokens": 30, "params": params, "stop_tokens": tokenizer.eos_token_ids}
    expected = plain(model, prompt, **options)
    (stop_token,) = tokenizer.eos_token_ids
    for drafter in (
        PromptLookupDrafter(),
        HostileDrafter(expected, len(tokenizer), stop_token, seed=1),
    ):
        outcome = run(model, prompt, drafter, **options)
        assert_same_output(model, prompt, expected, outcome.tokens, params)


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("name", ["mamba2", "recurrent_gemma", "gemma3", "llama4"])
def test_tokens_that_run_again_and_windows_that_wrap_keep_their_contexts(
    name: str, temp: float
) -> None:
    """With other kinds of cache: replayed state, sliding windows, chunks."""
    architecture = ARCHITECTURES[name]
    model = architecture.model()
    filters = {"top_p": 0.95, "xtc_probability": 0.5} if temp else {}
    params = SamplingParams(
        temp=temp,
        seed=2,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        logits_processors=[by_parity_of_the_length],
        **filters,
    )
    options = {"capability": architecture.capability, "max_tokens": 40, "params": params}
    expected = plain(model, [7, 3, 9, 3], **options)
    outcome = run(model, [7, 3, 9, 3], HostileDrafter(expected, 64, 5, seed=1), **options)
    assert outcome.accepted > 0
    assert_same_output(model, [7, 3, 9, 3], expected, outcome.tokens, params)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "hostile trees"])
def test_each_node_sees_the_context_and_its_own_path(model: nn.Module, drafts: bool) -> None:
    """Predict each processor call of a step from the tree and the tokens before it."""
    seen: list[tuple[int, ...]] = []

    @mlxspec.pure
    def log(tokens: mx.array, logits: mx.array) -> mx.array:
        assert tokens.dtype == (mx.int64 if len(tokens) > len(PROMPT) else mx.int32)  # like mlx-lm
        assert logits.shape == (1, model.args.vocab_size)
        seen.append(tuple(tokens.tolist()))
        return logits

    truth = plain(model, PROMPT, max_tokens=40)
    drafter: Drafter = (
        HostileDrafter(truth, model.args.vocab_size, BOS, seed=6) if drafts else NoDraft()
    )
    chooser = Chooser(SamplingParams(logits_processors=[log]))
    predicted: list[tuple[int, ...]] = []
    context = list(PROMPT)
    for step in decode(
        new_target(model), PROMPT, drafter, chooser, max_tokens=40, ends=lambda _: False
    ):
        tree = step.tree
        for attended in tree.ancestors():
            path = [token for token, seen_by in zip(tree.tokens, attended, strict=True) if seen_by]
            predicted.append((*context, *path[1:]))
        context += step.tokens
    assert context == PROMPT + truth
    assert seen == predicted
    assert drafts == (len(seen) > 40)


def test_with_processors_the_next_forward_is_dispatched_before_a_token_is_read(
    model: nn.Module,
) -> None:
    begun: list[int] = []

    def count(tokens: mx.array, logits: mx.array) -> mx.array:
        begun.append(len(tokens))
        return logits

    chooser = Chooser(SamplingParams(logits_processors=[count], repetition_penalty=1.1))
    steps = decode(
        new_target(model), PROMPT, NoDraft(), chooser, max_tokens=10, ends=lambda _: False
    )
    next(steps)
    assert begun == [len(PROMPT), len(PROMPT) + 1]
    steps.close()


def test_an_error_in_a_processor_leaves_the_cache_at_the_context(model: nn.Module) -> None:
    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) == len(PROMPT) + 5:
            raise RuntimeError("from the processor")
        return logits

    target = new_target(model)
    chooser = Chooser(SamplingParams(logits_processors=[fail]))
    steps = decode(target, PROMPT, NoDraft(), chooser, max_tokens=30, ends=lambda _: False)
    with pytest.raises(RuntimeError, match="from the processor"):
        list(steps)
    assert target.length == len(PROMPT) + 4 - 1  # no finished step emitted the fifth
    assert {cache.offset for cache in target.cache} == {target.length}


def test_without_processors_no_history_is_kept() -> None:
    chooser = Chooser(SamplingParams(temp=0.5, top_k=3))
    chooser.begin(PROMPT)
    assert chooser.contexts(DraftTree.chain(PROMPT[-1])) is None


def test_the_history_of_a_tree_is_each_nodes_path() -> None:
    history = Chooser(SamplingParams(repetition_penalty=1.1, repetition_context_size=0))
    history.begin([5, 6])
    history.extend([7])
    tree = DraftTree((7, 1, 2, 3), (-1, 0, 1, 0))
    contexts = [tokens.tolist() for tokens in history.contexts(tree)]
    assert contexts == [[5, 6, 7], [5, 6, 7, 1], [5, 6, 7, 1, 2], [5, 6, 7, 3]]
    (later,) = history.contexts(DraftTree.chain(-1), mx.array([9], dtype=mx.uint32))
    assert later.tolist() == [5, 6, 7, 9]
