"""A sampler of the caller's own, which draws from MLX's random state."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from mlxspec.engine.capability import Capability
from mlxspec.engine.chooser import Chooser
from mlxspec.engine.sampling import SamplingParams
from mlxspec.errors import OptionError
from tests.engine.test_sampling import chi_square, chi_square_limit, exact
from tests.support.drafters import HostileDrafter
from tests.support.harness import plain, run

BOS = 1
SAMPLERS: dict[str, Callable[[], Callable[[mx.array], mx.array]]] = {
    "greedy": lambda: make_sampler(0.0),
    "tempered": lambda: make_sampler(0.7),
    "filtered": lambda: make_sampler(1.0, top_p=0.9, xtc_probability=0.5, xtc_threshold=0.05),
    "draws twice": lambda: draws_twice,
}


def draws_twice(logprobs: mx.array) -> mx.array:
    """Best of two draws, in a shape without rows."""
    one, other = (mx.random.categorical(logprobs).item() for _ in range(2))
    return mx.array(max(one, other))


@pytest.mark.parametrize("name", SAMPLERS)
def test_speculated_tokens_equal_plain_ones(model: nn.Module, name: str) -> None:
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


def test_a_choice_depends_on_seed_and_position_alone() -> None:
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


@pytest.mark.parametrize("values", [{"temp": 0.5}, {"top_k": 3}, {"xtc_probability": 0.2}], ids=str)
def test_a_sampler_beside_what_it_replaces_is_refused(values: dict) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=f"^{name} is .* beside a sampler"):
        SamplingParams(sampler=make_sampler(0.5), **values)
