"""Sampling compared with exact distributions, and custom samplers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from mlxspec.engine.capability import Capability
from mlxspec.engine.sampling import Chooser, SamplingParams
from mlxspec.errors import OptionError
from tests.support.drafters import HostileDrafter
from tests.support.examples import examples
from tests.support.harness import plain, run

pytestmark = pytest.mark.slow

FILTERS = [
    {},
    {"top_p": 0.8},
    {"top_k": 4},
    {"min_p": 0.15},
    {"min_p": 0.9, "min_tokens_to_keep": 3},
    {"min_p": 0.9, "min_tokens_to_keep": 99},
    {"top_p": 0.9, "top_k": 5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.08},
    {"xtc_probability": 0.4, "xtc_threshold": 0.08},
    {"xtc_probability": 0.4, "xtc_threshold": 0.05, "xtc_special_tokens": [3, 6]},
    {"top_p": 0.95, "min_p": 0.1, "xtc_probability": 0.6, "xtc_threshold": 0.1, "top_k": 2},
]


def exact(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Return the distribution by definition: mlx-lm's order, filters before temperature."""
    tossed = params.xtc_probability
    return tossed * exact_given_xtc(logits, params, True) + (1 - tossed) * exact_given_xtc(
        logits, params, False
    )


def exact_given_xtc(logits: np.ndarray, params: SamplingParams, xtc: bool) -> np.ndarray:
    """Return the distribution, given whether XTC applies."""
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    kept = np.ones(len(logits), dtype=bool)
    if params.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        kept[order[before >= params.top_p]] = False
    too_unlikely = probabilities < params.min_p * probabilities.max()
    too_unlikely[order[: params.min_tokens_to_keep]] = False
    kept &= ~too_unlikely
    if xtc:
        among_kept = np.where(kept, probabilities, 0) / probabilities[kept].sum()
        top_choices = [token for token in order if among_kept[token] > params.xtc_threshold]
        dropped = set(top_choices[:-1]) - set(params.xtc_special_tokens)
        kept[list(dropped)] = False
    if params.top_k:
        ranked = [token for token in order if kept[token]]
        kept[ranked[params.top_k :]] = False
    tempered = np.where(kept, probabilities, 0) ** (1 / params.temp)
    return tempered / tempered.sum()


def chi_square_limit(degrees: int) -> float:
    """Return the value that chi-square exceeds with probability 1e-4 (Wilson and Hilferty 1931)."""
    ninth = 2 / (9 * degrees)
    return degrees * (1 - ninth + 3.719 * math.sqrt(ninth)) ** 3


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; rare outcomes are pooled."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    used = expected > 0
    return float(((observed - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1


def test_numbers_and_ids_of_any_kind_are_python_s() -> None:
    given = SamplingParams(
        temp=np.float32(0.5),
        top_k=np.int64(5),
        top_p=np.float32(0.5),
        repetition_penalty=np.float64(1.5),
        logit_bias={5: 10**30},
        xtc_probability=np.float32(0.5),
        xtc_special_tokens=iter([1, 2]),
    )
    assert given == SamplingParams(
        temp=0.5,
        top_k=5,
        top_p=0.5,
        repetition_penalty=1.5,
        logit_bias={5: 1e30},
        xtc_probability=0.5,
        xtc_special_tokens=(1, 2),
    )
    kinds = [type(value) for value in (given.temp, given.top_k, given.logit_bias[5])]
    assert kinds == [float, int, float]


@pytest.mark.nightly(keep=len(FILTERS))
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temp", [0.6, 1.0, 1.7])
def test_choices_follow_the_exact_distribution(temp: float, filters: dict) -> None:
    params = SamplingParams(temp=temp, seed=3, **filters)
    logits = np.random.default_rng(1).normal(0, 1.5, 12).astype(np.float32)
    rows = mx.repeat(mx.array(logits)[None], 20_000, axis=0)
    choices, _ = Chooser(params).choose(rows, range(5, 20_005))
    probabilities = exact(logits, params)
    counts = np.bincount(np.array(choices), minlength=12)
    assert counts[probabilities == 0].sum() == 0
    statistic, degrees = chi_square(counts, probabilities)
    assert statistic < chi_square_limit(degrees)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95, "xtc_probability": 0.5}], ids=str)
def test_speculated_pairs_follow_the_exact_joint_distribution(
    tiny: nn.Module, filters: dict
) -> None:
    """Decode two tokens under hostile trees with many seeds; compare with all 64 pairs."""
    prompt, runs = [1, 2, 3], examples(300, long=4000)
    at = SamplingParams(temp=0.9, **filters)

    def row(context: list[int]) -> np.ndarray:
        return exact(np.array(tiny(mx.array(context)[None])[0, -1]), at)

    joint = np.zeros((8, 8))
    for first in range(8):
        joint[first] = row(prompt)[first] * row([*prompt, first])
    counts = np.zeros((8, 8))
    accepted = 0
    for seed in range(runs):
        drafter = HostileDrafter([seed % 8, seed // 8 % 8], 8, 0, seed)
        params = SamplingParams(temp=0.9, seed=seed, **filters)
        outcome = run(tiny, prompt, drafter, max_tokens=2, params=params)
        counts[tuple(outcome.tokens)] += 1
        accepted += outcome.accepted
    assert accepted > runs / 10
    assert counts[joint == 0].sum() == 0
    statistic, degrees = chi_square(counts.ravel(), joint.ravel())
    assert degrees > 8
    assert statistic < chi_square_limit(degrees)


def test_a_choice_depends_on_seed_and_position_alone() -> None:
    logits = mx.random.normal((6, 50), key=mx.random.key(4))
    positions = [9, 10, 10, 11, 10, 12]  # as in a tree: siblings share their position
    chooser = Chooser(SamplingParams(temp=1.0, seed=2))
    together, _ = chooser.choose(logits, positions)
    alone = [chooser.choose(logits[i : i + 1], [positions[i]])[0].item() for i in range(6)]
    assert together.tolist() == alone
    mx.random.seed(99)  # MLX's global random state does not matter
    assert chooser.choose(logits, positions)[0].tolist() == alone


def test_xtc_tosses_one_coin_for_each_position() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.1, 0.1]]))
    chooser = Chooser(SamplingParams(temp=1e-9, seed=5, xtc_probability=0.5, xtc_threshold=0.2))
    positions = [*range(40), *range(40)]
    choices = chooser.choose(mx.repeat(logits, 80, axis=0), positions)[0].tolist()
    assert set(choices) == {0, 1}  # 1 where XTC drops the best token
    assert choices[:40] == choices[40:]
    assert choices[:40] == [chooser.choose(logits, [p])[0].item() for p in range(40)]


@pytest.mark.parametrize("best", range(4))
def test_xtcs_coin_says_nothing_about_the_noise_of_any_token(best: int) -> None:
    params = SamplingParams(temp=1.0, seed=6, xtc_probability=0.5, xtc_threshold=0.25)
    logits = np.roll(np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32)), best)
    rows = mx.repeat(mx.array(logits)[None], 20_000, axis=0)
    choices, _ = Chooser(params).choose(rows, range(20_000))
    counts = np.bincount(np.array(choices), minlength=4)
    statistic, degrees = chi_square(counts, exact(logits, params))
    assert statistic < chi_square_limit(degrees)


def test_of_tokens_that_rounding_makes_equal_mlx_lm_s_choice_is_taken() -> None:
    # After subtracting the log-sum, the two best are equal, and the first of them wins.
    logits = mx.concatenate([mx.array([1.0, 1.0 + 2**-23]), mx.zeros(5000)])[None]
    assert mx.argmax(logits).item() == 1
    theirs = make_sampler(temp=0.0)(logits - mx.logsumexp(logits, keepdims=True))
    choices, _ = Chooser(SamplingParams()).choose(logits, [7])
    assert choices.item() == theirs.item() == 0


def test_seeds_and_positions_give_independent_noise() -> None:
    flat = mx.zeros((1, 1000))
    choices = [
        Chooser(SamplingParams(temp=1.0, seed=seed)).choose(flat, [position])[0].item()
        for seed, position in itertools.product([0, 1, 2**32, 2**64 - 1], range(8))
    ]
    assert len(set(choices)) > 28  # 32 draws from 1000


@pytest.mark.parametrize("temp", [1e-300, 1e-30, 1e-7])
def test_a_low_temperature_is_as_good_as_greedy(temp: float) -> None:
    logits = mx.random.normal((20, 50), key=mx.random.key(1))
    choices, _ = Chooser(SamplingParams(temp=temp, seed=1)).choose(logits, range(20))
    assert choices.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_sampling_leaves_the_random_state_of_mlx_alone() -> None:
    logits = mx.random.normal((3, 20), key=mx.random.key(4))
    filters = {"top_p": 0.9, "min_p": 0.01, "top_k": 9, "xtc_probability": 0.5}
    mx.random.seed(17)
    undisturbed = mx.random.uniform().item()
    mx.random.seed(17)
    Chooser(SamplingParams(temp=0.8, seed=3, **filters)).choose(logits, [4, 5, 5])
    assert mx.random.uniform().item() == undisturbed


def test_without_a_seed_one_is_drawn_from_the_random_state_of_mlx() -> None:
    flat = mx.zeros((64, 1000))

    def sample() -> list[int]:
        return Chooser(SamplingParams(temp=1.0, seed=None)).choose(flat, range(64))[0].tolist()

    mx.random.seed(23)
    first, second = sample(), sample()
    assert first != second
    mx.random.seed(23)
    assert sample() == first


def test_the_seed_determines_the_output(model: nn.Module) -> None:
    def sample(seed: int) -> list[int]:
        return plain(model, [1], max_tokens=16, params=SamplingParams(temp=1.0, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.parametrize(
    "values",
    [
        {"temp": -0.1},
        {"temp": 1e-42},
        {"temp": float("nan")},
        {"top_p": 1.5},
        {"min_p": -1},
        {"top_k": -2},
        {"seed": -1},
        {"seed": 2**64},
        {"min_tokens_to_keep": 0},
        {"xtc_probability": 1.1},
        {"xtc_threshold": 0.6},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("-inf")},
        {"presence_context_size": -1},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(values: dict) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=f"^{name} is ") as raised:
        SamplingParams(**values)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("bias", [float("nan"), float("inf")])
def test_a_non_numeric_bias_is_refused(bias: float) -> None:
    with pytest.raises(OptionError, match="logit_bias of token 5"):
        SamplingParams(logit_bias={4: -math.inf, 5: bias})


BOS = 1
SAMPLERS: dict[str, Callable[[], Callable[[mx.array], mx.array]]] = {
    "greedy": lambda: make_sampler(0.0),
    "tempered": lambda: make_sampler(0.7),
    "filtered": lambda: make_sampler(1.0, top_p=0.9, xtc_probability=0.5, xtc_threshold=0.05),
    "draws twice": lambda: draws_twice,
}


def draws_twice(logprobs: mx.array) -> mx.array:
    """A sampler that takes the better of two draws and returns a shape without rows."""
    one, other = (mx.random.categorical(logprobs).item() for _ in range(2))
    return mx.array(max(one, other))


@pytest.mark.parametrize("name", SAMPLERS)
def test_speculated_tokens_equal_plain_ones_with_a_sampler(model: nn.Module, name: str) -> None:
    params = SamplingParams(sampler=SAMPLERS[name](), seed=8)
    options = {"max_tokens": 60, "params": params, "stop_tokens": {BOS}}
    expected = plain(model, [BOS, 403, 407], **options)
    for capability in (Capability.TREE, Capability.CHAIN):
        hostile = HostileDrafter(
            expected, model.args.vocab_size, BOS, seed=2, chains=capability is Capability.CHAIN
        )
        outcome = run(model, [BOS, 403, 407], hostile, capability=capability, **options)
        assert outcome.accepted > 0
        assert outcome.tokens == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}], ids=str)
def test_choices_follow_the_samplers_distribution(filters: dict) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 12).astype(np.float32)
    chooser = Chooser(SamplingParams(sampler=make_sampler(0.8, **filters), seed=1))
    rows = mx.repeat(mx.array(logits)[None], 1500, axis=0)
    choices, _ = chooser.choose(rows, range(1500))
    counts = np.bincount(np.array(choices), minlength=12)
    probabilities = exact(logits, SamplingParams(temp=0.8, **filters))
    assert counts[probabilities == 0].sum() == 0
    statistic, degrees = chi_square(counts, probabilities)
    assert statistic < chi_square_limit(degrees)


def test_a_samplers_choice_depends_on_seed_and_position_alone() -> None:
    logits = mx.zeros((40, 1000))
    sampler = make_sampler(1.0)

    def sample(seed: int) -> list[int]:
        chooser = Chooser(SamplingParams(sampler=sampler, seed=seed))
        return chooser.choose(logits, range(40))[0].tolist()

    first = sample(1)
    assert sample(1) == first
    assert sum(a == b for a, b in zip(first, sample(2), strict=True)) < 3
    chooser = Chooser(SamplingParams(sampler=sampler, seed=1))
    siblings, _ = chooser.choose(logits[:3], [7, 7, 8])
    assert siblings.tolist() == [first[7], first[7], first[8]]


def test_the_random_state_of_mlx_is_restored_whatever_the_sampler_does() -> None:
    def draws_and_fails(logprobs: mx.array) -> mx.array:
        mx.random.normal((5,))
        raise RuntimeError

    mx.random.seed(31)
    undisturbed = mx.random.uniform().item()
    for sampler in (make_sampler(0.9), draws_and_fails):
        mx.random.seed(31)
        chooser = Chooser(SamplingParams(sampler=sampler, seed=1))
        try:
            chooser.choose(mx.zeros((2, 50)), [3, 4])
        except RuntimeError:
            assert sampler is draws_and_fails
        assert mx.random.uniform().item() == undisturbed


def test_the_sampler_sees_normalised_log_probabilities_row_by_row() -> None:
    seen: list[mx.array] = []

    def log(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmin(logprobs, axis=-1)

    logits = mx.random.normal((3, 9), key=mx.random.key(0))
    choices, logprobs = Chooser(SamplingParams(sampler=log)).choose(logits, [1, 2, 3])
    assert choices.tolist() == mx.argmin(logits, axis=-1).tolist()
    assert [row.shape for row in seen] == [(1, 9)] * 3
    assert mx.array_equal(mx.concatenate(seen), logprobs).item()
    assert mx.allclose(mx.exp(logprobs).sum(axis=-1), mx.ones(3)).item()
