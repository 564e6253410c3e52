"""A draft model drafts what it would say itself, and never changes the output."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec import CombinedDrafter, DraftModelDrafter, PromptLookupDrafter, SamplingParams
from mlxspec.compat.generation import decoder_of
from mlxspec.drafting.drafter import DraftTree, NoDraft, VerifiedStep
from mlxspec.errors import OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.drop_in import FREE, REPEAT, fields, stand_in_with_costs, stream_generate
from tests.support.harness import assert_same_output, run
from tests.support.llamas import llama

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3
DRAFT_MODELS = ("llama3", "gemma3", "mamba2", "qwen3_next")


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """What mlx-lm generates."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return stand_in_with_costs()


@pytest.fixture(scope="module")
def smaller(loaded: tuple) -> nn.Module:
    """The model without its last layer: often right, often wrong."""
    model = copy.deepcopy(loaded[0])
    model.model.layers = model.model.layers[:-1]
    return model


@pytest.mark.parametrize("name", DRAFT_MODELS)
def test_it_drafts_what_the_model_says_however_much_was_rejected(name: str) -> None:
    model = ARCHITECTURES[name].model()
    drafter, context = DraftModelDrafter(model, 4), list(PROMPT)
    drafter.begin(PROMPT)
    for right, bonus in ((0, [11]), (4, [12]), (2, [13]), (1, []), (0, [9, 8, 7]), (3, [1])):
        tree = drafter.propose(100)
        assert tree == DraftTree.chain(context[-1], greedy(model, context, 4))
        emitted = (*tree.tokens[1 : 1 + right], *bonus)
        drafter.observe(VerifiedStep(tree, (), (), tuple(range(1, 1 + right)), emitted))
        context += emitted
    assert len(drafter.propose(2)) == 3
    assert len(drafter.propose(0)) == 1
    drafter.end()


def test_a_draft_model_is_not_asked_for_tokens_of_the_target_that_it_lacks() -> None:
    model = ARCHITECTURES["llama3"].model()
    rows = model.model.embed_tokens.weight.shape[0]

    class Checked(nn.Embedding):
        def __call__(self, tokens: mx.array) -> mx.array:
            assert mx.max(tokens).item() < rows  # MLX would read what is behind its weights
            return super().__call__(tokens)

    checked = Checked(*model.model.embed_tokens.weight.shape)
    checked.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = checked
    drafter = DraftModelDrafter(model, 2)
    drafter.begin([3, rows + 1, 4])
    drafter.observe(VerifiedStep(drafter.propose(9), (), (), (), (rows + 5,)))
    assert len(drafter.propose(9)) == 3
    drafter.end()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=["", "top_p", "top_k"])
@pytest.mark.parametrize("temp", [0.0, 0.7, 1.3])
def test_the_output_is_that_of_plain_decoding(
    loaded: tuple, smaller: nn.Module, temp: float, filters: dict[str, Any]
) -> None:
    decoder, prompt = decoder_of(*loaded), loaded[1].encode(FREE)
    sampling = SamplingParams(temp=temp, seed=2, **filters)
    both = CombinedDrafter(PromptLookupDrafter(ngram_max=1), DraftModelDrafter(smaller, 3))
    expected, actual = (
        [r.token for r in decoder.decode(prompt, drafter, max_tokens=24, sampling=sampling)]
        for drafter in (NoDraft(), both)
    )
    assert_same_output(loaded[0], prompt, expected, actual, sampling)


class Uncoupled(DraftModelDrafter):
    """Drafts the most likely tokens, whatever the output's random numbers are."""

    def attach(self, target: Any, perturb: Any) -> None:
        pass


def tokens_per_step(model: nn.Module, drafter: DraftModelDrafter, **sampling: Any) -> float:
    """Of a long output; one more than the drafter drafts if it is always right."""
    params = SamplingParams(seed=3, **sampling)
    outcome = run(model, PROMPT, drafter, max_tokens=120, params=params, keeps_logprobs=False)
    return len(outcome.tokens) / outcome.steps


@pytest.mark.parametrize("name", ["llama3", "mamba2", "rwkv7"])
@pytest.mark.parametrize("sampling", [{"temp": 0.7, "top_p": 0.9}, {"temp": 1.3}], ids=str)
def test_a_draft_model_that_is_the_target_samples_what_the_target_does(
    name: str, sampling: dict[str, Any]
) -> None:
    model = ARCHITECTURES[name].model()
    assert tokens_per_step(model, DraftModelDrafter(model, 3), **sampling) > 3.9


def test_at_temperature_1_a_similar_model_is_nearly_as_often_right_as_at_0() -> None:
    model = llama("random")
    similar = copy.deepcopy(model)
    mx.random.seed(4)
    similar.update(
        tree_map(lambda w: w + 0.03 * mx.std(w) * mx.random.normal(w.shape), similar.parameters())
    )
    greedy, coupled, uncoupled = (
        tokens_per_step(model, kind(similar, 3), temp=temp)
        for kind, temp in (
            (DraftModelDrafter, 0.0),
            (DraftModelDrafter, 1.0),
            (Uncoupled, 1.0),
        )
    )
    print(greedy, coupled, uncoupled)
    assert coupled > 0.75 * greedy
    assert coupled > 1.3 * uncoupled


def resized(model: nn.Module, size: int) -> nn.Module:
    """A copy of a Llama with a larger or smaller vocabulary; new tokens are not unlikely."""
    copied = copy.deepcopy(model)
    for layer in (copied.model.embed_tokens, copied.lm_head):
        weight = layer.weight
        missing = max(0, size - len(weight))
        layer.weight = mx.pad(weight[:size], [(0, missing), (0, 0)])
    return copied


@pytest.mark.parametrize("size", [500, 600])
def test_the_noise_is_that_of_the_target_s_vocabulary(size: int) -> None:
    model = llama("random")
    drafter = DraftModelDrafter(resized(model, size), 3)
    assert tokens_per_step(model, drafter, temp=1.0) > 3.0


def test_look_ups_go_first_and_it_drafts_where_they_have_none(loaded: tuple) -> None:
    drafter = CombinedDrafter(PromptLookupDrafter(), DraftModelDrafter(loaded[0], 3))
    drafter.begin([5, 6, 7, 5, 6])
    assert set(drafter.propose(10).origins) == {"lookup"}
    drafter.observe(VerifiedStep(DraftTree.chain(6), (9,), (9,), (), (9,)))
    assert drafter.propose(10).origins == ("draft model",) * 3
    drafter.end()


@pytest.mark.parametrize("prompt", [FREE, REPEAT])
def test_draft_model_is_an_argument_as_with_mlx_lm(
    loaded: tuple, smaller: nn.Module, prompt: str
) -> None:
    options = {"max_tokens": 24, "draft_model": smaller, "num_draft_tokens": 3}
    expected = list(stream_generate(*loaded, prompt, **options))
    actual = list(mlxspec.stream_generate(*loaded, prompt, **options))
    assert fields(actual) == fields(expected)
    assert actual[-1].stats.steps < 20
    assert any(response.from_draft for response in actual)


def test_mlx_lm_s_argument_samples_with_the_output_s_noise(loaded: tuple) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temp": 1.0, "seed": 5}
    expected = list(mlxspec.stream_generate(*loaded, FREE, **options))
    actual = list(
        mlxspec.stream_generate(*loaded, FREE, draft_model=loaded[0], num_draft_tokens=3, **options)
    )
    assert fields(actual) == fields(expected)
    print(actual[-1].stats.steps, expected[-1].stats.steps)
    assert actual[-1].stats.steps < 15


def test_a_cache_of_both_models_goes_on_as_with_mlx_lm(loaded: tuple, smaller: nn.Module) -> None:
    model, tokenizer = loaded
    theirs = make_prompt_cache(model)
    own = make_prompt_cache(model) + make_prompt_cache(smaller)
    position = 0
    for text in (REPEAT, " [INST] Again. [/INST]", FREE):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        options: dict[str, Any] = {"max_tokens": 16}
        expected = fields(stream_generate(*loaded, prompt, prompt_cache=theirs, **options))
        responses = mlxspec.stream_generate(
            *loaded, prompt, prompt_cache=own, draft_model=smaller, **options
        )
        assert fields(responses) == expected
        position += len(prompt) + len(expected)
        assert {cache.offset for cache in own} == {position}


def test_a_draft_model_of_another_vocabulary_is_refused(loaded: tuple) -> None:
    with pytest.raises(OptionError, match=r"draft_model has a vocabulary of 64 .* one of 4096"):
        mlxspec.stream_generate(*loaded, FREE, draft_model=ARCHITECTURES["llama3"].model())


def test_an_impossible_number_of_draft_tokens_is_refused(loaded: tuple) -> None:
    with pytest.raises(OptionError, match="num_draft_tokens is 0"):
        mlxspec.stream_generate(*loaded, FREE, draft_model=loaded[0], num_draft_tokens=0)
