"""A prompt's output does not depend on how other requests split it into chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import mlxspec
from mlxspec.generation.scheduler import Scheduler
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import endless_tokenizer
from tests.support.random_models import scaled_rope
from tests.support.schedulers import submit

PROMPT = [(7 * i * i + 3 * i) % 64 for i in range(75)]
BOUNDED = {"max_kv_size": 24}
QUANTISED = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 40}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "bounded": ("qwen3", BOUNDED),
    "bounded, in several steps": ("mixtral", {**BOUNDED, "prefill_step_size": 32}),
    "latent and bounded": ("deepseek_v3", BOUNDED),
    "quantised at the end": ("wide", QUANTISED),
    "quantised on the way": ("wide", {**QUANTISED, "prefill_step_size": 32}),
    "quantised from the beginning": ("wide", {**QUANTISED, "quantized_kv_start": 0}),
    "rows that change each other": ("phi3small", {}),
    "a base that grows": ("dynamic", {"prefill_step_size": 20}),
    "state and window": ("recurrent_gemma", {}),
}
DYNAMIC = {**scaled_rope("dynamic", factor=4.0), "max_position_embeddings": 32}
each_case = pytest.mark.parametrize("case", CASES)


@cache
def decoder_of(name: str) -> mlxspec.Decoder:
    changed = {"wide": {"head_dim": 32}, "dynamic": DYNAMIC}
    architecture = ARCHITECTURES["llama3" if name in changed else name]
    if name in changed:
        architecture = replace(architecture, config=changed[name])
    return mlxspec.Decoder(architecture.model(), endless_tokenizer())


def logprobs_of(responses: Any) -> mx.array:
    return mx.stack([response.logprobs for response in responses])


def assert_close(found: mx.array, expected: mx.array) -> None:
    finite = mx.where(mx.isinf(expected), 0, found - expected)
    assert mx.max(mx.abs(finite)).item() < 1e-3


def by_mlx_lm(decoder: mlxspec.Decoder, prompt: list[int], **options: Any) -> mx.array:
    steps = generate_step(mx.array(prompt), decoder.model, max_tokens=6, **options)
    return mx.stack([logprobs for _, logprobs in steps])


@pytest.mark.slow
@each_case
def test_a_prompt_that_others_cut_gives_what_mlx_lm_gives(case: str) -> None:
    name, options = CASES[case]
    decoder = decoder_of(name)
    scheduler, responses = Scheduler(decoder), []
    sizes = iter([5, 1, 16, 9, 3] * 20)
    scheduler._chunk = lambda: next(sizes)
    submit(scheduler, PROMPT, responses.append, 6, **options)
    scheduler.run()
    assert_close(logprobs_of(responses), by_mlx_lm(decoder, PROMPT, **options))


@each_case
def test_a_sessions_first_prompt_gives_what_mlx_lm_gives(case: str) -> None:
    name, options = CASES[case]
    decoder, session = decoder_of(name), mlxspec.Session()
    responses = [*decoder.stream(PROMPT, 6, session=session, **options)]
    expected = by_mlx_lm(decoder, PROMPT, **options)
    assert_close(logprobs_of(responses), expected)
    again = [*decoder.stream(PROMPT, 6, session=session, **options)]  # like after /retry
    assert_close(logprobs_of(again), expected)


@pytest.mark.slow
def test_short_prompts_of_a_model_whose_rows_change_each_other_run_by_themselves() -> None:
    decoder = decoder_of("phi3small")
    prompts = [PROMPT[:9], PROMPT[4:25], PROMPT[:14]]
    scheduler, found = Scheduler(decoder), [[] for _ in prompts]
    for prompt, responses in zip(prompts, found, strict=True):
        submit(scheduler, prompt, responses.append, 6)
    scheduler.run()
    for prompt, responses in zip(prompts, found, strict=True):
        assert_close(logprobs_of(responses), by_mlx_lm(decoder, prompt))
    written = mlxspec.batch_generate(
        decoder.model, decoder.tokenizer, prompts, max_tokens=6, return_token_ids=True
    )
    expected = [[response.token for response in responses] for responses in found]
    assert written.token_ids == expected
