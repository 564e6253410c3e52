"""Concurrent generations give each request's own output, whatever happens to the others."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlxspec
from mlxspec.drafting.accept import VerifiedStep
from mlxspec.drafting.drafter import Drafter
from mlxspec.drafting.planner import Planner
from mlxspec.drafting.sources import DrafterSource
from mlxspec.drafting.tree import DraftTree
from mlxspec.engine.joint import JointMode
from mlxspec.engine.target import Target
from mlxspec.errors import OptionError, PromptError
from mlxspec.generation import scheduler as schedulers
from mlxspec.generation.drafter_factories import DrafterFactory
from mlxspec.generation.request import Request, State
from mlxspec.generation.scheduler import Scheduler
from tests.support.architectures import ARCHITECTURES
from tests.support.demo import FLAT, endless_tokenizer, given_costs, stand_in_decoder
from tests.support.examples import examples
from tests.support.interrupts import functions_of, interrupted_anywhere
from tests.support.random_models import random_model
from tests.support.schedulers import submit

pytestmark = pytest.mark.slow

PROMPTS = [
    '[INST] Repeat the following phrase 4 times: "The red fox sees the river.". [/INST]',
    "The history of the",
    "one two three four one two three four one two",
    "[INST] Count from one to ten, twice. [/INST]",
]
# Llama 4's sequences take turns; the other models' share forwards.
KINDS = {
    "llama3": JointMode.SPLIT,
    "mamba2": JointMode.SPLIT,
    "deepseek_v3": JointMode.BLOCK,
    "llama4": JointMode.ALONE,
}


def new_decoder() -> mlxspec.AutoDecoder:
    decoder = stand_in_decoder(mlxspec.AutoDecoder, memory_tokens=0)
    decoder.costs = given_costs(FLAT)
    return decoder


def alone(decoder: mlxspec.Decoder, prompt: Any, n: int, **options: Any) -> list[int]:
    return [response.token for response in decoder.stream(prompt, n, **options)]


def small_decoder(kind: str = "llama3") -> mlxspec.Decoder:
    return mlxspec.Decoder(ARCHITECTURES[kind].model(), endless_tokenizer())


class Collected:
    """Collects a generation's tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None

    def add(self, response: mlxspec.GenerationResponse) -> None:
        self.tokens.append(response.token)
        self.reason = response.finish_reason


def test_each_generation_writes_what_it_writes_alone() -> None:
    decoder = new_decoder()
    text = "".join(response.text for response in decoder.stream(PROMPTS[2], 24))
    stop = text[len(text) // 2 :][:4]
    options: list[dict[str, Any]] = [{}, {"temp": 0.8, "seed": 4}, {"stop": [stop]}, {}]
    expected = [alone(decoder, p, 24, **own) for p, own in zip(PROMPTS, options, strict=True)]
    scheduler = Scheduler(new_decoder(), max_active=3)
    found = [Collected() for _ in PROMPTS]
    requests = [
        submit(scheduler, prompt, collected.add, 24, **own)
        for prompt, collected, own in zip(PROMPTS, found, options, strict=True)
    ]
    scheduler.run()
    assert [collected.tokens for collected in found] == expected
    assert all(request.done and request.error is None for request in requests)
    assert all(collected.reason for collected in found)
    assert found[2].reason == "stop"


def test_a_failed_joint_step_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = new_decoder()
    scheduler = Scheduler(decoder)
    share, failures = scheduler._share_steps, [RuntimeError("from MLX")]

    def fails_once() -> None:
        if failures:
            raise failures.pop()
        share()

    monkeypatch.setattr(scheduler, "_share_steps", fails_once)
    found = [Collected() for _ in PROMPTS]
    requests = [
        submit(scheduler, prompt, collected.add, 8)
        for prompt, collected in zip(PROMPTS, found, strict=True)
    ]
    scheduler.run()
    assert [str(request.error) for request in requests if request.error] == ["from MLX"]
    ended = [one.tokens for one, request in zip(found, requests, strict=True) if not request.error]
    expected = [alone(decoder, prompt, 8) for prompt in PROMPTS]
    assert len(ended) == len(PROMPTS) - 1
    assert all(tokens in expected for tokens in ended)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_mode_can_be_scheduled(kind: str) -> None:
    decoder = small_decoder(kind)
    assert decoder.loaded.joint_mode is KINDS[kind]
    prompts = [[7, 3, 9, 3], [5], [(7 * i) % 64 for i in range(40)]]
    expected = [alone(decoder, prompt, 12) for prompt in prompts]
    scheduler = Scheduler(decoder)
    found = [Collected() for _ in prompts]
    for prompt, collected in zip(prompts, found, strict=True):
        submit(scheduler, prompt, collected.add, 12)
    scheduler.run()
    assert [collected.tokens for collected in found] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_short_prompts_share_a_forward_where_the_model_allows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small_decoder(kind)
    prompts = [[(7 * i + n) % 64 for i in range(5 + 4 * n)] for n in range(4)]
    expected = [alone(decoder, prompt, 12) for prompt in prompts]
    chunks: list[int] = []
    run_chunk = Target._prefill_chunk

    def counted(target: Target, tokens: Any, *args: Any) -> None:
        chunks.append(len(tokens))
        run_chunk(target, tokens, *args)

    monkeypatch.setattr(Target, "_prefill_chunk", counted)
    scheduler, found, done = Scheduler(decoder), [Collected() for _ in prompts], []
    for prompt, collected in zip(prompts, found, strict=True):
        submit(scheduler, prompt, collected.add, 12, on_progress=lambda *pair: done.append(pair))
    scheduler.run()
    assert [collected.tokens for collected in found] == expected
    assert chunks == ([4, 8, 12, 16] if KINDS[kind] is JointMode.ALONE else [])
    assert {(length, length) for length in (4, 8, 12, 16)} <= {*done}


@pytest.mark.parametrize("kind", ["llama3", "llama4"])
def test_no_step_is_timed_with_the_forward_of_another_sequence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that take turns dispatch no forward ahead, which would run in another's step."""
    scheduler, steps = Scheduler(small_decoder(kind)), list[VerifiedStep]()

    def noted(request: Request, step: VerifiedStep, *others: float) -> None:
        steps.append(step)
        on_step(request, step, *others)

    on_step = Request.on_step
    monkeypatch.setattr(Request, "on_step", noted)
    for length in (6, 18):
        submit(scheduler, [7, 3, 9], Collected().add, length)
    scheduler.run()
    first, last = steps[:10], steps[12:]
    assert [step.ahead for step in first] == [KINDS[kind] is JointMode.SPLIT] * 10
    assert any(step.ahead for step in last)


def test_prompts_that_are_long_together_run_one_after_the_other() -> None:
    decoder = small_decoder()
    prompts = [[(7 * i + n) % 64 for i in range(120)] for n in range(3)]
    expected = [alone(decoder, prompt, 4) for prompt in prompts]
    scheduler, found = Scheduler(decoder), [Collected() for _ in prompts]
    for prompt, collected in zip(prompts, found, strict=True):
        submit(scheduler, prompt, collected.add, 4)
    with scheduler.running():
        scheduler.start_waiting()
        first = scheduler._short_ones(scheduler._running)
        assert [request.prompt for request in first] == prompts[:2]
        while scheduler.turn():
            pass
    assert [collected.tokens for collected in found] == expected


class Failing(Drafter):
    """A drafter that fails in its third step, or in ``begin``."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def begin(self, prompt: Any) -> None:
        if self._fault == "drafter's begin":
            raise RuntimeError("a drafter's begin's fault")
        self._last, self._steps = prompt[-1], 0

    def propose(self, max_depth: int) -> DraftTree:
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("a drafter's fault")
        return DraftTree.chain(self._last)

    def observe(self, step: VerifiedStep) -> None:
        self._last = step.tokens[-1]


def failing_progress(done: int, total: int) -> None:
    raise RuntimeError("a progress's fault")


@mlxspec.pure
def failing_processor(tokens: mx.array, logits: mx.array) -> mx.array:
    if len(tokens) > 6:
        raise RuntimeError("a processor's fault")
    return logits


@pytest.mark.parametrize(
    "fault", ["drafter", "drafter's begin", "processor", "consumer", "progress"]
)
def test_a_fault_ends_the_generation_that_has_it_and_no_other(fault: str) -> None:
    decoder = small_decoder()
    prompts = [[7, 3, 9, 3], [5, 8, 1], [2, 2, 4, 6]]
    expected = [alone(decoder, prompt, 12) for prompt in prompts]
    drafters = iter([mlxspec.PromptLookupDrafter(), Failing(fault), mlxspec.PromptLookupDrafter()])
    if fault.startswith("drafter"):
        decoder = mlxspec.Decoder(decoder.model, decoder.tokenizer, lambda: next(drafters))

    class Consumer(Collected):
        def add(self, response: mlxspec.GenerationResponse) -> None:
            super().add(response)
            if fault == "consumer" and len(self.tokens) == 3:
                raise RuntimeError("a consumer's fault")

    scheduler = Scheduler(decoder)
    found = [Collected(), Consumer(), Collected()]
    requests: list[Request] = []
    for index, (prompt, collected) in enumerate(zip(prompts, found, strict=True)):
        own: dict[str, Any] = {}
        if fault == "processor" and index == 1:
            own = {"logits_processors": [failing_processor]}
        if fault == "progress" and index == 1:
            own = {"on_progress": failing_progress}
        requests.append(submit(scheduler, prompt, collected.add, 12, **own))
    scheduler.run()
    assert [one.error and str(one.error) for one in requests] == [
        None,
        f"a {fault}'s fault",
        None,
    ]
    assert [found[0].tokens, found[2].tokens] == [expected[0], expected[2]]
    assert found[1].tokens == expected[1][: len(found[1].tokens)]
    assert len(found[1].tokens) < 12


def test_a_fault_of_a_drafter_that_is_planned_with_others_is_its_own() -> None:
    decoder = new_decoder()
    expected = [alone(decoder, prompt, 12) for prompt in PROMPTS[:3]]
    faults = iter(["", "drafter", ""])

    class Planned(DrafterFactory):
        def make(self, *args: object) -> Planner:
            fault = next(faults)
            extra = Failing(fault) if fault else mlxspec.PromptLookupDrafter()
            return Planner(given_costs(FLAT), [DrafterSource(extra)])

    scheduler = Scheduler(new_decoder())
    found = [Collected() for _ in expected]
    requests = [
        submit(scheduler, prompt, collected.add, 12, Planned())
        for prompt, collected in zip(PROMPTS, found, strict=False)
    ]
    scheduler.run()
    assert [one.error and str(one.error) for one in requests] == [
        None,
        "a drafter's fault",
        None,
    ]
    assert [found[0].tokens, found[2].tokens] == [expected[0], expected[2]]


def test_a_long_context_leaves_no_wide_slots_to_those_that_stay() -> None:
    decoder = small_decoder()
    scheduler = Scheduler(decoder, max_active=8)
    stays, prompt = Collected(), [5, 8, 1]
    expected = alone(decoder, prompt, 40)
    submit(scheduler, prompt, stays.add, 40)
    for number in range(6):
        submit(scheduler, [(number + 7 * i) % 64 for i in range(1200)], lambda response: None, 3)
    while len(stays.tokens) < 30:
        scheduler.turn()
    (slots, *_) = scheduler._batch._joint._slots  # type: ignore[union-attr]
    assert slots.capacity < 5000
    scheduler.run()
    assert stays.tokens == expected


def test_a_cancelled_generation_writes_nothing_more() -> None:
    decoder = small_decoder()
    expected = alone(decoder, [5, 8, 1], 20)
    scheduler = Scheduler(decoder, max_active=2)
    first, second, never = Collected(), Collected(), Collected()
    requests = [
        submit(scheduler, [7, 3, 9], first.add, 20),
        submit(scheduler, [5, 8, 1], second.add, 20),
        submit(scheduler, [4, 4], never.add, 20),
    ]
    while len(first.tokens) < 5:
        scheduler.turn()
    written = len(first.tokens)
    scheduler.cancel(requests[0])
    scheduler.cancel(requests[2])
    scheduler.cancel(requests[2])
    scheduler.run()
    assert len(first.tokens) == written
    assert (second.tokens, never.tokens) == (expected, [])
    assert all(request.done for request in requests)


def beside_a_long_prompt(scheduler: Scheduler) -> tuple[Collected, int]:
    """Generate while a prompt of 200 tokens is run.

    Returns:
        the running generation, and how many tokens it has got meanwhile.
    """
    running, late = Collected(), Collected()
    submit(scheduler, [7, 3, 9], running.add, 60)
    while len(running.tokens) < 2:
        scheduler.turn()
    before = len(running.tokens)
    submit(scheduler, [(7 * i) % 64 for i in range(200)], late.add, 4)
    while not late.tokens:
        scheduler.turn()
    return running, len(running.tokens) - before


def test_running_generations_go_on_while_a_long_prompt_is_run() -> None:
    scheduler = Scheduler(small_decoder(), stall=1e-6)  # chunks of 16 tokens
    running, meanwhile = beside_a_long_prompt(scheduler)
    assert meanwhile >= 200 // 16 - 1
    scheduler.run()
    assert len(running.tokens) == 60


def test_short_prompts_overtake_long_ones_that_are_due_later() -> None:
    scheduler = Scheduler(small_decoder(), stall=1e-6)
    scheduler._chunk = lambda: 256  # whatever this machine's speed
    order: list[str] = []

    def submit_one(name: str, tokens: int) -> None:
        prompt = [(7 * i + len(name)) % 64 for i in range(tokens)]
        submit(scheduler, prompt, lambda response: order.append(name), 1)

    submit_one("running", 2)
    submit_one("long", 1200)
    submit_one("shorter", 600)
    scheduler.turn()
    scheduler.turn()
    submit_one("short", 300)
    while len(order) < 3:
        scheduler.turn()
    submit_one("too late", 1000)
    scheduler.run()
    assert order == ["running", "short", "shorter", "long", "too late"]


def test_running_generations_wait_for_a_prompt_no_longer_than_a_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedulers, "_MOST_STEPS", 1e-9)  # the least instead of three
    scheduler = Scheduler(small_decoder(), stall=600)
    _, meanwhile = beside_a_long_prompt(scheduler)
    assert meanwhile >= 200 // 16 - 1
    scheduler.close()


def test_a_first_step_beside_a_prompt_says_how_long_the_next_ones_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedulers, "_MOST_STEPS", 1e-9)  # the least instead of three
    scheduler = Scheduler(small_decoder(), stall=1e-6)
    submit(scheduler, [7, 3, 9], lambda response: None, 60)
    late = submit(scheduler, [(7 * i) % 64 for i in range(200)], lambda response: None, 4)
    scheduler.turn(hurried=True)
    assert late.prefilled == 0
    scheduler.stall = 600
    scheduler.turn()
    assert late.prefilled == 16
    scheduler.close()


def test_the_next_step_waits_for_the_sequence_of_a_prompt_that_still_runs() -> None:
    scheduler = Scheduler(small_decoder(), stall=1e-6)  # chunks of 16 tokens
    first = submit(scheduler, [7, 3, 9], lambda response: None, 60)
    second = submit(scheduler, [5, 8, 1], lambda response: None, 4)
    while not second.done:
        scheduler.turn()
    assert first.sequence
    assert first.sequence.ahead
    third = submit(scheduler, [(7 * i) % 64 for i in range(100)], lambda response: None, 4)
    scheduler.turn()
    assert third.state is State.PREFILL
    assert not first.sequence.ahead
    while third.state is State.PREFILL:
        scheduler.turn()
    assert third.sequence
    assert third.sequence.ahead
    assert first.sequence.ahead
    scheduler.close()


def test_a_prompt_is_run_in_chunks_where_others_wait_for_the_turn() -> None:
    scheduler = Scheduler(small_decoder(), stall=1e-6)  # chunks of 16 tokens
    for hurried, most in ((True, 16), (False, 199)):
        done: list[int] = []
        submit(
            scheduler,
            [(7 * i + hurried) % 64 for i in range(200)],
            lambda response: None,
            1,
            on_progress=lambda so_far, total, done=done: done.append(so_far),
        )
        scheduler.turn(hurried)
        assert done[-1] == most
        scheduler.run()


def test_those_that_wait_come_in_order_and_all_come() -> None:
    decoder = small_decoder()
    scheduler = Scheduler(decoder, max_active=2)
    ended: list[int] = []
    for number in range(6):
        submit(
            scheduler,
            [number + 1],
            lambda response, number=number: response.finish_reason and ended.append(number),
            5,
        )
    scheduler.run()
    assert sorted(ended) == list(range(6))
    assert ended.index(0) < ended.index(3)


def test_what_many_generations_leave_behind_is_what_a_few_leave() -> None:
    decoder = small_decoder()
    scheduler = Scheduler(decoder, max_active=6)

    def run(count: int) -> int:
        for number in range(count):
            submit(scheduler, [7, 3, number % 64, 5], lambda response: None, 2 + number % 5)
        while scheduler.turn():
            pass
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        return mx.get_active_memory()

    few = run(10)
    assert run(examples(150, long=1000)) == few


def test_options_out_of_range_are_named() -> None:
    decoder = small_decoder()
    with pytest.raises(OptionError, match="max_active is 0"):
        Scheduler(decoder, max_active=0)
    with pytest.raises(PromptError):
        submit(Scheduler(decoder), [], print)


DRAFTINGS: list[tuple[type[mlxspec.Decoder], dict[str, Any]]] = [
    (mlxspec.PromptLookupDecoder, {"n_draft": 2, "ngram_max": 1}),
    (mlxspec.PromptLookupDecoder, {"n_draft": 0}),
    (mlxspec.LookaheadDecoder, {"window_size": 3, "ngram_size": 3, "guess_set_size": 2}),
]


@pytest.mark.parametrize(("kind", "parameters"), DRAFTINGS)
def test_a_generation_drafts_as_its_decoders_stream_does_with_the_same_parameters(
    kind: type[mlxspec.Decoder], parameters: dict[str, Any]
) -> None:
    def decoder() -> Any:
        new = stand_in_decoder(kind)
        new.costs = given_costs(FLAT)
        return new

    expected = [*decoder().stream(PROMPTS[2], 24, **parameters)]
    scheduled = decoder()
    scheduler = Scheduler(scheduled)
    found: list[mlxspec.GenerationResponse] = []
    submit(scheduler, PROMPTS[2], found.append, 24, **parameters)
    scheduler.run()
    assert [response.token for response in found] == [response.token for response in expected]
    assert found[-1].stats == expected[-1].stats


def test_without_parameters_a_generation_drafts_as_stream_does() -> None:
    decoder = stand_in_decoder(mlxspec.PromptLookupDecoder)
    found: list[mlxspec.GenerationResponse] = []
    scheduler = Scheduler(decoder)
    submit(scheduler, PROMPTS[2], found.append, 24)
    scheduler.run()
    assert found[-1].stats == [*decoder.stream(PROMPTS[2], 24)][-1].stats
    assert found[-1].stats.drafted > 0


def test_a_paused_generation_waits_and_the_others_go_on() -> None:
    """It then continues as if it had not been paused."""
    decoder = new_decoder()
    scheduler, first, second = Scheduler(decoder), Collected(), Collected()
    request = submit(scheduler, [1, 2, 3], first.add, 30)
    submit(scheduler, [4, 5], second.add, 12)
    with scheduler.running():
        while len(first.tokens) < 5:
            scheduler.turn()
        held = len(first.tokens)
        request.state = State.PAUSED
        while scheduler.turn():
            pass
        assert len(first.tokens) == held
        assert second.tokens == alone(decoder, [4, 5], 12)
        scheduler.has_read(request, request.unread)
        while scheduler.turn():
            pass
    assert first.tokens == alone(decoder, [1, 2, 3], 30)


@pytest.mark.parametrize("mode", [JointMode.SPLIT, JointMode.BLOCK])
def test_sequences_with_quantised_caches_run_beside_others(mode: JointMode) -> None:
    decoder = mlxspec.PromptLookupDecoder(random_model("llama", head_dim=32), endless_tokenizer())
    decoder.loaded.joint_mode = mode
    memory: list[dict[str, Any]] = [
        {},
        {"kv_bits": 8, "quantized_kv_start": 0},
        {"kv_bits": 4, "quantized_kv_start": 0},
        {"kv_bits": 8, "quantized_kv_start": 16},  # in the middle of the output
        {"kv_bits": 4, "quantized_kv_start": 20},
        {},
    ]
    prompts = [[7, 3, 9, 3, 7, number] for number in range(len(memory))]
    for own in memory:
        own |= {"kv_group_size": 32}
    expected = [alone(decoder, p, 32, **own) for p, own in zip(prompts, memory, strict=True)]
    scheduler, found = Scheduler(decoder), [Collected() for _ in prompts]
    for prompt, own, collected in zip(prompts, memory, found, strict=True):
        submit(scheduler, prompt, collected.add, 32, **own)
    scheduler.run()
    assert [collected.tokens for collected in found] == expected
    assert scheduler.steps < 40  # all share the same steps


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_generations_at_once_on_one_prompt_cache_the_second_is_refused(kind: str) -> None:
    decoder = small_decoder(kind)
    prompts = [1, 5, 9, 4], [1, 7, 3]
    caches = make_prompt_cache(decoder.model), make_prompt_cache(decoder.model)
    expected = [alone(decoder, prompt, 8, prompt_cache=caches[0]) for prompt in prompts]
    scheduler, found = Scheduler(decoder), [Collected(), Collected()]
    requests = [
        submit(scheduler, prompt, collected.add, 8, prompt_cache=caches[1])
        for prompt, collected in zip(prompts, found, strict=True)
    ]
    scheduler.run()
    assert [collected.tokens for collected in found] == [expected[0], []]
    assert requests[0].error is None
    assert "in use by another generation" in str(requests[1].error)
    assert alone(decoder, prompts[1], 8, prompt_cache=caches[1]) == expected[1]


def test_an_interrupt_as_prompts_take_turns_leaves_their_sessions_to_the_next() -> None:
    decoder = small_decoder()
    prompts = [[*range(1, 40)], [*range(2, 30)]]

    def prepare() -> list[mlxspec.Session]:
        return [mlxspec.Session() for _ in prompts]

    def run(sessions: list[mlxspec.Session]) -> None:
        scheduler = Scheduler(decoder, stall=float("inf"))
        for prompt, session in zip(prompts, sessions, strict=True):
            submit(scheduler, prompt, lambda response: None, 2, session=session)
        scheduler.run()

    moving = [one for one in functions_of(Scheduler) if one.__name__ in ("_prefill", "_forget")]
    for sessions in interrupted_anywhere(moving, prepare, run):
        for prompt, session in zip(prompts, sessions, strict=True):
            assert alone(decoder, prompt, 2, session=session) == alone(decoder, prompt, 2)
