"""A server's models stay within one memory limit, and no request that fits is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import httpx
import mlx.core as mx
import pytest

import mlxspec
from mlxspec.engine.draft_model import DraftModel
from mlxspec.engine.heads import TrainedHead
from mlxspec.engine.loaded_model import LoadedModel
from mlxspec.engine.params import CacheOptions
from mlxspec.generation.request import State
from mlxspec.server import memory_budget
from mlxspec.server.memory_budget import ServerMemory
from mlxspec.server.served_model import CacheMemory, Need, ServedModel
from mlxspec.server.worker import Worker
from tests.support import heads
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT, demo, given_costs, stand_in
from tests.support.llamas import repetitive_llama
from tests.support.serving import Running, running_server, served

BOUND = 300_000_000
COUNT, PROMPT, ANSWER = 9, 40, 4


@cache
def wide_decoder() -> mlxspec.AutoDecoder:
    """Return a decoder whose caches take 295 kB per token, for at least 256 tokens: 75 MB."""
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 192)
    model = repetitive_llama(num_hidden_layers=6, **sizes)
    decoder = mlxspec.AutoDecoder(model, demo().tokenizer, memory_tokens=0)
    for known in ("capability", "chain_capability", "joint_mode"):
        setattr(decoder.loaded, known, getattr(stand_in().loaded, known))
    decoder.costs = given_costs(FLAT)
    return decoder


def wide(name: str = "wide") -> ServedModel:
    return ServedModel(name, wide_decoder())


def prompts() -> list[list[int]]:
    return [random.Random(seed).choices(range(300, 4000), k=PROMPT) for seed in range(COUNT)]


def ask(server: Running, prompt: list[int], max_tokens: int = ANSWER) -> httpx.Response:
    body = {"model": "wide", "prompt": prompt, "max_tokens": max_tokens}
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=120)


def test_kept_prefixes_have_room_beside_a_model_that_is_yet_to_come() -> None:
    most = ServerMemory(BOUND).most_idle(BOUND // 2)
    assert BOUND // 5 < most <= BOUND // 4
    assert ServerMemory(BOUND).most_idle(BOUND) == 0


@pytest.mark.slow
def test_requests_for_twice_the_bound_are_all_answered_within_it() -> None:
    decoder, model = wide_decoder(), wide()
    alone = [[r.token for r in decoder.stream(prompt, ANSWER)] for prompt in prompts()]
    texts = [decoder.tokenizer.decode(tokens) for tokens in alone]
    others = mx.get_active_memory() - model.memory.weights  # from other tests' models
    mx.reset_peak_memory()
    limits = {"active": COUNT}
    with running_server(model, limits, memory=ServerMemory(BOUND)) as server:
        most, memory = 0, server.worker.memory
        whole = memory.reserve

        def reserve(owner: object, need: Need) -> None:
            nonlocal most
            whole(owner, need)
            most = max(most, len(memory._reserved))
            parts = memory.parts
            assert sum(parts.values()) <= memory.limit

        memory.reserve = reserve  # type: ignore[method-assign]
        with ThreadPoolExecutor(COUNT) as pool:
            answers = [*pool.map(lambda prompt: ask(server, prompt), prompts())]
        refused = ask(server, prompts()[0] * 50, 2000)
        taken = sum(entry.nbytes for entry in model.cache._idle)
    assert [answer.json()["choices"][0]["text"].strip() for answer in answers] == [
        text.strip() for text in texts
    ]
    entry = taken // model.cache.entries
    assert COUNT * entry > 2 * BOUND
    assert 1 < most < COUNT
    assert model.cache.evictions >= COUNT - BOUND // entry
    assert mx.get_peak_memory() - others <= BOUND
    assert refused.status_code == 413
    message, need = refused.json()["error"]["message"], model.memory.needs(PROMPT * 50 + 1)
    assert f"{PROMPT * 50} prompt tokens and 1 answer tokens" in message
    assert f"need {(need.caches + need.forward >> 20) + 1:,} MiB" in message
    assert f"leave {memory.room >> 20} MiB" in message


def two() -> tuple[ServerMemory, ServedModel, ServedModel]:
    """A memory with room for three answers, with two models."""
    gc.collect()  # keep other tests' garbage out of both sums
    mx.clear_cache()
    first, second = served("first"), served("second")
    whole = ServerMemory()
    for one in (first, second):
        whole.add(one)
    caches, forward = first.memory.needs(40)
    # Each model's forward is measured, with slightly different results.
    forward = max(forward, second.memory.needs(40).forward)
    memory = ServerMemory(whole.bound_for(Need(3 * caches, forward)))
    for one in (first, second):
        memory.add(one)
    return memory, first, second


def keep(model: ServedModel, seed: int, tokens: int = 20) -> None:
    """Answer a prompt and keep its caches."""
    prompt = random.Random(seed).choices(range(300, 4000), k=tokens)
    session = model.cache.lend(prompt)
    for _ in model.decoder.stream(prompt, 2, session=session):
        pass
    model.cache.give_back(session)


def test_models_share_one_room_and_the_prefix_used_longest_ago_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_budget, "_CACHE_SHARE", 1)
    memory, first, second = two()
    for model, seed in ((first, 1), (second, 2), (first, 3)):
        keep(model, seed, 300)
    need = first.memory.needs(40)
    for _ in range(3):
        assert memory.fits(need)
        memory.reserve(object(), need)
    assert not memory.fits(need)
    assert memory.ever_fits(need)
    assert (first.cache.entries, second.cache.entries) == (0, 0)


def test_the_prefix_used_longest_ago_goes_first_whichever_model_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_budget, "_CACHE_SHARE", 1)
    memory, first, second = two()
    for model, seed in ((second, 1), (first, 2), (first, 3)):
        keep(model, seed)
    left = memory.room - sum(memory.parts[part] for part in ("forward", "prefixes"))
    memory.reserve("more", Need(left + 1))
    assert (first.cache.entries, second.cache.entries) == (2, 0)
    memory.release("more")
    memory.remove(first)
    assert memory.parts["prefixes"] == 0


def test_a_model_finds_room_if_its_weights_fit_beside_what_is_reserved() -> None:
    memory, first, _ = two()
    free = memory.room - memory.parts["forward"]
    assert memory.fits(Need(free))
    assert not memory.fits(Need(free + 1))
    memory.reserve("third", Need(free))
    assert not memory.fits(first.memory.needs(1))
    memory.release("third")
    assert memory.fits(first.memory.needs(1))


@contextmanager
def free(memory: ServerMemory, nbytes: int) -> Iterator[None]:
    """Let other programs leave this many bytes free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "free_memory", lambda: nbytes)
        memory._next_look = 0.0
        yield


def test_other_programs_get_the_memory_of_idle_prefixes() -> None:
    model, memory = served(), ServerMemory()
    memory.add(model)
    for seed in range(3):
        keep(model, seed)
    with free(memory, 1 << 30):
        memory.make_room()
        assert model.cache.entries == 3
        assert memory.ever_fits(model.memory.needs(40))
    with free(memory, 0):
        memory.make_room()
        held = mx.get_active_memory() + mx.get_cache_memory()
        assert memory.limit <= held
    with free(memory, -(1 << 40)):
        memory.make_room()
        assert model.cache.entries == 0
        assert not memory.ever_fits(model.memory.needs(1))


@pytest.mark.slow
def test_a_conversation_that_takes_more_than_half_is_continued() -> None:
    model = served()
    memory = ServerMemory()
    memory.add(model)
    need = model.memory.needs(600)
    with running_server(model, memory=ServerMemory(memory.bound_for(need))) as server:
        prompt = [*range(300, 700)]
        for length in (400, 420, 440):
            body = {"prompt": [*prompt, *range(length - 400)], "max_tokens": 10}
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
    assert model.cache.hits == 2


def test_a_request_that_waits_is_not_overtaken_by_smaller_ones_of_another_model() -> None:
    memory, first, _ = two()
    worker = Worker(memory=memory)

    class Waiting:
        state = State.WAITING

        def __init__(self, number: int, tokens: int) -> None:
            self.number, self.need = number, first.memory.needs(tokens)

    small, large, later = Waiting(1, 40), Waiting(2, 300), Waiting(3, 40)
    assert worker.admit(small)  # type: ignore[arg-type]
    # Measured forwards of two equal models differ slightly.
    memory.reserve(small, Need(memory.room - later.need.caches - memory._forward(later.need)))
    assert memory.fits(later.need)
    assert not worker.admit(large)  # type: ignore[arg-type]
    assert not worker.admit(later)  # type: ignore[arg-type]
    large.state = State.DONE
    assert worker.admit(later)  # type: ignore[arg-type]


def test_rows_that_wait_for_a_head_count() -> None:
    model = ARCHITECTURES["qwen3"].model()
    trained = TrainedHead(heads.eagle3(model)[1], model)
    options = CacheOptions(prefill_step_size=64)
    with_head, alone = (
        CacheMemory(trained.new_model(), options),
        CacheMemory(LoadedModel(model), options),
    )
    cache = trained.new_cache(0)
    for start in range(0, 640, 32):  # steps of 32 rows that each keep one
        trained.model(mx.array([[0] * 32]))
        cache.note(mx.zeros(32, mx.int32))
        cache.keep(start // 32, (0,))
    rows = {id(array): array.nbytes for array in cache.arrays}
    assert sum(rows.values()) >= 512 * 2 * 32 * 4  # two states of 32 numbers
    extra = with_head.bytes_for(0) - alone.bytes_for(0)
    assert extra >= sum(rows.values())
    assert with_head.weights > alone.weights


def test_a_draft_model_counts_with_its_caches() -> None:
    model, small = ARCHITECTURES["qwen3"].model(), ARCHITECTURES["llama3"].model()
    loaded = LoadedModel(model)
    both, alone, draft = (
        CacheMemory(loaded, draft_model=DraftModel(small, 2)),
        CacheMemory(loaded),
        CacheMemory(LoadedModel(small)),
    )
    assert both.weights == alone.weights + draft.weights
    assert both.needs(500).caches == alone.needs(500).caches + draft.needs(500).caches
