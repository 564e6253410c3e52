"""What counts as a near tie."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlxspec
from mlxspec.bench.measure import NEAR_TIE_FLOAT32, first_difference, near_tie_bound
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
        # spacing of numbers from 16 to 32: 2^4 · 2^-7 and 2^4 · 2^-10
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
