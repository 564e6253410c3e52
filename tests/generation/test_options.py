"""The keyword arguments of all decoders, on a small random model."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlxspec
from mlxspec import PromptLookupDecoder, SamplingParams
from mlxspec.errors import FileError, OptionError
from mlxspec.generation.options import GenerationOptions
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT, demo, given_costs, stand_in_decoder
from tests.support.random_models import random_model

pytestmark = pytest.mark.slow

PROMPT = '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]'


@pytest.fixture(scope="module")
def decoder() -> PromptLookupDecoder:
    return stand_in_decoder(PromptLookupDecoder)


def tokens(decoder: Any, **options: object) -> list[int]:
    return [r.token for r in decoder.stream(PROMPT, **{"max_tokens": 20, **options})]


def test_the_options_are_the_fields_of_the_sampling_parameters() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(SamplingParams)}
    options = inspect.get_annotations(GenerationOptions)
    assert {name: options[name].__forward_arg__ for name in fields} == fields


def test_fields_by_name_and_as_one_object_mean_the_same(decoder: PromptLookupDecoder) -> None:
    fields = {"temp": 2.0, "top_k": 50, "seed": 3, "repetition_penalty": 1.2}
    expected = tokens(decoder, **fields)
    assert tokens(decoder, sampling=SamplingParams(**fields)) == expected
    assert tokens(decoder, sampling=SamplingParams(**{**fields, "seed": 9}), seed=3) == expected
    assert tokens(decoder, sampling=SamplingParams(**{**fields, "seed": 9})) != expected


def test_mlx_lms_processors_and_sampler_can_be_passed(decoder: PromptLookupDecoder) -> None:
    bias = {tokens(decoder)[2]: -4.0}
    processors = make_logits_processors(bias, repetition_penalty=1.3)
    theirs = mlx_lm.stream_generate(
        decoder.model,
        decoder.tokenizer,
        PROMPT,
        max_tokens=20,
        sampler=make_sampler(0.0),
        logits_processors=processors,
    )
    expected = [response.token for response in theirs]
    assert tokens(decoder, logits_processors=processors, sampler=make_sampler(0.0)) == expected
    assert tokens(decoder, logit_bias=bias, repetition_penalty=1.3) == expected
    assert tokens(decoder) != expected


def test_a_sampler_without_a_seed_draws_anew_in_each_generation(
    decoder: PromptLookupDecoder,
) -> None:
    sampler = make_sampler(1.5)
    mx.random.seed(2)
    first, second = (tokens(decoder, sampler=sampler) for _ in range(2))
    assert first != second
    mx.random.seed(2)
    assert tokens(decoder, sampler=sampler, n_draft=0) == first
    assert tokens(decoder, sampler=sampler, seed=5) == tokens(decoder, sampler=sampler, seed=5)


def test_an_unknown_option_is_refused_by_name(decoder: PromptLookupDecoder) -> None:
    with pytest.raises(TypeError, match="tempp"):
        decoder.stream(PROMPT, tempp=0.7)


@pytest.mark.parametrize("drafting", [{"n_draft": 0}, {"n_draft": 10}], ids=str)
def test_stop_tokens_by_id_or_text_end_the_output(
    decoder: PromptLookupDecoder, drafting: dict
) -> None:
    whole = tokens(decoder, max_tokens=60)
    stop = whole[3]
    pieces = decoder.tokenizer.convert_ids_to_tokens([stop])
    assert stop not in decoder.tokenizer.eos_token_ids
    expected = whole[: whole.index(stop) + 1]
    for stop_tokens in (stop, [stop], pieces, pieces[0], {7, stop}):
        responses = list(decoder.stream(PROMPT, max_tokens=60, stop_tokens=stop_tokens, **drafting))
        assert [r.token for r in responses] == expected
        assert responses[-1].finish_reason == "stop"
        text = "".join(r.text for r in responses)
        assert text.lstrip() == decoder.tokenizer.decode(expected[:-1])


def test_a_stop_token_may_be_a_text_that_becomes_one_token() -> None:
    decoder = demo()
    vocabulary = decoder.tokenizer.get_vocab()
    word = next(
        piece[1:]
        for piece in decoder.tokenizer.convert_ids_to_tokens(tokens(decoder))
        if piece.startswith("▁") and piece[1:] not in vocabulary
    )
    assert tokens(decoder, stop_tokens=word)[-1] == vocabulary["▁" + word]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_tokens": [4096]}, "the stop token 4096 is not a token"),
        ({"stop_tokens": [-1]}, "the stop token -1 is not a token"),
        ({"stop_tokens": "two words"}, "the stop token 'two words' is not a token"),
        ({"stop_tokens": ["\u4e2d"]}, "is not a token"),
        ({"stop_tokens": ""}, "the stop token '' is not a token"),
        (
            {"logit_bias": {4096: 1.0}},
            "logit_bias contains the token id 4096: pass ids from 0 to 4095",
        ),
        ({"xtc_special_tokens": [-3]}, "xtc_special_tokens contains the token id -3"),
        ({"stop_tokens": [1.5]}, "the stop token 1.5 is not a token"),
        (
            {"logit_bias": {"5": 1.0}},
            "logit_bias contains the token id '5': pass ids from 0 to 4095",
        ),
        ({"logit_bias": {5: "1"}}, "logit_bias of token 5 is 1: choose a number"),
        ({"stop_tokens": 1.5}, "the stop token 1.5 is not a token"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]: choose a dict from token ids to numbers"),
        ({"xtc_special_tokens": 3}, "xtc_special_tokens is 3: choose a list of token ids"),
        ({"sampler": 3}, "sampler is 3: choose a function"),
        ({"logits_processors": 3}, "logits_processors is 3: choose a list of functions"),
        ({"logits_processors": [3]}, "logits_processors has 3: choose functions"),
        ({"n_draft": 2.5}, "n_draft is 2.5: choose a whole number"),
        ({"n_draft": "10"}, "n_draft is '10': choose a whole number"),
        ({"ngram_max": None}, "ngram_max is None: choose a whole number"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5: choose a whole number"),
        ({"max_tokens": "2"}, "max_tokens is '2': choose a whole number"),
        ({"seed": 1.5}, "seed is 1.5: choose a whole number"),
        ({"top_k": 1.5}, "top_k is 1.5: choose a whole number"),
        ({"top_p": None}, "top_p is None: choose a number"),
        ({"temp": "1"}, "temp is '1': choose a number"),
        ({"max_kv_size": 8.5}, "max_kv_size is 8.5: choose a whole number"),
        ({"prefill_step_size": 2.5}, "prefill_step_size is 2.5: choose a whole number"),
        ({"kv_bits": 4.0}, "kv_bits is 4.0: choose a whole number"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_tokens_that_the_model_lacks_are_refused_before_anything_runs(
    decoder: PromptLookupDecoder, options: dict, message: str
) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        decoder.stream(PROMPT, **options)
    assert "\n" not in str(raised.value)


def test_a_lent_cache_of_another_model_is_refused_and_stays_as_it_is(
    decoder: PromptLookupDecoder,
) -> None:
    model, other = random_model("llama"), random_model("llama", head_dim=16)
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    with pytest.raises(FileError, match=r"^prompt_cache was made by a different model: "):
        PromptLookupDecoder(other, decoder.tokenizer).stream([4], prompt_cache=cache)
    mine = PromptLookupDecoder(model, decoder.tokenizer)
    assert len(list(mine.stream([4], 3, prompt_cache=cache))) == 3
    assert [layer.offset for layer in cache] == [7, 7]


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v41", "mamba2", "gemma3", "falcon_h1"])
def test_a_model_s_own_cache_is_taken_whatever_it_holds(
    decoder: PromptLookupDecoder, kind: str
) -> None:
    other = PromptLookupDecoder(ARCHITECTURES[kind].model(), decoder.tokenizer)
    for length in (0, 1, 40):
        cache = make_prompt_cache(other.model)
        if length:
            other.model(mx.array([[i % 60 for i in range(length)]]), cache=cache)
        assert list(other.stream([4, 5], 1, prompt_cache=cache))


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", [mlxspec.AutoDecoder, mlxspec.LookaheadDecoder])
def test_all_decoders_take_the_same_options_and_write_the_same(
    decoder: PromptLookupDecoder, kind: type[mlxspec.Decoder]
) -> None:
    other = stand_in_decoder(kind)
    other.costs = given_costs(FLAT)
    sizes = {"window_size": 3} if kind is not mlxspec.AutoDecoder else {}
    for options in (
        {"temp": 1.3, "seed": 4, "presence_penalty": 0.5, "xtc_probability": 0.3},
        {"sampler": make_sampler(1.3, min_p=0.02), "seed": 4, "repetition_penalty": 1.1},
    ):
        assert tokens(other, **sizes, **options) == tokens(decoder, n_draft=0, **options)
