"""The definition of a near tie."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import mlxspec
from mlxspec.bench.measure import (
    BACKENDS,
    NEAR_TIE_FLOAT32,
    PLAIN,
    bench_report,
    exactness,
    first_difference,
    measure,
    model_facts,
    near_tie_bound,
)
from mlxspec.bench.prompts import bundled_prompts
from mlxspec.engine.sampling import SamplingParams

GREEDY = SamplingParams()


class FixedLogits(mlxspec.engine.target.nn.Module):
    """A model that always returns the same logits."""

    def __init__(self, logits: list[float], dtype: mx.Dtype) -> None:
        super().__init__()
        self.layers: list[object] = []
        self._logits = mx.array(logits, dtype=dtype)

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        return mx.broadcast_to(self._logits, (*tokens.shape, self._logits.size))


@pytest.mark.parametrize(
    ("dtype", "logit", "bound"),
    [
        # spacing of floats from 16 to 32: 2^4 · 2^-7 and 2^4 · 2^-10
        (mx.bfloat16, 17.5, 4 * 0.125),
        (mx.float16, 17.5, 4 * 0.015625),
        (mx.float16, 3.0, 4 * 0.001953125),
        (mx.float32, 17.5, NEAR_TIE_FLOAT32),
    ],
)
def test_the_bound_follows_from_the_data_type_s_spacing(
    dtype: mx.Dtype, logit: float, bound: float
) -> None:
    logits = mx.array([[-logit, 0.5, logit]], dtype=dtype)
    assert near_tie_bound(logits, GREEDY) == pytest.approx(bound)


def test_a_low_temperature_widens_the_bound_of_half_precision() -> None:
    logits = mx.array([[16.0, 1.0]], dtype=mx.bfloat16)
    greedy = near_tie_bound(logits, GREEDY)
    assert near_tie_bound(logits, SamplingParams(temp=0.5)) == pytest.approx(2 * greedy)


def test_equal_outputs_have_no_difference() -> None:
    assert first_difference(FixedLogits([1.0], mx.float32), [0], [1, 2], [1, 2], GREEDY) is None


def test_a_tie_of_two_other_tokens_excuses_no_third_one() -> None:
    model = FixedLogits([5.0, 5.0, 1.0], mx.float32)
    tie = first_difference(model, [0], [0], [1], GREEDY)
    assert tie is not None
    assert tie.near_tie
    third = first_difference(model, [0], [0], [2], GREEDY)
    assert third is not None
    assert third.margin == pytest.approx(4.0, abs=1e-5)
    assert not third.near_tie


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_the_margin_is_the_gap_of_the_two_best_logits_in_mlx_lm_s_own_steps(
    dtype: mx.Dtype,
) -> None:
    model, tokenizer = mlxspec.load("demo")
    model.set_dtype(dtype)
    prompt = tokenizer.encode("The history of the")
    steps = list(generate_step(mx.array(prompt), model, max_tokens=8))
    tokens = [int(token) for token, _ in steps]
    for place, (_, logprobs) in enumerate(steps):
        values = np.array(logprobs.astype(mx.float32))
        second, best = np.argsort(values, kind="stable")[-2:]
        other = second if tokens[place] == best else best
        difference = first_difference(model, prompt, tokens, [*tokens[:place], int(other)], GREEDY)
        assert difference is not None
        assert difference.index == place
        assert difference.margin == pytest.approx(
            values[best] - values[second], abs=difference.bound
        )


@pytest.mark.nightly
@pytest.mark.slow
def test_bench_counts_the_outputs_that_differ_in_half_precision() -> None:
    model, tokenizer = mlxspec.load("demo")
    model.set_dtype(mx.bfloat16)
    makers = {name: BACKENDS[name] for name in (PLAIN, "prompt-lookup")}
    options = {"max_tokens": 40, "repeats": 1, "sampling": SamplingParams()}
    measured = list(measure(model, tokenizer, makers, bundled_prompts(), **options))
    facts = {"model": model_facts(model, "demo"), "machine": {}, "settings": {}}
    report = bench_report(measured, facts)
    outputs = [[runs[0].tokens for runs in prompt.runs.values()] for prompt in measured]
    same = sum(plain == drafted for plain, drafted in outputs)
    assert report["exactness"]["outputs"] == len(outputs)
    assert report["exactness"]["differ"] == len(outputs) - same
    assert exactness(report).startswith(
        f"{same} of {len(outputs)} outputs are identical to plain decoding's, in bfloat16."
    )
    assert ("apart" in exactness(report)) == (same < len(outputs))
