"""A draft model drafts its own output and never changes the target's."""

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
from mlxspec.compat import decoder_of
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.capability import Capability
from mlxspec.errors import OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.drafters import drafted
from tests.support.drop_in import FREE, REPEAT, fields, stand_in_with_costs, stream_generate
from tests.support.harness import assert_same_output, run
from tests.support.llamas import llama

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 3
DRAFT_MODELS = ("llama3", "gemma3", "mamba2", "qwen3_next")


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return mlx-lm's greedy output."""
    return [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return stand_in_with_costs()


@pytest.fixture(scope="module")
def smaller(loaded: tuple) -> nn.Module:
    """Return the model without its last layer, which is often right and often wrong."""
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


def test_a_draft_model_never_gets_tokens_that_only_the_target_has() -> None:
    model = ARCHITECTURES["llama3"].model()
    rows = model.model.embed_tokens.weight.shape[0]

    class Checked(nn.Embedding):
        def __call__(self, tokens: mx.array) -> mx.array:
            assert mx.max(tokens).item() < rows  # otherwise MLX would read beyond the weights
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
        [r.token for r in drafted(decoder, prompt, drafter, max_tokens=24, sampling=sampling)]
        for drafter in (NoDraft(), both)
    )
    assert_same_output(loaded[0], prompt, expected, actual, sampling)


def tokens_per_step(
    model: nn.Module,
    drafter: DraftModelDrafter,
    capability: Capability = Capability.TREE,
    **sampling: Any,
) -> float:
    """Measure tokens per step of a long output; draft length + 1 for perfect drafts."""
    params = SamplingParams(seed=3, **sampling)
    outcome = run(model, PROMPT, drafter, max_tokens=80, params=params, capability=capability)
    return len(outcome.tokens) / outcome.steps


@pytest.mark.parametrize("sampling", [{"temp": 0.7, "top_p": 0.9}, {"temp": 1.3}], ids=str)
def test_a_draft_model_that_is_the_target_samples_what_the_target_does(
    sampling: dict[str, Any],
) -> None:
    model = llama("random")
    assert tokens_per_step(model, DraftModelDrafter(model, 3), **sampling) > 3.9


class Uncoupled(DraftModelDrafter):
    """Drafts the likeliest tokens, without the output's random numbers."""

    def attach(self, target: Any, perturb: Any) -> None:
        pass


@pytest.mark.parametrize("name", ["llama3", "jamba"])
def test_a_similar_model_is_right_more_often_with_the_output_s_random_numbers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.model()
    similar = copy.deepcopy(model)
    mx.random.seed(4)
    similar.update(
        tree_map(lambda w: w + 0.03 * mx.std(w) * mx.random.normal(w.shape), similar.parameters())
    )
    # With other seeds the first is about 3.0 and the second 1.1.
    coupled, uncoupled = (
        tokens_per_step(model, kind(similar, 3), architecture.capability, temp=1.0)
        for kind in (DraftModelDrafter, Uncoupled)
    )
    assert coupled > 1.8 * uncoupled


@pytest.mark.parametrize("size", [500, 600])
def test_the_noise_is_that_of_the_target_s_vocabulary(size: int) -> None:
    model = llama("random")
    resized = copy.deepcopy(model)
    for layer in (resized.model.embed_tokens, resized.lm_head):
        missing = max(0, size - len(layer.weight))
        layer.weight = mx.pad(layer.weight[:size], [(0, missing), (0, 0)])
    assert tokens_per_step(model, DraftModelDrafter(resized, 3), temp=1.0) > 3


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


def test_the_argument_samples_with_the_output_s_random_numbers(loaded: tuple) -> None:
    sampling: dict[str, Any] = {"max_tokens": 40, "temp": 1.0, "seed": 5}
    expected = list(mlxspec.stream_generate(*loaded, FREE, **sampling))
    actual = list(
        mlxspec.stream_generate(
            *loaded, FREE, draft_model=loaded[0], num_draft_tokens=3, **sampling
        )
    )
    assert fields(actual) == fields(expected)
    assert actual[-1].stats.steps < 15


def test_the_target_s_part_of_a_cache_of_both_models_goes_on_as_with_mlx_lm(
    loaded: tuple, smaller: nn.Module
) -> None:
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
        assert {cache.offset for cache in own[: len(theirs)]} == {position}


def test_a_draft_model_of_another_vocabulary_is_refused(loaded: tuple) -> None:
    with pytest.raises(OptionError, match=r"draft_model has a vocabulary of 64 .* model of 4096"):
        mlxspec.stream_generate(*loaded, FREE, draft_model=ARCHITECTURES["llama3"].model())


def test_an_impossible_number_of_draft_tokens_is_refused(loaded: tuple) -> None:
    with pytest.raises(OptionError, match="num_draft_tokens is 0"):
        mlxspec.stream_generate(*loaded, FREE, draft_model=loaded[0], num_draft_tokens=0)
