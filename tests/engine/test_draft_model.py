"""A draft model drafts its own output and never changes the target's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec import AutoDecoder, SamplingParams
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.cost_curve import CostCurve
from mlxspec.drafting.costs import FixedCosts
from mlxspec.drafting.heads import HeadExperience
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.capability import Capability
from mlxspec.engine.draft_model import DraftModel, DraftModelDrafts
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.sampling import Perturb
from mlxspec.engine.target import Target
from mlxspec.errors import OptionError
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import CHAINS, FLAT, given_costs
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


def free(model: nn.Module, count: int) -> DraftModel:
    """Return a draft model whose drafts seem to take no time, so that a planner uses them."""
    made = DraftModel(model, count)
    made.experience = HeadExperience(1e-6, 1e-6, count)
    return made


@pytest.fixture
def drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = FixedCosts(CostCurve([(1, 1)]), plain_seconds=1e-6)
    monkeypatch.setattr("mlxspec.engine.draft_model.costs_for", lambda _: costs)


def begun(model: nn.Module, context: list[int], count: int, vocab_size: int) -> DraftModelDrafts:
    """Return the greedy drafts of a generation whose target has this vocabulary."""
    drafts = DraftModelDrafts(free(model, count))
    target = SimpleNamespace(length=0, loaded=SimpleNamespace(vocab_size=vocab_size))
    drafts.attach(target, lambda logprobs, positions: logprobs)
    drafts.begin(context)
    return drafts


def observed(drafts: DraftModelDrafts, emitted: Sequence[int], right: int = 0) -> None:
    chain = DraftTree.chain(0, emitted[:right])
    drafts.observe(VerifiedStep(chain, (), (), tuple(range(1, 1 + right)), (*emitted,)))


@pytest.mark.parametrize("name", DRAFT_MODELS)
def test_it_drafts_what_the_model_says_however_much_was_rejected(name: str) -> None:
    model, context = ARCHITECTURES[name].model(), list(PROMPT)
    drafts = begun(model, context, 4, 64)
    text = [*range(20, 40)]
    for right, others in ((0, [11]), (4, [12]), (2, [13]), (1, []), (0, [9, 8, 7]), (3, [1])):
        ((tokens, confidences),) = DraftModelDrafts.run([drafts], 4)
        assert tokens == greedy(model, context, 4)
        assert all(0 < confidence <= 1 for confidence in confidences)
        for emitted in ((*tokens[:right], *others), *[text] * (right == 1)):
            observed(drafts, emitted, right)
            context += emitted


def test_sequences_draft_as_alone() -> None:
    model = ARCHITECTURES["llama3"].model()
    contexts = [PROMPT, PROMPT[2:], [7, 7]]
    together = DraftModelDrafts.run([begun(model, one, 3, 64) for one in contexts], 3)
    assert [tokens for tokens, _ in together] == [greedy(model, one, 3) for one in contexts]


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
    drafts = begun(model, [3, rows + 1, 4], 2, rows + 9)
    for emitted in ([rows + 5], [rows + 6] * 20):
        ((tokens, _),) = DraftModelDrafts.run([drafts], 2)
        assert len(tokens) == 2
        observed(drafts, emitted)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=["", "top_p", "top_k"])
@pytest.mark.parametrize("temp", [0.0, 0.7, 1.3])
def test_the_output_is_that_of_plain_decoding(
    loaded: tuple,
    smaller: nn.Module,
    drafts_are_free: None,
    temp: float,
    filters: dict[str, Any],
) -> None:
    prompt, sampling = loaded[1].encode(FREE), SamplingParams(temp=temp, seed=2, **filters)
    plain = mlxspec.Decoder(*loaded)
    expected = [r.token for r in plain.stream(prompt, 24, sampling=sampling)]
    decoder = AutoDecoder(*loaded, draft_model=smaller, num_draft_tokens=3)
    decoder.costs = given_costs(CHAINS)
    *responses, last = decoder.stream(prompt, 24, sampling=sampling)
    assert last.stats.drafted > 0
    actual = [r.token for r in (*responses, last)]
    assert_same_output(loaded[0], prompt, expected, actual, sampling)


def tokens_per_step(
    model: nn.Module,
    drafts: DraftModelDrafts,
    capability: Capability = Capability.TREE,
    **sampling: Any,
) -> float:
    """Measure tokens per step of a long output; draft length + 1 for perfect drafts."""
    params = SamplingParams(seed=3, **sampling)
    planner = Planner(FixedCosts(CostCurve(FLAT.items())), [], branching=False)
    planner.head = drafts
    outcome = run(model, PROMPT, planner, max_tokens=80, params=params, capability=capability)
    return len(outcome.tokens) / outcome.steps


@pytest.mark.parametrize("sampling", [{"temp": 0.7, "top_p": 0.9}, {"temp": 1.3}], ids=str)
def test_a_draft_model_that_is_the_target_samples_what_the_target_does(
    sampling: dict[str, Any],
) -> None:
    model = llama("random")
    assert tokens_per_step(model, DraftModelDrafts(free(model, 3)), **sampling) > 3.9


class Uncoupled(DraftModelDrafts):
    """Drafts the likeliest tokens, without the output's random numbers."""

    def attach(self, target: Target, perturb: Perturb) -> None:
        super().attach(target, lambda logprobs, positions: logprobs)


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
        tokens_per_step(model, kind(free(similar, 3)), architecture.capability, temp=1.0)
        for kind in (DraftModelDrafts, Uncoupled)
    )
    assert coupled > 1.8 * uncoupled


@pytest.mark.parametrize("size", [500, 600])
def test_the_noise_is_that_of_the_target_s_vocabulary(size: int) -> None:
    model = llama("random")
    resized = copy.deepcopy(model)
    for layer in (resized.model.embed_tokens, resized.lm_head):
        missing = max(0, size - len(layer.weight))
        layer.weight = mx.pad(layer.weight[:size], [(0, missing), (0, 0)])
    assert tokens_per_step(model, DraftModelDrafts(free(resized, 3)), temp=1.0) > 3


@pytest.mark.parametrize(("share", "runs"), [(0.01, True), (1.0, False)])
def test_a_draft_model_runs_if_its_time_pays(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch, share: float, runs: bool
) -> None:
    costs = FixedCosts(CostCurve([(1, 1)]), plain_seconds=share)  # the model's take a second
    monkeypatch.setattr("mlxspec.engine.draft_model.costs_for", lambda _: costs)
    run, depths = DraftModelDrafts.run, list[int]()

    def noted(drafts: Sequence[DraftModelDrafts], depth: int) -> list[tuple[list, list]]:
        depths.append(depth)
        return run(drafts, depth)

    monkeypatch.setattr(DraftModelDrafts, "run", staticmethod(noted))
    decoder = AutoDecoder(*loaded, draft_model=loaded[0])
    decoder.costs = given_costs(CHAINS)
    list(decoder.stream(FREE, 24))
    assert bool(depths) is runs


def test_its_time_is_known_before_generations_that_run_at_once(
    loaded: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[nn.Module] = []

    def costs_for(drafts: LoadedModel) -> FixedCosts:
        measured.append(drafts.model)
        return FixedCosts(CostCurve([(1, 1)]))

    monkeypatch.setattr("mlxspec.engine.draft_model.costs_for", costs_for)
    AutoDecoder(*loaded, draft_model=loaded[0])
    assert measured == [loaded[0]]


@pytest.mark.parametrize("prompt", [FREE, REPEAT])
def test_draft_model_is_an_argument_as_with_mlx_lm(
    loaded: tuple, smaller: nn.Module, drafts_are_free: None, prompt: str
) -> None:
    options = {"max_tokens": 24, "draft_model": smaller, "num_draft_tokens": 3}
    expected = list(stream_generate(*loaded, prompt, **options))
    actual = list(mlxspec.stream_generate(*loaded, prompt, **options))
    assert fields(actual) == fields(expected)
    assert actual[-1].stats.steps < 20
    assert any(response.from_draft for response in actual)


def test_the_argument_samples_with_the_output_s_random_numbers(
    loaded: tuple, drafts_are_free: None
) -> None:
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
    loaded: tuple, smaller: nn.Module, drafts_are_free: None
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


def test_a_head_and_a_draft_model_are_refused_together(loaded: tuple) -> None:
    with pytest.raises(OptionError, match="head and draft_model are given together"):
        AutoDecoder(*loaded, head="a", draft_model=loaded[0])
