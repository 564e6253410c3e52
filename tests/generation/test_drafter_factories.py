"""The value objects that describe what a decoder drafts from."""

from __future__ import annotations

import pytest

import mlxspec
from mlxspec import GenerationResponse, OptionError
from mlxspec.generation.drafter_factories import DrafterFactory, Lookahead, PromptLookup
from mlxspec.generation.scheduler import Scheduler
from tests.support.demo import stand_in, stand_in_decoder
from tests.support.schedulers import submit

PROMPT = "one two three one two three one two"


@pytest.mark.parametrize(
    ("decoder", "factory"),
    [
        (mlxspec.PromptLookupDecoder, PromptLookup()),
        (mlxspec.LookaheadDecoder, Lookahead(7, 5, 7, pool_from_prompt=True)),
    ],
)
def test_decoders_have_their_values(
    decoder: type[mlxspec.Decoder], factory: DrafterFactory
) -> None:
    assert decoder.drafter_factory == factory


def test_a_value_that_is_out_of_range_cannot_be_made() -> None:
    with pytest.raises(OptionError, match="n_draft is -1"):
        PromptLookup(-1)
    with pytest.raises(OptionError, match="ngram_min is 5"):
        PromptLookup(ngram_min=5)
    with pytest.raises(OptionError, match="window_size is -1"):
        Lookahead(-1)
    assert PromptLookup(0).new() is None


@pytest.mark.slow
def test_generations_at_once_have_a_drafter_each() -> None:
    decoder = stand_in_decoder(mlxspec.PromptLookupDecoder)
    prompts = [PROMPT, PROMPT.upper()]
    plain = [[*stand_in().stream(prompt, 24)] for prompt in prompts]
    outputs: list[list[GenerationResponse]] = [[], []]
    scheduler = Scheduler(decoder)
    for prompt, output in zip(prompts, outputs, strict=True):
        submit(scheduler, prompt, output.append, 24, n_draft=3)
    scheduler.run()
    for output, expected in zip(outputs, plain, strict=True):
        assert [one.token for one in output] == [one.token for one in expected]
