"""Requests that reuse earlier requests' prefixes generate the same output as alone."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxspec
from mlxspec.engine.caches import held_arrays
from mlxspec.engine.params import CacheOptions
from mlxspec.generation import request as generation
from mlxspec.generation.scheduler import Scheduler
from mlxspec.server.prefix_cache import PrefixCache
from tests.support.architectures import ARCHITECTURES
from tests.support.architectures import KINDS_OF_CACHES as KINDS
from tests.support.demo import endless_tokenizer
from tests.support.examples import examples
from tests.support.logs import logged_by
from tests.support.random_models import scaled_rope
from tests.support.schedulers import submit

ENOUGH = 1 << 30
CUTTABLE = ("plain", "latent", "lists")
cuttable = pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in CUTTABLE[1:])]
)
each_kind = pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "state and full",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:7]),
    ],
)


OTHERS = {
    "wide": replace(ARCHITECTURES["llama3"], config={"head_dim": 32}),
    "dynamic": replace(
        ARCHITECTURES["llama3"],
        config={**scaled_rope("dynamic", factor=4.0), "max_position_embeddings": 32},
    ),
    "rows that change each other": ARCHITECTURES["phi3small"],
    "boundable": ARCHITECTURES["qwen3"],  # mlx-lm's Llama ignores max_kv_size
}
QUANTISED = {"kv_bits": 8, "kv_group_size": 32, "prefill_step_size": 32}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "in steps": ("state and window", {"prefill_step_size": 32}),
    "bounded": ("boundable", {"max_kv_size": 48}),
    "bounded in steps": ("latent", {"max_kv_size": 24, "prefill_step_size": 32}),
    "quantised": ("wide", {**QUANTISED, "quantized_kv_start": 0}),
    "quantised later": ("wide", {**QUANTISED, "quantized_kv_start": 40}),
    **{kind: (kind, {"prefill_step_size": 40}) for kind in OTHERS},
}
"""Kinds of caches and options; some depend on the prompt's chunks."""


@cache
def decoder_of(kind: str) -> mlxspec.Decoder:
    architecture = OTHERS[kind] if kind in OTHERS else ARCHITECTURES[KINDS[kind]]
    return mlxspec.Decoder(architecture.model(), endless_tokenizer())


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 63), k=n)


@pytest.fixture(autouse=True)
def warnings() -> Iterator[list[str]]:
    """The warnings of caches. A test that provokes some checks this list and empties it."""
    with logged_by("mlxspec.server") as lines:
        yield lines
    assert not lines


class Requests:
    """Runs requests to a decoder like a server, within a limit on the memory of idle entries."""

    def __init__(
        self, kind: str | mlxspec.Decoder = "plain", max_bytes: int = ENOUGH, **options: Any
    ) -> None:
        self.decoder = decoder_of(kind) if isinstance(kind, str) else kind
        caches, chunks_matter = CacheOptions(**options), self.decoder.loaded.chunks_matter
        self.cache = PrefixCache(self.decoder.model, caches, chunks_matter)
        self.max_bytes = max_bytes
        self.scheduler = Scheduler(self.decoder)
        self.options = options
        self.running: list[Request] = []

    def start(self, prompt: Sequence[int], n: int = 6, partition: str = "") -> Request:
        session = self.cache.lend(prompt, partition)
        request = Request(session, prompt)
        request.job = submit(
            self.scheduler, list(prompt), request.add, n, session=session, **self.options
        )
        self.running.append(request)
        return request

    def end(self, request: Request) -> None:
        self.scheduler.cancel(request.job)
        self.running.remove(request)
        self.cache.give_back(request.session)
        self.cache.make_room(self.cache.nbytes - self.max_bytes)
        assert request.job.error is None
        del request.job

    def run(self) -> None:
        while self.scheduler.turn():
            pass
        for request in [*self.running]:
            self.end(request)

    def answer(self, prompt: Sequence[int], n: int = 6, partition: str = "") -> Request:
        """Run a request and compare it with one that runs alone."""
        request = self.start(prompt, n, partition)
        self.run()
        assert request.tokens == self.alone(prompt, n)
        return request

    def alone(self, prompt: Sequence[int], n: int) -> list[int]:
        return [r.token for r in self.decoder.stream(list(prompt), n, **self.options)]


class Request:
    job: generation.Request

    def __init__(self, session: mlxspec.Session, prompt: Sequence[int]) -> None:
        self.session = session
        self.prompt = prompt
        self.tokens: list[int] = []
        self.reused = 0

    def add(self, response: mlxspec.GenerationResponse) -> None:
        self.tokens.append(response.token)
        self.reused = response.reused_tokens


@pytest.mark.slow
@each_kind
def test_a_conversation_of_ten_turns_runs_each_token_once(kind: str) -> None:
    requests, context = Requests(kind), []
    for turn in range(10):
        prompt = [*context, *tokens_of(12, turn)]
        request = requests.answer(prompt)
        assert request.reused == max(0, len(context) - 1)
        context = prompt + request.tokens
    assert (requests.cache.hits, requests.cache.misses, requests.cache.forks) == (9, 1, 0)
    assert requests.cache.entries == 1


@each_kind
def test_an_answer_that_the_client_changes_costs_no_more_than_itself(kind: str) -> None:
    requests, prompt = Requests(kind), tokens_of(60)
    requests.answer(prompt)
    changed = requests.answer([*prompt, 1, 2, 1, 2, *tokens_of(9, 4)])
    again = requests.answer(prompt)
    least = len(prompt) - 1 if kind in CUTTABLE else len(prompt) - 17
    assert least <= changed.reused <= len(prompt)
    assert least <= again.reused < len(prompt)


@pytest.mark.slow
@cuttable
def test_agents_that_share_a_system_prompt_share_it_one_after_the_other(kind: str) -> None:
    requests, system = Requests(kind), tokens_of(300)
    contexts = [[*system, 1], [*system, 2, 2]]
    reused = []
    for turn in range(3):
        for agent, context in enumerate(contexts):
            prompt = [*context, *tokens_of(30, agent + 2 * turn + 1)]
            request = requests.answer(prompt)
            reused.append((request.reused, len(context)))
            context[:] = prompt + request.tokens
    assert reused[0][0] == 0
    assert reused[1][0] == len(system)
    assert all(found == length - 1 for found, length in reused[2:])
    assert requests.cache.forks == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chunked", "state and window", "state and full"])
def test_where_a_cache_cannot_be_cut_the_third_agent_finds_what_two_have_shared(kind: str) -> None:
    requests, system = Requests(kind), tokens_of(200)
    contexts = [[*system, agent] for agent in range(3, 7)]
    reused = []
    for turn in range(3):
        for agent, context in enumerate(contexts):
            prompt = [*context, *tokens_of(30, 9 * agent + turn + 1)]
            request = requests.answer(prompt)
            reused.append(request.reused - len(context) + 1)
            context[:] = prompt + request.tokens
    assert reused == [-200, -200, 0, 0, *[0] * 8]
    assert requests.answer([*system, 2, *tokens_of(30, 99)]).reused == len(system)
    assert requests.cache.entries == 6


@pytest.mark.slow
def test_concurrent_requests_wait_for_the_state_that_they_share() -> None:
    requests, system = Requests("state and full"), tokens_of(200)
    requests.answer([*system, *tokens_of(30, 1)])
    second = requests.start([*system, *tokens_of(30, 2)], n=40)
    third = [*system, *tokens_of(30, 3)]
    assert requests.cache.should_wait(third)
    while requests.cache.should_wait(third):
        requests.scheduler.turn()
    other = requests.start(third)
    assert not second.job.done
    requests.run()
    assert other.reused == len(system)
    assert other.tokens == requests.alone(third, 6)
    assert second.tokens == requests.alone(second.prompt, 40)


@pytest.mark.slow
@cuttable
def test_requests_that_run_at_once_share_what_one_of_them_has_run(kind: str) -> None:
    requests, system = Requests(kind), tokens_of(300)
    first = requests.start([*system, *tokens_of(20, 1)], n=40)
    second = [*system, *tokens_of(20, 2)]
    assert requests.cache.should_wait(second)
    while requests.cache.should_wait(second):
        requests.scheduler.turn()
    other = requests.start(second, n=40)
    assert not first.job.done
    same = [requests.start(first.prompt, n=40) for _ in range(2)]
    requests.run()
    assert first.tokens == requests.alone(first.prompt, 40)
    assert other.tokens == requests.alone(second, 40)
    assert [request.tokens for request in same] == [first.tokens] * 2
    assert other.reused == len(system)
    assert [request.reused for request in same] == [319, 319]


@pytest.mark.parametrize("kind", ["state and full", "sliding and full"])
def test_several_answers_to_one_prompt_run_it_once(kind: str) -> None:
    requests, prompt = Requests(kind), tokens_of(200)
    first = requests.start(prompt)
    while requests.cache.should_wait(prompt):
        requests.scheduler.turn()
    others = [requests.start(prompt) for _ in range(2)]
    requests.run()
    # At least up to the checkpoint near the prompt's end, which is reached before the rest has run.
    assert all(request.reused >= len(prompt) - 17 for request in others)
    assert {tuple(r.tokens) for r in [first, *others]} == {tuple(requests.alone(prompt, 6))}


def test_no_request_waits_for_a_short_prefix_or_one_that_has_run() -> None:
    requests, prompt = Requests(), tokens_of(200)
    assert not requests.cache.should_wait(prompt)
    first = requests.start(prompt, n=40)
    assert requests.cache.should_wait(prompt)
    assert not requests.cache.should_wait(prompt, "another")
    assert not requests.cache.should_wait([*prompt[:40], 1, *prompt])
    requests.end(first)
    assert not requests.cache.should_wait(prompt)


@each_kind
def test_what_was_run_for_a_cancelled_request_is_kept(kind: str) -> None:
    requests, prompt = Requests(kind), tokens_of(200)
    running = requests.start(tokens_of(30, 5), n=40)
    requests.scheduler.turn()
    requests.scheduler.stall = 1e-9  # so that chunks are as short as possible
    cancelled = requests.start(prompt)
    for _ in range(4):
        requests.scheduler.turn()
    done = cancelled.session.length
    assert 16 <= done < len(prompt) - 1
    requests.end(cancelled)
    assert requests.cache.entries == 1
    again = requests.start(prompt)
    requests.run()
    assert again.reused == done
    assert again.tokens == requests.alone(prompt, 6)
    assert running.tokens == requests.alone(running.prompt, 40)


def test_a_request_that_ends_before_it_has_begun_leaves_its_entry_as_it_was() -> None:
    requests, prompt = Requests(), tokens_of(50)
    context = prompt + requests.answer(prompt).tokens
    requests.end(requests.start([*context, 1, 2]))
    assert requests.answer([*context, 3, 4]).reused == len(context) - 1


def test_entries_of_another_partition_are_never_used() -> None:
    requests, prompt = Requests(), tokens_of(50)
    requests.answer(prompt, partition="one")
    assert requests.answer(prompt, partition="other").reused == 0
    assert requests.answer(prompt).reused == 0
    assert requests.answer(prompt, partition="one").reused == len(prompt) - 1


def test_a_mere_beginning_of_another_entry_is_dropped() -> None:
    requests, prompt = Requests(), tokens_of(100)
    requests.end(requests.start(prompt))  # nothing has been run of it
    assert requests.cache.entries == 0
    for each in (prompt[:60], prompt):
        requests.start(each, n=1)
    requests.run()
    (entry,) = requests.cache._idle
    assert entry.tokens.tolist() == prompt


@pytest.mark.slow
def test_eight_bits_a_value_can_be_shared_from_where_they_begin() -> None:
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 90}
    requests = Requests("wide", **options, prefill_step_size=50)  # quantised after 100 tokens
    system = tokens_of(120)
    requests.answer([*system, *tokens_of(30, 1)])
    assert requests.answer([*system, *tokens_of(30, 2)]).reused == len(system)
    assert requests.answer([*system[:95], *tokens_of(30, 3)]).reused == 0
    # A cache quantised at its own end shares nothing with others.
    requests.answer(system[:95])
    assert requests.answer(system[:95]).reused == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_where_a_prompts_end_is_quantised_a_later_one_begins_anew(bits: int) -> None:
    requests = Requests("wide", kv_bits=bits, kv_group_size=32, quantized_kv_start=0)
    system = tokens_of(60)
    for own in range(3):
        requests.answer([*system, *tokens_of(20, own)])
    assert requests.cache.entries == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["boundable", "latent"])
def test_prompts_that_a_window_holds_are_shared_and_longer_ones_are_not(kind: str) -> None:
    requests = Requests(kind, max_kv_size=40)
    long = tokens_of(90)
    requests.answer(long)
    assert requests.cache.entries == 0
    assert requests.answer([*long[:80], 4]).reused == 0
    requests.answer([*long[:30], 9])
    assert requests.answer([*long[:30], 5, 6]).reused == 30
    assert requests.answer([*long[:30], *tokens_of(60, 1)]).reused == 0


# --- memory ---


def test_the_entries_that_were_used_longest_ago_make_room() -> None:
    requests = Requests()
    prompts = [tokens_of(100, seed) for seed in range(5)]
    requests.answer(prompts[0])
    size = requests.cache.nbytes
    requests = Requests(max_bytes=3 * size)
    for prompt in prompts[:3]:
        requests.answer(prompt)
    assert (requests.cache.entries, requests.cache.evictions) == (3, 0)
    requests.answer(prompts[0])
    requests.answer(prompts[3])
    assert requests.cache.nbytes == 3 * size
    assert requests.answer(prompts[1]).reused == 0  # which evicts the third one
    assert requests.answer(prompts[0]).reused == len(prompts[0]) - 1
    assert requests.cache.evictions == 2
    assert requests.cache.make_room(size + 1) == 2 * size
    assert requests.cache.entries == 1
    assert requests.cache.make_room(ENOUGH) == size
    assert requests.cache.make_room(ENOUGH) == 0


@pytest.mark.parametrize("kind", ["plain", "state and full"])
def test_the_memory_of_entries_is_what_is_counted_and_goes_back(kind: str) -> None:
    requests = Requests(kind)
    requests.answer(tokens_of(20, 9))
    requests.cache.make_room(ENOUGH)
    mx.synchronize()
    before = mx.get_active_memory()
    system = tokens_of(600)
    for seed in range(1, 5):
        requests.start([*system, *tokens_of(100, seed)])
        requests.run()
    mx.synchronize()
    taken = mx.get_active_memory() - before
    # States may be views of a few rows, and masks and similar arrays are kept beside them.
    assert 0.9 * taken - 50_000 <= requests.cache.nbytes <= 1.1 * taken + 50_000
    requests.cache.make_room(ENOUGH)
    mx.synchronize()
    assert mx.get_active_memory() - before < 0.02 * taken


def address(values: mx.array) -> int:
    """Return the address of an array's values."""
    return int(np.asarray(memoryview(values)).ctypes.data)


def test_a_copy_holds_its_own_part_alone_and_is_written_where_it_stands() -> None:
    requests, prompt = Requests(), tokens_of(1000)
    requests.start(prompt)
    requests.run()
    (entry,) = requests.cache._idle
    size, start = entry.nbytes, mx.get_active_memory()
    session = requests.cache.lend([*prompt[:300], *prompt[:400]])
    assert session.nbytes == size * 768 // 1024
    del entry
    requests.cache.make_room(ENOUGH)
    mx.synchronize()
    assert abs(start - mx.get_active_memory() - (size - session.nbytes)) < 100
    assert session._target
    (before, *_) = map(address, held_arrays(session._target.cache))
    for response in requests.decoder.stream([*prompt[:300], *prompt[:400]], 9, session=session):
        assert response.reused_tokens == 300
    (after, *_) = map(address, held_arrays(session._target.cache))
    assert before == after


# --- random requests in random order ---

steps = st.tuples(
    st.sampled_from(["start", "start", "start", "turn", "turn", "cancel", "room"]),
    st.integers(0, 3),  # the conversation's number
    st.floats(0, 1),  # the share of an earlier one that it starts with
    st.integers(1, 60),  # its own tokens
    st.integers(1, 8),  # the answer's tokens
)


@pytest.mark.nightly(keep=5)
@pytest.mark.slow
@pytest.mark.parametrize("caches", CACHES)
@settings(max_examples=examples(2, long=72))
@given(
    st.lists(steps, min_size=8, max_size=24),
    st.sampled_from([ENOUGH, 300_000]),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_whatever_runs_beside_and_before_a_request_its_answer_is_its_own(
    caches: str, schedule: list, max_bytes: int, chunks: list[int]
) -> None:
    kind, options = CACHES[caches]
    requests = Requests(kind, max_bytes, **options)
    sizes = cycle(chunks)  # the chunks that other requests leave time for
    requests.scheduler._chunk = lambda: next(sizes)
    contexts: list[list[int]] = [tokens_of(40)]
    started: list[Request] = []
    for number, (change, which, share, own, n) in enumerate(schedule):
        if change == "start":
            context = contexts[which % len(contexts)]
            length = int(share * 1.3 * len(context))
            if caches == "dynamic":  # its context has 128 tokens
                length = min(length, 60)
            prompt = [*context[:length], *tokens_of(own, number)]
            partition = "ab"[which % 2]
            request = requests.start(prompt, n, partition)
            started.append(request)
        elif change == "turn":
            requests.scheduler.turn()
        elif change == "cancel" and requests.running:
            requests.end(requests.running[which % len(requests.running)])
        elif change == "room":
            requests.cache.make_room(100_000)
        for request in [r for r in requests.running if r.job.done]:
            requests.end(request)
            contexts.append([*request.prompt, *request.tokens])
        assert requests.cache.nbytes <= max_bytes
        assert len(requests.cache._lent) <= len(requests.running)
    requests.run()
    for request in started:
        assert request.tokens == requests.alone(request.prompt, 8)[: len(request.tokens)]
        assert request.reused < len(request.prompt)
    assert not requests.cache._lent


# --- on disk ---


@pytest.mark.slow
@each_kind
def test_a_cache_outlives_its_process(kind: str, tmp_path: Path) -> None:
    before, contexts = Requests(kind), []
    for seed in range(3):
        prompt = tokens_of(50 + seed, seed)
        contexts.append(prompt + before.answer(prompt, partition="key").tokens)
    directory = tmp_path / "made" / "cache"
    before.cache.save(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = list(directory.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
    assert not any(b"key" in path.read_bytes() for path in files if kind == "plain")
    after = Requests(kind)
    after.cache.load(directory, ENOUGH)
    assert after.cache.entries == 3
    assert after.answer([*contexts[1], 9], partition="another").reused == 0
    request = after.answer([*contexts[1], 1, 2], partition="key")
    assert request.reused == len(contexts[1]) - 1
    after.cache.save(directory)
    assert len(set(directory.iterdir()) & set(files)) == 2  # one was continued
    third = Requests(kind)
    third.cache.load(directory, ENOUGH)
    assert third.cache.entries == after.cache.entries
    shared = third.answer([*contexts[0][:40], 1, 2], partition="key")
    assert shared.reused == (40 if kind in CUTTABLE else 0)


@pytest.mark.slow
def test_what_was_used_last_is_what_the_disk_keeps(tmp_path: Path) -> None:
    requests, prompts = Requests(), [tokens_of(100, seed) for seed in range(4)]
    for prompt in prompts:
        requests.answer(prompt)
    requests.cache.save(tmp_path)
    sizes = {path.stat().st_size for path in tmp_path.iterdir()}
    again = Requests(max_bytes=2 * max(sizes))
    again.cache.load(tmp_path, 2 * max(sizes))
    assert again.cache.entries == 2
    again.answer(prompts[2])
    again.answer(prompts[0])
    again.cache.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    last = Requests()
    last.cache.load(tmp_path, ENOUGH)
    assert [last.answer(prompt).reused > 0 for prompt in prompts] == [True, False, True, False]


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def foreign(path: Path) -> None:
    mx.save_safetensors(str(path), {"weight": mx.zeros(3)})


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def others_may_write(path: Path) -> None:
    path.chmod(0o620)


SPOILED = [truncated, foreign, unreadable, pipe, others_may_write]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_file_that_cannot_be_used_is_left_out_with_a_line(
    spoil: Callable[[Path], None], tmp_path: Path, warnings: list[str]
) -> None:
    before, prompts = Requests(), [tokens_of(50, seed) for seed in range(2)]
    before.answer(prompts[0])
    before.cache.save(tmp_path)
    (path,) = tmp_path.iterdir()
    before.answer(prompts[1])
    before.cache.save(tmp_path)
    after = Requests()
    spoil(path)
    after.cache.load(tmp_path, ENOUGH)
    assert [after.answer(prompt).reused for prompt in prompts] == [0, 49]
    assert warnings.pop().startswith(f"{path}: ignored")
    if spoil is not unreadable:  # directories are never removed
        after.cache.save(tmp_path)
        healed = Requests()
        healed.cache.load(tmp_path, ENOUGH)
        assert [healed.answer(prompt).reused for prompt in prompts] == [49, 49]
        assert not warnings


def test_a_flipped_bit_anywhere_in_a_file_is_noticed(tmp_path: Path, warnings: list[str]) -> None:
    before = Requests()
    before.answer(tokens_of(50))
    before.cache.save(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 20):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        after = Requests()
        after.cache.load(tmp_path, ENOUGH)
        assert after.cache.entries == 0
        assert warnings.pop().startswith(f"{path}: ignored, since it is damaged")
    path.write_bytes(whole)
    after = Requests()
    after.cache.load(tmp_path, ENOUGH)
    assert after.cache.entries == 1


def test_other_models_and_other_options_do_not_use_a_file(
    tmp_path: Path, warnings: list[str]
) -> None:
    before = Requests()
    before.answer(tokens_of(50))
    before.cache.save(tmp_path)
    model = ARCHITECTURES["llama3"].model()
    same, tuned = PrefixCache(model), ARCHITECTURES["llama3"].model()
    tuned.update({"model": {"norm": {"weight": tuned.model.norm.weight * 1.001}}})
    same.load(tmp_path, ENOUGH)
    assert same.entries == 1
    for other in (
        PrefixCache(tuned),
        PrefixCache(model, CacheOptions(max_kv_size=64)),
    ):
        other.load(tmp_path, ENOUGH)
        assert other.entries == 0
        assert "another model, version or option" in warnings.pop()


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    requests = Requests()
    requests.answer(tokens_of(50))
    requests.cache.save(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    (tmp_path / f".{path.name}.0123456789abcdef.partial").write_bytes(whole[:1000])
    other = tmp_path / "model.safetensors"
    other.write_bytes(whole)
    after = Requests()
    after.cache.load(tmp_path, ENOUGH)
    after.cache.save(tmp_path)
    assert {*tmp_path.iterdir()} == {path, other}


def test_a_directory_that_others_may_write_to_is_not_used(
    tmp_path: Path, warnings: list[str]
) -> None:
    requests = Requests()
    requests.answer(tokens_of(50))
    requests.cache.save(tmp_path)
    files = {*tmp_path.iterdir()}
    tmp_path.chmod(0o777)
    after = Requests()
    after.cache.load(tmp_path, ENOUGH)
    assert after.cache.entries == 0
    after.answer(tokens_of(50, 1))
    after.cache.save(tmp_path)
    assert {*tmp_path.iterdir()} == files
    assert ["other users may write to it" in warnings.pop() for _ in range(2)] == [True, True]


def test_a_directory_that_cannot_be_written_or_read_is_reported(
    tmp_path: Path, warnings: list[str]
) -> None:
    requests = Requests()
    requests.answer(tokens_of(50))
    file = tmp_path / "file"
    file.write_text("not a directory")
    requests.cache.save(file)
    requests.cache.load(tmp_path / "nowhere", ENOUGH)
    assert "saved" in warnings.pop()
