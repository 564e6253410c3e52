"""Log-probabilities per token, compared with mlx-lm's."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlxspec import LookaheadDecoder, PromptLookupDecoder
from mlxspec.errors import OptionError
from mlxspec.generation.response import GenerationResponse, GenerationResult
from tests.support.demo import stand_in_decoder

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]'


@pytest.fixture(scope="module")
def decoder() -> PromptLookupDecoder:
    return stand_in_decoder(PromptLookupDecoder)


def test_log_probabilities_equal_mlx_lms(decoder: PromptLookupDecoder) -> None:
    shape = {"repetition_penalty": 1.1, "logit_bias": {300: 2.0}}
    theirs = list(
        mlx_lm.stream_generate(
            decoder.model,
            decoder.tokenizer,
            PROMPT,
            max_tokens=40,
            logits_processors=make_logits_processors(**shape),
        )
    )
    ours = list(decoder.stream(PROMPT, max_tokens=40, **shape))
    assert any(response.from_draft for response in ours)
    assert [r.token for r in ours] == [r.token for r in theirs]
    for own, other in zip(ours, theirs, strict=True):
        reference = np.array(other.logprobs)
        found = own.token_logprobs(4)
        assert found.logprob == pytest.approx(reference[own.token], abs=1e-4)
        best = np.sort(reference)[::-1][:4]
        assert [value for _, value in found.top] == pytest.approx(list(best), abs=1e-4)
        assert [reference[token] for token, _ in found.top] == pytest.approx(list(best), abs=1e-4)


def response_with(decoder: PromptLookupDecoder, logprobs: list[float]) -> GenerationResponse:
    (response,) = decoder.stream(PROMPT, max_tokens=1)
    return dataclasses.replace(response, token=1, logprobs=mx.array(logprobs))


def test_impossible_tokens_are_left_out(decoder: PromptLookupDecoder) -> None:
    response = response_with(decoder, [-math.inf, -2.0, -0.5, -math.inf])
    assert response.token_logprobs(3).top == [(2, -0.5), (1, -2.0)]
    assert response.token_logprobs(99).top == [(2, -0.5), (1, -2.0)]
    assert response.token_logprobs() == dataclasses.replace(response.token_logprobs(3), top=[])
    with pytest.raises(OptionError, match="count is -1"):
        response.token_logprobs(-1)


def test_a_result_collects_log_probabilities_only_where_they_are_wanted(
    decoder: PromptLookupDecoder,
) -> None:
    responses = list(decoder.stream(PROMPT, max_tokens=5))
    for wanted in (None, 0, 2):
        result = GenerationResult(logprobs=None if wanted is None else [])
        for response in responses:
            result.add(response, wanted or 0)
        collected = result.logprobs
        if wanted is None:
            assert collected is None
        else:
            assert collected == [response.token_logprobs(wanted) for response in responses]


def test_log_probabilities_can_be_read_in_any_thread(decoder: PromptLookupDecoder) -> None:
    theirs = mlx_lm.stream_generate(decoder.model, decoder.tokenizer, PROMPT, max_tokens=40)
    expected = [np.array(response.logprobs) for response in theirs]
    responses = list(decoder.stream(PROMPT, max_tokens=40))
    assert any(response.from_draft for response in responses)
    with ThreadPoolExecutor(1) as thread:
        read = [thread.submit(np.array, response.logprobs).result() for response in responses]
    np.testing.assert_allclose(read, expected, atol=1e-4)


def test_responses_that_are_kept_hold_what_mlx_lms_hold() -> None:
    decoder = stand_in_decoder(LookaheadDecoder)

    def bytes_held(stream: Iterable[GenerationResponse]) -> int:
        gc.collect()
        before = mx.get_active_memory()
        kept = [response.logprobs for response in stream]
        gc.collect()
        assert len(kept) > 30
        return mx.get_active_memory() - before

    theirs = mlx_lm.stream_generate(decoder.model, decoder.tokenizer, PROMPT, max_tokens=40)
    expected = bytes_held(theirs)
    ours = decoder.stream(PROMPT, max_tokens=40, W=10, N=5, G=8)
    # Keeping a step's rows would take tens of times this much; a decoder's rest is a tenth of it.
    assert bytes_held(ours) <= 2 * expected
