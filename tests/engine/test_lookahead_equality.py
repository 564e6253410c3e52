"""Lookahead decoding never changes the output; its gain on the bundled demo model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxspec.drafting.lookahead import LookaheadDrafter
from mlxspec.engine.capability import Capability
from mlxspec.engine.sampling import SamplingParams
from tests.support.demo import demo
from tests.support.examples import LONG
from tests.support.harness import Run, assert_same_output, plain, run
from tests.support.llamas import LLAMAS

pytestmark = pytest.mark.slow

BOS = 1
REPEAT = (
    '[INST] Repeat the following phrase 10 times: "The quick brown fox jumps over the lazy dog.". '
    "Don't say anything else. [/INST]"
)
CODE = "import os\nimport sys\n\nclass Queue:\n    def __init__(self, size):\n"
PROMPTS = 10  # every size with and without the prompt in its pool
SIZES = [(2, 2, 2), (3, 3, 2), (5, 4, -1), (3, 5, 3), (10, 5, 8)]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("temp", [0.0, 0.7, 1.0] if LONG else [0.0, 0.7])
@pytest.mark.parametrize("model", LLAMAS if LONG else LLAMAS[:1], indirect=True)
def test_output_is_plain_decodings(model: nn.Module, temp: float) -> None:
    accepted = 0
    for seed in range(PROMPTS):
        mx.random.seed(seed)
        drawn = mx.random.randint(3, model.args.vocab_size, (seed % 15,)).tolist()
        prompt = [BOS, *drawn]  # most are shorter than the window
        params = SamplingParams(temp=temp, seed=seed)
        options = {"max_tokens": 12, "params": params}
        expected = plain(model, prompt, **options)
        for size in (SIZES[seed % 5], SIZES[(seed + 1) % 3]):
            drafter = LookaheadDrafter(*size, pool_from_prompt=seed % 2 == 0)
            outcome = run(model, prompt, drafter, **options)
            assert_same_output(model, prompt, expected, outcome.tokens, params)
            accepted += outcome.accepted
    assert accepted > 0


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("temp", "text"),
    [(0.0, REPEAT), (0.7, CODE), *([(0.0, CODE), (0.7, REPEAT)] if LONG else [])],
)
def test_the_demo_model_writes_the_same(temp: float, text: str) -> None:
    model, tokenizer = demo().model, demo().tokenizer
    params = SamplingParams(temp=temp, seed=3)
    options = {"max_tokens": 20, "params": params, "stop_tokens": tokenizer.eos_token_ids}
    prompt = tokenizer.encode(text)
    expected = plain(model, prompt, **options)
    outcome = run(model, prompt, LookaheadDrafter(3, 4, 3), **options)
    assert outcome.accepted > 0
    assert_same_output(model, prompt, expected, outcome.tokens, params)


@pytest.mark.nightly(keep=1)
def test_a_model_without_trees_gets_the_newest_guess(model: nn.Module) -> None:
    expected = plain(model, [BOS], max_tokens=50)
    drafter = LookaheadDrafter(5, 4, 4)
    outcome = run(model, [BOS], drafter, max_tokens=50, capability=Capability.CHAIN)
    assert outcome.accepted > 0
    assert_same_output(model, [BOS], expected, outcome.tokens)


def decode_demo(text: str, pool_from_prompt: bool) -> Run:
    model, tokenizer = demo().model, demo().tokenizer
    return run(
        model,
        tokenizer.encode(text),
        LookaheadDrafter(10, 5, 8, pool_from_prompt=pool_from_prompt),
        max_tokens=30,
        stop_tokens=tokenizer.eos_token_ids,
    )


def test_a_text_that_repeats_the_prompt_takes_few_steps() -> None:
    outcome = decode_demo(REPEAT, pool_from_prompt=True)
    assert len(outcome.tokens) / outcome.steps > 3.5


def test_code_takes_few_steps_without_anything_to_copy() -> None:
    outcome = decode_demo(CODE, pool_from_prompt=False)
    assert len(outcome.tokens) / outcome.steps > 2.2
