"""A decoder shared by several threads."""

from __future__ import annotations

from functools import partial

import pytest

import mlxspec
from mlxspec.drafting.cost_file import Calibration, StepTime
from mlxspec.drafting.costs import LiveCosts
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import endless_tokenizer, stand_in_decoder
from tests.support.drop_in import REPEAT
from tests.support.threads import at_once, each_in_a_new_thread

pytestmark = pytest.mark.slow

PROMPTS = [
    REPEAT,
    "[INST] Count from one to ten, twice. [/INST]",
    "The history of the",
    "one two three four one two three four one two",
]
KINDS = [
    mlxspec.AutoDecoder,
    mlxspec.LookaheadDecoder,
    mlxspec.PromptLookupDecoder,
]


def new_decoder(kind: type) -> mlxspec.Decoder:
    """Return a decoder with costs that allow drafts and learn from each step."""
    decoder = stand_in_decoder(kind)
    curve = {1: 0.001, 16: 0.0012, 64: 0.008}
    times = [StepTime(*time, 0.05) for time in curve.items()]
    decoder.costs = LiveCosts({1024: Calibration(times)})
    return decoder


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_threads_that_share_a_decoder_write_what_each_writes_alone(kind: type) -> None:
    decoder = new_decoder(kind)

    def answers(prompt: str, times: int) -> list[list[int]]:
        return [[r.token for r in decoder.stream(prompt, 16)] for _ in range(times)]

    alone = [answers(prompt, 1)[0] for prompt in PROMPTS]
    together = at_once(*(partial(answers, prompt, 2) for prompt in PROMPTS))
    assert together == [[answer] * 2 for answer in alone]


def test_a_model_can_generate_first_in_another_thread_than_it_was_made_in() -> None:
    # Llama 3's RoPE frequencies are an array that is not a parameter.
    decoder = mlxspec.Decoder(ARCHITECTURES["llama3"].model(), endless_tokenizer())

    def answer() -> list[int]:
        return [response.token for response in decoder.stream([7, 3, 9], 4)]

    assert len(at_once(answer)[0]) == 4


@pytest.mark.parametrize("kind", [mlxspec.Decoder, mlxspec.AutoDecoder])
def test_each_step_may_run_in_another_thread_even_if_the_cache_is_quantised(kind: type) -> None:
    decoder, options = (
        new_decoder(kind),
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 24},
    )
    prompt = decoder.tokenizer.encode(PROMPTS[3])
    assert len(prompt) < 20
    expected = [response.token for response in decoder.stream(prompt, 30, **options)]
    stream = decoder.stream(prompt, 30, **options)
    assert [response.token for response in each_in_a_new_thread(stream)] == expected


def test_threads_that_come_first_measure_the_costs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, measured = stand_in_decoder(mlxspec.AutoDecoder), []
    costs = new_decoder(mlxspec.AutoDecoder).costs

    def measure(*_: object, **__: object) -> LiveCosts:
        measured.append(costs)
        return costs

    monkeypatch.setattr("mlxspec.generation.decoder.costs_for", measure)
    found = at_once(*[lambda: decoder.costs] * 4)
    assert len(measured) == 1
    assert found == [costs] * 4
