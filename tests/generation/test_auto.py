"""The default decoder, with fixed costs."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

import mlxspec
from mlxspec import AutoDecoder
from mlxspec.bench.measure import NEAR_TIE_FLOAT32, first_difference
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.costs import LiveCosts
from mlxspec.drafting.p_accept import Corrections
from mlxspec.engine.capability import Capability
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.generation.scheduler import responses
from tests.support.demo import FLAT, LINEAR, demo_decoder, given_costs, stand_in_decoder
from tests.support.examples import examples

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 8 times: "The red fox sees the river.". [/INST]'


def decoder_with(
    curve: dict[int, float], make: Any = stand_in_decoder, **options: Any
) -> AutoDecoder:
    decoder = make(AutoDecoder, **options)
    decoder.costs = given_costs(curve)
    return decoder


def tokens(decoder: AutoDecoder, prompt: str = PROMPT, **options: object) -> list[int]:
    return [response.token for response in decoder.stream(prompt, 40, **options)]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("curve", [FLAT, LINEAR], ids=["flat", "linear"])
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_output_is_that_of_plain_decoding(curve: dict, temp: float) -> None:
    decoder = decoder_with(curve)
    sampling = mlxspec.SamplingParams(temp=temp, seed=5)
    plain = mlxspec.PromptLookupDecoder(decoder.model, decoder.tokenizer)
    expected = [r.token for r in plain.stream(PROMPT, 40, n_draft=0, temp=temp, seed=5)]
    for _ in range(2):  # the second time it remembers the first output
        actual = tokens(decoder, temp=temp, seed=5)
        difference = first_difference(
            decoder.model, decoder.tokenizer.encode(PROMPT), expected, actual, sampling
        )
        assert difference is None or difference.margin < NEAR_TIE_FLOAT32


def test_it_drafts_where_rows_are_cheap_and_hardly_where_they_are_not() -> None:
    def stats(curve: dict) -> mlxspec.SpeculationStats:
        *_, last = decoder_with(curve, demo_decoder).stream(PROMPT, examples(40, long=60))
        return last.stats

    assert stats(FLAT).tokens_per_step > 3
    linear = stats(LINEAR)
    assert linear.rows < 1.05 * linear.emitted


def test_a_planner_and_its_index_end_with_their_generation() -> None:
    request = decoder_with(FLAT).new_request(PROMPT, 5, {})
    running = responses(request)
    next(running)
    assert request.sequence
    planner = weakref.ref(request.sequence.planner)
    assert planner()
    list(running)
    assert planner() is None


def test_a_recorded_generation_has_the_same_steps_and_gain() -> None:
    stats, steps = [], list[VerifiedStep]()
    for recorded in (None, steps):
        request = decoder_with(FLAT).new_request(PROMPT, 20, {})
        request.recorded = recorded
        *_, last = responses(request)
        stats.append(last.stats)
    assert stats[1] == stats[0]
    assert (len(steps), sum(step.drafted for step in steps)) == (stats[0].steps, stats[0].drafted)
    assert stats[0].gain is not None
    assert stats[1].gain == stats[0].gain


def test_earlier_outputs_are_drafted_from() -> None:
    prompt = "The history of the"
    with_memory, without = decoder_with(FLAT), decoder_with(FLAT, memory_tokens=0)
    for decoder in (with_memory, without):
        list(decoder.stream(prompt, 50))
    with_memory.memory.settle()
    *_, second = with_memory.stream(prompt, 50)
    *_, forgetful = without.stream(prompt, 50)
    assert second.stats.steps < forgetful.stats.steps


def test_the_opening_of_an_answer_is_found_by_the_end_of_its_prompt() -> None:
    decoder = decoder_with(FLAT)
    answer = tokens(decoder)
    decoder.memory.settle()
    found, occurrences = decoder.memory.look_up(decoder.tokenizer.encode(PROMPT)[-8:], limit=1)
    assert occurrences[0].length == 8
    assert answer[:5] == found[:5]


def test_only_what_is_remembered_teaches_the_next_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learning: list[Corrections] = []
    learn = Corrections.learn

    def recorded(self: Corrections, *outcome: Any) -> None:
        learning.append(self)
        learn(self, *outcome)

    def taught(decoder: AutoDecoder) -> set[int]:
        before = len(learning)
        assert tokens(decoder)
        assert len(learning) > before
        return set(map(id, learning[before:]))

    monkeypatch.setattr(Corrections, "learn", recorded)
    remembering = decoder_with(FLAT)
    assert taught(remembering) & taught(remembering)
    forgetful = decoder_with(FLAT, memory_tokens=0)
    assert taught(forgetful).isdisjoint(taught(forgetful))


@pytest.mark.nightly(keep=1)
def test_decoders_with_separate_memories_learn_separately() -> None:
    """In either direction: each drafts as if the other did not exist."""

    def new() -> Any:
        decoder = stand_in_decoder(AutoDecoder)
        decoder.costs = given_costs(FLAT)
        return decoder

    def learns(decoder: Any) -> list[mlxspec.SpeculationStats]:
        drafted = []
        for _ in range(3):
            *_, last = decoder.stream(PROMPT, 40)
            drafted.append(last.stats)
            decoder.memory.settle()
        return drafted

    expected, one = learns(new()), new()
    assert learns(one) == expected
    other = one.with_separate_memory(1 << 16)
    assert learns(other) == expected
    assert learns(other)[0] != expected[0]
    third = new()
    learns(third.with_separate_memory(1 << 16))
    assert learns(third) == expected


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_no_memory_changes_an_output(temp: float) -> None:
    """Not even a memory of wrong continuations, loops or invalid tokens."""
    decoder = decoder_with(FLAT)
    sampling = mlxspec.SamplingParams(temp=temp, seed=6)
    plain = mlxspec.PromptLookupDecoder(decoder.model, decoder.tokenizer)
    expected = [r.token for r in plain.stream(PROMPT, 40, n_draft=0, temp=temp, seed=6)]
    vocab_size = len(decoder.tokenizer.get_vocab())
    pick = random.Random(0)
    hostile = [
        [token if pick.random() < 0.7 else pick.randrange(vocab_size) for token in expected]
        for _ in range(30)
    ]
    hostile += [[token] * 70 for token in set(expected)]
    hostile += [[*expected[:at], vocab_size + 7, 1 << 40, -5, *expected[at:]] for at in (5, 20)]
    hostile += [[], [expected[0]], expected[::-1]]
    for text in hostile:
        decoder.memory.add(text)
    decoder.memory.settle()
    actual = tokens(decoder, temp=temp, seed=6)
    difference = first_difference(
        decoder.model, decoder.tokenizer.encode(PROMPT), expected, actual, sampling
    )
    assert difference is None or difference.margin < NEAR_TIE_FLOAT32


def test_stream_generate_takes_models_of_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(mlxspec.__file__).parent / "demo_model"
    model, tokenizer = mlx_lm.load(str(directory))
    model.set_dtype(mx.float32)
    measured: list[LoadedModel] = []

    def costs_for(loaded: LoadedModel) -> LiveCosts:
        measured.append(loaded)
        return given_costs(FLAT)

    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", costs_for)
    count = examples(12, long=24)
    expected = [r.token for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=count)]
    for _ in range(2):
        responses = list(mlxspec.stream_generate(model, tokenizer, PROMPT, max_tokens=count))
        assert [response.token for response in responses] == expected
    assert len(measured) == 1  # the second call uses what the first has learned

    alive = weakref.ref(model)
    gc.disable()  # which could take minutes to reach the weights
    try:
        del model, measured[:]
        assert alive() is None
    finally:
        gc.enable()


def test_a_model_that_cannot_verify_drafts_is_decoded_plainly() -> None:
    decoder = decoder_with(FLAT)
    decoder.loaded.chain_capability = Capability.PLAIN
    *_, last = decoder.stream(PROMPT, 30)
    assert (last.stats.steps, last.stats.drafted) == (30, 0)
