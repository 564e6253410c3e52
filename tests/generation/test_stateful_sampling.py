"""Stateful processors and samplers get the same calls as from mlx-lm."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlxspec
from mlxspec import AutoDecoder, LookaheadDecoder, PromptLookupDecoder
from mlxspec.engine.sampling import SamplingParams
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT
from tests.support.drop_in import (
    REPEAT,
    give_costs,
    stand_in_with_costs,
    stream_generate,
)

pytestmark = pytest.mark.slow

END = 2
Call = tuple[str, list[int], str, tuple[int, ...]]


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return stand_in_with_costs(FLAT)


class Recorded:
    """Logs each call's input and forces the end at a call. Repeated calls would break both."""

    def __init__(self, name: str, end: int, log: list[Call]) -> None:
        self.name, self.end, self.log = name, end, log
        self.calls = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.calls += 1
        self.log.append((self.name, tokens.tolist(), str(tokens.dtype), logits.shape))
        if self.calls == self.end:
            return mx.where(mx.arange(logits.shape[-1]) == END, 1e9, logits)
        return logits


def recorded(end: int = 25) -> tuple[list[Recorded], list[Call]]:
    log: list[Call] = []
    return [Recorded("first", end, log), Recorded("second", end, log)], log


Generate = Callable[..., list[int]]


def by_function(function: Callable) -> Generate:
    def generate(model: nn.Module, tokenizer: Any, prompt: Any, **options: Any) -> list[int]:
        return [r.token for r in function(model, tokenizer, prompt, **options)]

    return generate


def augmented(model: nn.Module, tokenizer: Any, prompt: Any, **options: Any) -> list[int]:
    with mlxspec.augment(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return by_function(mlx_lm.stream_generate)(model, tokenizer, prompt, **options)


def by_decoder(kind: type, **own: Any) -> Generate:
    def generate(model: nn.Module, tokenizer: Any, prompt: Any, **options: Any) -> list[int]:
        decoder = kind(model, tokenizer)
        if kind is not PromptLookupDecoder:
            decoder.costs = give_costs(model, tokenizer, FLAT).costs
        return [r.token for r in decoder.stream(prompt, **own, **options)]

    return generate


def with_draft_model(model: nn.Module, tokenizer: Any, prompt: Any, **options: Any) -> list[int]:
    return by_function(mlxspec.stream_generate)(
        model, tokenizer, prompt, draft_model=model, **options
    )


WAYS = {
    "stream_generate": by_function(mlxspec.stream_generate),
    "augment": augmented,
    "draft model": with_draft_model,
    "prompt lookup": by_decoder(PromptLookupDecoder),
    "auto": by_decoder(AutoDecoder),
    "lookahead": by_decoder(LookaheadDecoder, window_size=4),
    "session": by_decoder(AutoDecoder, session=mlxspec.Session()),
}


@functools.cache
def what_mlx_lm_does(max_tokens: int) -> tuple[list[int], list[Call]]:
    """Return mlx-lm's output and its calls."""
    processors, log = recorded()
    generate = by_function(stream_generate)
    model, tokenizer = stand_in_with_costs(FLAT)
    options = {"max_tokens": max_tokens, "logits_processors": processors}
    return generate(model, tokenizer, REPEAT, **options), log


@pytest.mark.parametrize("max_tokens", [1, 2, 24, 40], ids="up to {}".format)
@pytest.mark.parametrize("way", WAYS)
def test_stateful_processors_see_mlx_lm_s_calls_and_write_its_output(
    loaded: tuple, way: str, max_tokens: int
) -> None:
    """Up to 24 tokens the output is complete; of 40, it ends after 25."""
    expected, their_log = what_mlx_lm_does(max_tokens)
    ours, log = recorded()
    actual = WAYS[way](*loaded, REPEAT, max_tokens=max_tokens, logits_processors=ours)
    assert actual == expected
    assert log == their_log
    assert len(expected) == min(max_tokens, 25)


@pytest.mark.parametrize("kind", ["qwen3", "mamba2"])
@pytest.mark.parametrize("stopping", [False, True])
def test_a_prompt_cache_goes_on_as_mlx_lm_s_with_a_stateful_processor(
    loaded: tuple, kind: str, stopping: bool
) -> None:
    model = ARCHITECTURES[kind].model()
    give_costs(model, loaded[1], FLAT)
    end = 6 if stopping else 99

    def turns(function: Callable) -> tuple:
        cache = make_prompt_cache(model)
        processors, log = recorded(end)
        outputs = [
            by_function(function)(
                *(model, loaded[1], prompt),
                max_tokens=9,
                logits_processors=processors,
                prompt_cache=cache,
            )
            for prompt in ([5, 6, 7], [5, 6, 7, 8])
        ]
        return outputs, log

    assert turns(mlxspec.stream_generate) == turns(stream_generate)


def test_an_abandoned_generation_has_made_mlx_lm_s_calls(loaded: tuple) -> None:
    def calls(function: Callable) -> list[Call]:
        processors, log = recorded()
        responses = function(*loaded, REPEAT, logits_processors=processors)
        for _ in range(7):
            next(responses)
        responses.close()
        return log

    assert calls(mlxspec.stream_generate) == calls(stream_generate)


def test_each_prompt_of_a_batch_makes_the_calls_that_it_makes_alone(loaded: tuple) -> None:
    give_costs(*loaded)
    prompts = [loaded[1].encode(REPEAT), loaded[1].encode("A day")]
    seen: list[list[int]] = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    options = {"max_tokens": 20, "logits_processors": [note]}
    answers = mlxspec.batch_generate(*loaded, prompts, return_token_ids=True, **options)
    together, ends = seen.copy(), loaded[1].eos_token_ids
    for prompt, answer in zip(prompts, answers.token_ids, strict=True):
        seen.clear()
        tokens = [response.token for response in stream_generate(*loaded, prompt, **options)]
        assert answer == [token for token in tokens if token not in ends]
        assert [call for call in together if call[: len(prompt)] == prompt] == seen


def test_a_stateful_sampler_is_called_once_a_token_as_mlx_lm_calls_it(loaded: tuple) -> None:
    def second_best_now_and_then() -> tuple[Callable, list[tuple[int, ...]]]:
        calls: list[tuple[int, ...]] = []

        def sampler(logprobs: mx.array) -> mx.array:
            calls.append(logprobs.shape)
            return mx.argsort(logprobs, axis=-1)[:, -2 if len(calls) % 7 == 0 else -1]

        return sampler, calls

    sampler, their_calls = second_best_now_and_then()
    expected = by_function(stream_generate)(*loaded, REPEAT, max_tokens=30, sampler=sampler)
    sampler, calls = second_best_now_and_then()
    actual = by_function(mlxspec.stream_generate)(*loaded, REPEAT, max_tokens=30, sampler=sampler)
    assert actual == expected
    assert calls == their_calls


def test_pure_processors_and_samplers_are_drafted_with(loaded: tuple) -> None:
    @mlxspec.pure
    def untouched(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits

    greedy = mlxspec.pure(lambda logprobs: mx.argmax(logprobs, axis=-1))
    expected = by_function(stream_generate)(*loaded, REPEAT, max_tokens=40)
    for options in ({}, {"logits_processors": [untouched]}, {"sampler": greedy}):
        responses = list(mlxspec.stream_generate(*loaded, REPEAT, max_tokens=40, **options))
        assert [r.token for r in responses] == expected
        assert responses[-1].stats.accepted > 10


def test_mlx_lm_s_own_are_known_to_be_pure_and_what_wraps_them_is_not() -> None:
    own = make_logits_processors({5: 1.0}, 1.1, 20, 0.1, 20, 0.1, 20)
    assert len(own) == 4
    assert SamplingParams(logits_processors=own, sampler=make_sampler(0.8, 0.9)).allows_drafts
    marked = mlxspec.pure(own[0])
    for processor in (own[0], marked):

        @functools.wraps(processor)
        def counting(*args: Any, inner: Callable = processor) -> mx.array:
            return inner(*args)

        assert not SamplingParams(logits_processors=[*own, counting]).allows_drafts
        assert SamplingParams(logits_processors=[processor]).allows_drafts


def test_an_error_at_the_call_behind_the_last_token_comes_through_as_with_mlx_lm(
    loaded: tuple,
) -> None:
    def seen(function: Callable) -> int:
        calls, tokens = 0, []

        def fails(_: mx.array, logits: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise ZeroDivisionError
            return logits

        responses = function(*loaded, REPEAT, max_tokens=4, logits_processors=[fails])
        with pytest.raises(ZeroDivisionError):
            tokens.extend(response.token for response in responses)
        return len(tokens)

    assert seen(mlxspec.stream_generate) == seen(stream_generate) == 3
