"""Prompts whose answers copy from them, run in joint steps, get the same answers as alone."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.nn as nn
import pytest

import mlxspec
from mlxspec.bench.prompts import bundled_prompts
from mlxspec.engine.sampling import SamplingParams
from mlxspec.generation.scheduler import Scheduler
from tests.support.demo import FLAT, demo, endless_tokenizer, given_costs
from tests.support.examples import LONG
from tests.support.harness import assert_same_output
from tests.support.llama2c import load_llama2c
from tests.support.schedulers import submit

pytestmark = pytest.mark.slow

GROUNDED = ("repeat", "rename", "edit JSON", "quote")
COUNTS = (2, 4, 8) if LONG else (4,)
TOKENS = 120 if LONG else 20
SEEDS = range(4 if LONG else 1)


def grounded_prompts() -> list[list[int]]:
    """Return grounded prompts of all kinds in turn, as token ids."""
    tokenizer = demo().tokenizer
    by_kind = [
        [prompt.messages for prompt in bundled_prompts() if prompt.category == kind]
        for kind in GROUNDED
    ]
    return [
        tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        for of_each_kind in zip(*by_kind, strict=False)
        for messages in of_each_kind
    ]


def repetitions() -> list[list[int]]:
    """Return prompts that repeat random tokens of a small vocabulary."""
    source = random.Random(5)
    return [[1, *[source.randrange(3, 100) for _ in range(12)] * 3] for _ in range(8)]


def assert_equal_to_those_alone(
    model: nn.Module, plain: mlxspec.Decoder, prompts: list[list[int]], temp: float
) -> None:
    decoder = mlxspec.AutoDecoder(model, plain.tokenizer, memory_tokens=0)
    decoder.costs = given_costs(FLAT)
    alone: dict[tuple[int, int], list[int]] = {}
    drafted = 0
    for count in COUNTS:
        for seed in SEEDS:
            scheduler = Scheduler(decoder, stall=float("inf"))
            found: list[list[mlxspec.GenerationResponse]] = [[] for _ in range(count)]
            for number, responses in enumerate(found):
                own = prompts[number % len(prompts)]
                submit(scheduler, own, responses.append, TOKENS, temp=temp, seed=seed)
            scheduler.run()
            for number, responses in enumerate(found):
                prompt = prompts[number % len(prompts)]
                key = number % len(prompts), seed
                if key not in alone:
                    options = {"temp": temp, "seed": seed}
                    alone[key] = [r.token for r in plain.stream(prompt, TOKENS, **options)]
                tokens = [response.token for response in responses]
                params = SamplingParams(temp=temp, seed=seed)
                assert_same_output(model, prompt, alone[key], tokens, params)
                drafted += responses[-1].stats.drafted
    assert drafted > 0


@pytest.mark.nightly
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_the_bundled_model_copies_as_it_does_alone(temp: float) -> None:
    plain = mlxspec.Decoder(demo().model, demo().tokenizer)
    assert_equal_to_those_alone(demo().model, plain, grounded_prompts(), temp)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_babyllama_repeats_as_it_does_alone(shared: Path, temp: float) -> None:
    model = load_llama2c(shared / "models/babyllama_tok105/model5000.bin")
    plain = mlxspec.Decoder(model, endless_tokenizer())
    assert_equal_to_those_alone(model, plain, repetitions(), temp)
