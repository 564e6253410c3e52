"""A drafter can never change the output, only the speed."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.engine.capability import Capability
from mlxspec.engine.sampling import SamplingParams
from tests.support.demo import demo
from tests.support.drafters import HostileDrafter
from tests.support.examples import LONG
from tests.support.harness import assert_same_output, plain, run
from tests.support.llama2c import decode_llama2c, load_llama2c
from tests.support.llamas import LLAMAS

pytestmark = pytest.mark.slow

BOS = 1
TEMPERATURES = [0.0, 0.7, 1.0] if LONG else [0.0, 0.7]
RENAME = """[INST] Rename `total` to `river` in this code:
```python
def total(a):
    total = 0
    for node in a:
        total += node
    return total
``` [/INST]"""


def test_stories260k_writes_its_published_text(shared: Path) -> None:
    model = load_llama2c(shared / "models/stories260K/stories260K.bin")
    page = (shared / "models/stories260K/stories260K.md").read_text()
    published = page.split("-t 0.0\n")[1].split("\n```")[0]
    tokenizer = shared / "models/stories260K/tok512.bin"
    for drafter in (None, PromptLookupDrafter()):
        options = {"max_tokens": 256 if LONG else 100, "stop_tokens": {BOS}}
        if drafter is None:
            tokens = plain(model, [BOS], **options)
        else:
            tokens = run(model, [BOS], drafter, **options).tokens
        text = decode_llama2c(tokenizer, tokens)
        assert len(text) > 150
        assert text == (published if LONG else published[: len(text)])


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("model", LLAMAS, indirect=True)
def test_hostile_and_real_drafters_leave_the_output_as_it_is(model: nn.Module, temp: float) -> None:
    vocab_size = model.args.vocab_size
    accepted = {"tree": 0, "chain": 0, "lookup": 0}
    for seed in range(3 if LONG else 2):
        mx.random.seed(seed)
        prompt = [BOS, *mx.random.randint(3, vocab_size, (5 * seed,)).tolist()]
        params = SamplingParams(temp=temp, seed=seed)
        options = {"max_tokens": 40, "params": params, "stop_tokens": {BOS}}
        expected = plain(model, prompt, **options)
        for kind, drafter in {
            "tree": HostileDrafter(expected, vocab_size, BOS, seed),
            "chain": HostileDrafter(expected, vocab_size, BOS, seed, chains=True),
            "lookup": PromptLookupDrafter(),
        }.items():
            capability = Capability.TREE if kind == "tree" else Capability.CHAIN
            outcome = run(model, prompt, drafter, capability=capability, **options)
            assert_same_output(model, prompt, expected, outcome.tokens, params)
            accepted[kind] += outcome.accepted
    assert min(accepted.values()) > 0  # otherwise the test checked nothing


@pytest.mark.nightly(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("temp", TEMPERATURES)
def test_the_demo_model_writes_the_same_with_every_drafter(temp: float) -> None:
    model, tokenizer = demo().model, demo().tokenizer
    prompt = tokenizer.encode(RENAME)
    params = SamplingParams(temp=temp, top_p=0.9, seed=7)
    stop_tokens = tokenizer.eos_token_ids
    options = {"max_tokens": 40, "params": params, "stop_tokens": stop_tokens}
    expected = plain(model, prompt, **options)
    (stop_token,) = stop_tokens
    for drafter in (
        PromptLookupDrafter(),
        HostileDrafter(expected, len(tokenizer), stop_token, seed=1),
    ):
        outcome = run(model, prompt, drafter, **options)
        assert outcome.accepted > 0
        assert_same_output(model, prompt, expected, outcome.tokens, params)


@pytest.mark.compiled
def test_greedy_output_equals_mlx_lm(model: nn.Module) -> None:
    prompt = [BOS, 403, 407]
    expected = [token for token, _ in generate_step(mx.array(prompt), model, max_tokens=60)]
    assert plain(model, prompt, max_tokens=60) == expected
    actual = run(model, prompt, PromptLookupDrafter(), max_tokens=60).tokens
    assert_same_output(model, prompt, expected, actual)


def test_a_model_without_trees_verifies_the_first_chain(model: nn.Module) -> None:
    expected = plain(model, [BOS], max_tokens=50)
    hostile = HostileDrafter(expected, model.args.vocab_size, BOS, seed=2)
    outcome = run(model, [BOS], hostile, max_tokens=50, capability=Capability.CHAIN)
    assert outcome.accepted > 0
    assert_same_output(model, [BOS], expected, outcome.tokens)


def test_a_model_that_cannot_be_cut_back_is_never_given_a_draft(model: nn.Module) -> None:
    expected = plain(model, [BOS], max_tokens=50)
    hostile = HostileDrafter(expected, model.args.vocab_size, BOS, seed=2)
    outcome = run(model, [BOS], hostile, max_tokens=50, capability=Capability.PLAIN)
    assert outcome.tokens == expected
    assert outcome.steps == 50
