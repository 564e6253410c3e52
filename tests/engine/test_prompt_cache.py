"""Borrowing mlx-lm's prompt caches and returning them in a state that mlx-lm can continue."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlxspec import Decoder
from mlxspec.drafting.drafter import NoDraft
from mlxspec.drafting.prompt_lookup import PromptLookupDrafter
from mlxspec.engine import prompt_cache
from mlxspec.engine.target import Target, target_for
from mlxspec.errors import FileError, OptionError
from mlxspec.generation.request import Request
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import endless_tokenizer
from tests.support.drafters import HostileDrafter, drafted
from tests.support.examples import examples
from tests.support.interrupts import interrupted_anywhere
from tests.support.random_models import random_model

pytestmark = pytest.mark.slow

TURNS = ([3, 1, 4, 1, 5, 9] * 4, [2, 6, 5, 3, 5], [8, 9, 7, 9, 3], [7])
NAMES = ("llama3", "gemma3", "mamba2", "qwen3_next", "deepseek_v32")
TOKENS = 12


class OwnKVCache(KVCache):
    """A cache type unknown to mlxspec."""


@cache
def decoder_of(name: str) -> Decoder:
    return Decoder(ARCHITECTURES[name].model(), endless_tokenizer())


def by_mlx_lm(model: nn.Module, prompt: list[int], cache: list[Any], **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS, prompt_cache=cache, **options)
    return [token for token, _ in steps]


def conversation(
    decoder: Decoder, lent: list[Any], theirs: list[Any], drafts: bool = True, **options: Any
) -> None:
    """Generate turns with mlxspec and mlx-lm alternately, on the same cache."""
    for turn, prompt in enumerate(TURNS):
        expected = by_mlx_lm(decoder.model, prompt, theirs, **options)
        if turn % 2:
            actual = by_mlx_lm(decoder.model, prompt, lent, **options)
        else:
            drafter = HostileDrafter(expected, 64, 5, seed=turn) if drafts else NoDraft()
            responses = drafted(
                decoder, prompt, drafter, max_tokens=TOKENS, prompt_cache=lent, **options
            )
            actual = [response.token for response in responses]
        assert actual == expected
        assert [type(cache) for cache in lent] == [type(cache) for cache in theirs]
        for own, other in zip(lent, theirs, strict=True):
            assert getattr(own, "offset", None) == getattr(other, "offset", None)


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_mlx_lm_goes_on_from_what_is_given_back(name: str, drafts: bool) -> None:
    decoder = decoder_of(name)
    conversation(
        decoder, make_prompt_cache(decoder.model), make_prompt_cache(decoder.model), drafts
    )


@pytest.mark.parametrize("size", [16, 30, 64])
def test_a_cache_of_limited_size_rotates_as_mlx_lm_s(size: int) -> None:
    decoder = decoder_of("llama3")
    own, theirs = (make_prompt_cache(decoder.model, max_kv_size=size) for _ in range(2))
    conversation(decoder, own, theirs)


@pytest.mark.parametrize("start", [0, 30, 50])
def test_a_cache_is_quantised_when_mlx_lm_does_so(start: int) -> None:
    model = random_model("llama", head_dim=32)
    decoder = Decoder(model, decoder_of("llama3").tokenizer)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    own, theirs = make_prompt_cache(decoder.model), make_prompt_cache(decoder.model)
    for prompt in TURNS:
        expected = by_mlx_lm(decoder.model, prompt, theirs, **options)
        responses = drafted(
            decoder, prompt, NoDraft(), max_tokens=TOKENS, prompt_cache=own, **options
        )
        assert [response.token for response in responses] == expected
        assert [type(cache) for cache in own] == [type(cache) for cache in theirs]


def test_caches_of_a_kind_that_takes_no_trees_are_verified_in_chains() -> None:
    decoder = decoder_of("llama3")
    own, theirs = ([OwnKVCache() for _ in decoder.model.layers] for _ in range(2))
    conversation(decoder, own, theirs)


@pytest.mark.parametrize("taken", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_generation_that_is_closed_gives_back_what_was_taken(name: str, taken: int) -> None:
    decoder = decoder_of(name)
    theirs = make_prompt_cache(decoder.model)
    expected = by_mlx_lm(decoder.model, TURNS[0], theirs)
    for seed in range(examples(2)):
        lent = make_prompt_cache(decoder.model)
        drafter = HostileDrafter(expected, 64, 5, seed=seed)
        responses = drafted(decoder, TURNS[0], drafter, max_tokens=TOKENS, prompt_cache=lent)
        for _ in range(taken):
            next(responses)
        responses.close()

        whole = make_prompt_cache(decoder.model)
        rest = [*TURNS[0], *expected[:taken], *TURNS[1]]
        assert by_mlx_lm(decoder.model, TURNS[1], lent) == by_mlx_lm(decoder.model, rest, whole)


class Reader:
    """A generation on a borrowed cache after three tokens."""

    def __init__(self, decoder: Decoder) -> None:
        self.lent = make_prompt_cache(decoder.model)
        self.stream = drafted(
            decoder, TURNS[0], NoDraft(), max_tokens=TOKENS, prompt_cache=self.lent
        )
        self.taken = [response.token for response in itertools.islice(self.stream, 3)]

    def take(self) -> None:
        self.taken.append(next(self.stream).token)


def test_an_interrupt_inside_a_response_gives_back_what_was_taken_before() -> None:
    decoder = decoder_of("llama3")
    expected = by_mlx_lm(decoder.model, TURNS[0], make_prompt_cache(decoder.model))
    for reader in interrupted_anywhere(
        [Request._response], lambda: Reader(decoder), lambda reader: reader.take()
    ):
        reader.stream.close()
        lent, taken = reader.lent, reader.taken
        assert taken == expected[: len(taken)]
        assert lent[0].offset == len(TURNS[0]) + len(taken)
        whole = by_mlx_lm(
            decoder.model, [*TURNS[0], *taken, *TURNS[1]], make_prompt_cache(decoder.model)
        )
        assert by_mlx_lm(decoder.model, TURNS[1], lent) == whole


def test_an_interrupt_while_caches_are_taken_gives_them_back() -> None:
    decoder = decoder_of("llama3")

    def prepared() -> tuple[list[Any], Any]:
        lent = make_prompt_cache(decoder.model)
        return lent, drafted(decoder, TURNS[0], NoDraft(), max_tokens=3, prompt_cache=lent)

    for lent, stream in interrupted_anywhere(
        [prompt_cache.CacheLease.take], prepared, lambda made: list(made[1])
    ):
        stream.close()
        assert {frozenset(vars(cache)) for cache in lent} == {frozenset(vars(KVCache()))}
        assert offsets(lent) in ([0] * len(lent), [len(TURNS[0]) + 3] * len(lent))
        lent[0].trim(0)


def test_an_interrupted_prefill_gives_back_whole_chunks() -> None:
    decoder = decoder_of("llama3")
    lent = make_prompt_cache(decoder.model)

    def interrupt(done: int, total: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(
            drafted(
                decoder,
                TURNS[0],
                NoDraft(),
                prompt_cache=lent,
                prefill_step_size=8,
                on_progress=interrupt,
            )
        )
    assert [cache.offset for cache in lent] == [16] * len(lent)
    expected = by_mlx_lm(decoder.model, TURNS[0], make_prompt_cache(decoder.model))
    assert by_mlx_lm(decoder.model, TURNS[0][16:], lent) == expected


def test_what_is_given_back_can_be_saved_and_loaded_by_mlx_lm(tmp_path: Path) -> None:
    decoder = decoder_of("llama3")
    lent = make_prompt_cache(decoder.model, max_kv_size=16)
    list(drafted(decoder, TURNS[0], NoDraft(), max_tokens=TOKENS, prompt_cache=lent))
    save_prompt_cache(str(tmp_path / "cache.safetensors"), lent)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert by_mlx_lm(decoder.model, TURNS[1], loaded) == by_mlx_lm(decoder.model, TURNS[1], lent)


def test_a_cache_for_fewer_layers_is_refused() -> None:
    decoder = decoder_of("llama3")
    with pytest.raises(OptionError, match="prompt_cache has 1 caches, but the model needs 2"):
        drafted(decoder, [1], NoDraft(), prompt_cache=make_prompt_cache(decoder.model)[:1])


def offsets(caches: list[Any]) -> list[int]:
    return [cache.offset for cache in caches]


def started(decoder: Decoder, lent: list[Any], prompt: list[int], taken: int) -> Any:
    """Start a generation and abandon it after ``count`` responses."""
    responses = drafted(decoder, prompt, PromptLookupDrafter(), prompt_cache=lent)
    list(itertools.islice(responses, taken))
    return responses


def test_generations_that_are_made_before_any_is_advanced_follow_one_another() -> None:
    decoder = decoder_of("llama3")
    lent, theirs = make_prompt_cache(decoder.model), make_prompt_cache(decoder.model)
    made = [
        drafted(decoder, turn, PromptLookupDrafter(), max_tokens=TOKENS, prompt_cache=lent)
        for turn in TURNS
    ]
    for prompt, stream in zip(TURNS, made, strict=True):
        assert [response.token for response in stream] == by_mlx_lm(decoder.model, prompt, theirs)


def test_a_cache_is_returned_when_a_loop_over_the_responses_is_left() -> None:
    decoder = decoder_of("llama3")
    lent, theirs = make_prompt_cache(decoder.model), make_prompt_cache(decoder.model)
    prompt = TURNS[0]
    for count, _ in enumerate(drafted(decoder, prompt, NoDraft(), prompt_cache=lent), start=1):
        if count == 10:
            break
    other = stream_generate(decoder.model, decoder.tokenizer, prompt, 100, prompt_cache=theirs)
    list(itertools.islice(other, 10))
    assert offsets(lent) == offsets(theirs) == [len(prompt) + 10] * len(lent)
    assert by_mlx_lm(decoder.model, TURNS[1], lent) == by_mlx_lm(decoder.model, TURNS[1], theirs)


@pytest.mark.parametrize("name", NAMES)
def test_any_use_of_a_cache_before_its_generation_has_ended_is_refused(name: str) -> None:
    decoder = decoder_of(name)
    lent = make_prompt_cache(decoder.model)
    expected = by_mlx_lm(decoder.model, TURNS[0], make_prompt_cache(decoder.model))
    waiting = drafted(decoder, TURNS[0], NoDraft(), max_tokens=TOKENS, prompt_cache=lent)
    taken = [response.token for response in itertools.islice(waiting, 3)]
    for use in (
        lambda: by_mlx_lm(decoder.model, TURNS[1], lent),
        lambda: list(drafted(decoder, TURNS[1], NoDraft(), prompt_cache=lent)),
        lambda: trim_prompt_cache(lent, 1),
        lambda: [layer.state for layer in copy.deepcopy(lent)],
    ):
        with pytest.raises(FileError, match="in use by another generation"):
            use()
    taken += [response.token for response in waiting]
    assert taken == expected
    whole = [*TURNS[0], *expected, *TURNS[1]]
    alone = by_mlx_lm(decoder.model, whole, make_prompt_cache(decoder.model))
    assert by_mlx_lm(decoder.model, TURNS[1], lent) == alone


@pytest.mark.parametrize("name", NAMES)
def test_turns_on_a_cache_can_be_taken_in_any_thread(name: str) -> None:
    decoder = decoder_of(name)
    lent, theirs = make_prompt_cache(decoder.model), make_prompt_cache(decoder.model)
    for turn in range(examples(5)):
        prompt = [turn, *TURNS[turn % 3]]
        expected = by_mlx_lm(decoder.model, prompt, theirs)
        drafter = HostileDrafter(expected, 64, 5, seed=turn)
        responses = drafted(decoder, prompt, drafter, max_tokens=TOKENS, prompt_cache=lent)
        tokens = []
        while len(tokens) < TOKENS:
            with ThreadPoolExecutor(1) as thread:
                tokens.append(thread.submit(next, responses).result().token)
        assert tokens == expected


def test_a_generation_is_collected_wherever_garbage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llama3")
    other, lent = make_prompt_cache(decoder.model), make_prompt_cache(decoder.model)
    by_mlx_lm(decoder.model, TURNS[1], lent)
    offset = lent[0].offset
    left: list[Any] = [started(decoder, other, TURNS[0], 3)]
    left.append(left)
    del left

    def collecting(*args: Any) -> Target:
        gc.collect()
        return target_for(*args)

    def take_one() -> None:
        started(decoder, lent, TURNS[0], 1).close()

    monkeypatch.setattr(prompt_cache, "target_for", collecting)
    thread = threading.Thread(target=take_one, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert offsets(other) == [len(TURNS[0]) + 3] * len(other)
    assert offsets(lent) == [offset + len(TURNS[0]) + 1] * len(lent)
